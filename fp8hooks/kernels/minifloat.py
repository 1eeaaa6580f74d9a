"""FP8 with a power-of-two scale a block; `fp8hooks.codecs.minifloat` is the definition, byte for byte."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.codecs.minifloat import Format
from fp8hooks.kernels.common import launch, load_bits, native_bf16, native_fp8, noise, store_rounded, tile


@triton.jit
def _power_of_two(biased):
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round(magnitude, M: tl.constexpr, BIAS: tl.constexpr, STEP: tl.constexpr, NATIVE: tl.constexpr):
    """The code of each float32 from 0 to the format's largest, rounded to nearest, ties to even."""
    if NATIVE and M == 3:
        code = magnitude.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    elif NATIVE and M == 2:
        code = magnitude.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        bits = magnitude.to(tl.int32, bitcast=True)
        drop: tl.constexpr = 23 - M
        small = (magnitude + STEP * 8388608.0).to(tl.int32, bitcast=True) & ((2 << M) - 1)
        large = ((bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop) - ((127 - BIAS) << M)
        code = tl.where(magnitude < STEP * (1 << M), small, large)
    return code


@triton.jit
def _round_stochastically(magnitude, random, M: tl.constexpr, BIAS: tl.constexpr, STEP: tl.constexpr):
    """As `_round`, up or down so that the mean is right; `random` is 24 bits."""
    drop: tl.constexpr = 23 - M
    # Normal codes: a carry out of the bits that are dropped.
    large = ((magnitude.to(tl.int32, bitcast=True) + (random >> (24 - drop))) >> drop) - ((127 - BIAS) << M)
    small = tl.floor(magnitude * (1 / STEP) + random.to(tl.float32) * 5.960464477539063e-08).to(tl.int32)
    return tl.where(magnitude < STEP * (1 << M), small, large)


@triton.jit
def _value(magnitude, M: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr):
    """The float32 of each code without its sign."""
    if NATIVE and M == 3:
        value = magnitude.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        half = (magnitude << (10 - M)).to(tl.int16).to(tl.float16, bitcast=True)
        value = half.to(tl.float32) * (1 << (15 - BIAS))
    return value


# A seed is a number like any other: no variant of the kernel for some of them.
@triton.jit(do_not_specialize=["seed"])
def _encode(
    x_ptr, buffer_ptr, numel, scales_offset, seed,
    M: tl.constexpr, BIAS: tl.constexpr, STEP: tl.constexpr, INFINITY: tl.constexpr, CARRY: tl.constexpr,
    MAX: tl.constexpr, MAX_EXPONENT: tl.constexpr, LEAST_SCALE: tl.constexpr, TOP: tl.constexpr, TOP_MAX: tl.constexpr,
    NATIVE: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, offsets, inside = tile(numel, BLOCK, ROWS)
    bits = load_bits(x_ptr + offsets, inside)
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    # Bits of non-negative floats order as the floats do.
    amax = tl.max(tl.where(finite, magnitude, 0), axis=1)
    biased = tl.maximum(((amax + CARRY) >> 23) - MAX_EXPONENT, LEAST_SCALE)
    limit = tl.where(biased >= TOP, TOP_MAX, MAX)
    scaled = magnitude.to(tl.float32, bitcast=True) * _power_of_two(254 - biased)[:, None]
    scaled = tl.where(finite, tl.minimum(scaled, limit[:, None]), 0.0)
    if STOCHASTIC:
        random = tl.where((biased >= TOP)[:, None], 0, noise(seed, rows, BLOCK, ROWS))
        code = tl.minimum(_round_stochastically(scaled, random, M, BIAS, STEP), INFINITY - 1)
    else:
        code = _round(scaled, M, BIAS, STEP, NATIVE)
    code = tl.where((code == 0) & (magnitude != 0), 1, code)
    code = tl.where(magnitude == 0x7F800000, INFINITY, code)
    code = code | ((bits >> 24) & 0x80)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    tl.store(buffer_ptr + offsets, code.to(tl.uint8), mask=inside)
    tl.store(buffer_ptr + scales_offset + rows, biased.to(tl.uint8), mask=rows * BLOCK < numel)


@triton.jit
def _decode(
    buffer_ptr, out_ptr, numel, scales_offset,
    M: tl.constexpr, BIAS: tl.constexpr, INFINITY: tl.constexpr,
    NATIVE: tl.constexpr, NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, offsets, inside = tile(numel, BLOCK, ROWS)
    code = tl.load(buffer_ptr + offsets, mask=inside, other=0).to(tl.int32)
    biased = tl.load(buffer_ptr + scales_offset + rows, mask=rows * BLOCK < numel, other=127).to(tl.int32)
    magnitude = code & 0x7F
    value = _value(magnitude, M, BIAS, NATIVE) * _power_of_two(biased)[:, None]
    value = tl.where(magnitude == INFINITY, float("inf"), value)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits) | ((code & 0x80) << 24)
    store_rounded(out_ptr + offsets, bits.to(tl.float32, bitcast=True), inside, NATIVE_BF16)


@functools.cache
def _encode_constants(form: Format, dtype: torch.dtype) -> dict[str, float]:
    return {
        "M": form.mantissa,
        "BIAS": form.bias,
        "STEP": form.step,
        "INFINITY": form.infinity,
        "CARRY": form.carry,
        "MAX": form.max,
        "MAX_EXPONENT": form.max_exponent,
        "LEAST_SCALE": form.least_scale,
        "TOP": form.top_scale(dtype),
        "TOP_MAX": form.below_power,
    }


def encode(
    form: Format,
    flat: Tensor,
    buffer: Tensor,
    block_size: int,
    scales_offset: int,
    seed: int | None,
    native: bool | None = None,
) -> bool:
    """`native` forces (or forbids) the hardware's FP8 conversion; the bytes are the same."""
    native = native_fp8(flat.device) if native is None else native
    args = (flat, buffer, flat.numel(), scales_offset)
    constants = {**_encode_constants(form, flat.dtype), "NATIVE": native, "seed": seed}
    launch(_encode, flat, flat.numel(), block_size, *args, **constants)
    return True


def decode(
    form: Format, buffer: Tensor, out: Tensor, block_size: int, scales_offset: int, native: bool | None = None
) -> bool:
    """As `encode`, the other way."""
    native = native_fp8(out.device) if native is None else native
    args = (buffer, out, out.numel(), scales_offset)
    constants = {"M": form.mantissa, "BIAS": form.bias, "INFINITY": form.infinity}
    launch(
        _decode, out, out.numel(), block_size, *args, NATIVE=native, NATIVE_BF16=native_bf16(out.device), **constants
    )
    return True
