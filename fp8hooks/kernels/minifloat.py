"""FP8 with a power-of-two scale a block; `fp8hooks.codecs.minifloat` is the definition, byte for byte."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.codecs.minifloat import Format
from fp8hooks.kernels import launch
from fp8hooks.kernels.common import (
    NUMBERS,
    all_at_most,
    as_floats,
    locate,
    native_fp8,
    noise,
    places,
    rounded,
    row_max,
    with_sign,
)
from fp8hooks.kernels.launch import Launch


@triton.jit
def _power_of_two(biased):
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round(scaled, M: tl.constexpr, BIAS: tl.constexpr, STEP: tl.constexpr, NATIVE: tl.constexpr):
    """The code of each float32 within the format's range, rounded to nearest, ties to even."""
    if NATIVE and M == 3:
        code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif NATIVE and M == 2:
        code = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        magnitude = tl.abs(scaled)
        drop: tl.constexpr = 23 - M
        # Adding a large power of two rounds to whole subnormal steps.
        small = (magnitude + STEP * 8388608.0).to(tl.int32, bitcast=True) & ((2 << M) - 1)
        kept = bits & 0x7FFFFFFF
        large = ((kept + ((1 << (drop - 1)) - 1) + ((kept >> drop) & 1)) >> drop) - ((127 - BIAS) << M)
        code = (tl.where(magnitude < STEP * (1 << M), small, large) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


@triton.jit
def _round_stochastically(scaled, random, M: tl.constexpr, BIAS: tl.constexpr, STEP: tl.constexpr):
    """As `_round`, up or down so that the mean is right; `random` is 24 bits."""
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = tl.abs(scaled)
    drop: tl.constexpr = 23 - M
    # Normal codes: a carry out of the bits that are dropped.
    large = (((bits & 0x7FFFFFFF) + (random >> (24 - drop))) >> drop) - ((127 - BIAS) << M)
    small = tl.floor(magnitude * (1 / STEP) + random.to(tl.float32) * 5.960464477539063e-08).to(tl.int32)
    return tl.where(magnitude < STEP * (1 << M), small, large), (bits >> 24) & 0x80


@triton.jit
def _codes(
    x, largest, seed, first_row,
    M: tl.constexpr, BIAS: tl.constexpr, STEP: tl.constexpr, INFINITY: tl.constexpr, CARRY: tl.constexpr,
    MAX: tl.constexpr, MAX_EXPONENT: tl.constexpr, LEAST_SCALE: tl.constexpr, TOP: tl.constexpr, TOP_MAX: tl.constexpr,
    NATIVE: tl.constexpr, TAME: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Codes and scales of rows; TAME ones are finite, and below the top of the range."""
    clean = x
    if not TAME:
        clean = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        largest = tl.max(tl.abs(clean), axis=1)
    biased = tl.maximum(((largest.to(tl.int32, bitcast=True) + CARRY) >> 23) - MAX_EXPONENT, LEAST_SCALE)
    scaled = clean * _power_of_two(254 - biased)[:, None]
    if not TAME:
        limit = tl.where(biased >= TOP, TOP_MAX, MAX)[:, None]
        scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
    if STOCHASTIC:
        random = tl.where((biased >= TOP)[:, None], 0, noise(seed, first_row, BLOCK, ROWS))
        code, sign = _round_stochastically(scaled, random, M, BIAS, STEP)
        code = tl.where(clean == 0, 0, tl.maximum(tl.minimum(code, INFINITY - 1), 1))
        code = (code | tl.where(x != x, 0, sign)).to(tl.uint8)
    else:
        # What is not zero takes a step.
        large_enough = with_sign(tl.maximum(tl.abs(scaled), STEP), x)
        code = _round(tl.where(clean == 0, scaled, large_enough), M, BIAS, STEP, NATIVE)
    if not TAME:
        infinity = tl.where(x < 0, INFINITY | 0x80, INFINITY)
        code = tl.where(tl.abs(x) == float("inf"), infinity, code.to(tl.int32))
        code = tl.where(x != x, 0x7F, code).to(tl.uint8)
    return code, biased


@triton.jit(do_not_specialize=NUMBERS)
def _encode(
    x_ptr, buffer_ptr,
    numel: tl.int64, scales_offset: tl.int64, seed: tl.int64,
    run: tl.int64, middle: tl.int64, middle_stride: tl.int64, outer_stride: tl.int64,
    M: tl.constexpr, BIAS: tl.constexpr, STEP: tl.constexpr, INFINITY: tl.constexpr, CARRY: tl.constexpr,
    MAX: tl.constexpr, MAX_EXPONENT: tl.constexpr, LEAST_SCALE: tl.constexpr, TOP: tl.constexpr, TOP_MAX: tl.constexpr,
    TAME_MAX: tl.constexpr, NATIVE: tl.constexpr, STOCHASTIC: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    scales_ptr = buffer_ptr + scales_offset
    tame = (first_row + ROWS) * BLOCK <= numel
    if tame:
        base, offsets = locate(first_row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, ROWS)
        x = as_floats(tl.load(x_ptr + base + offsets))
        largest = row_max(tl.abs(x))
        tame = all_at_most(largest, TAME_MAX)
        if tame:
            code, biased = _codes(
                x, largest, seed, first_row, M, BIAS, STEP, INFINITY, CARRY, MAX, MAX_EXPONENT, LEAST_SCALE, TOP,
                TOP_MAX, NATIVE, True, STOCHASTIC, BLOCK, ROWS,
            )  # fmt: skip
            tl.store(buffer_ptr + first_row * BLOCK + places(BLOCK, ROWS), code)
            tl.store(scales_ptr + first_row + tl.arange(0, ROWS), biased.to(tl.uint8))
    if not tame:
        for turn in range(ROWS):
            row = first_row + turn
            width = tl.minimum(numel - row * BLOCK, BLOCK)
            columns = tl.arange(0, BLOCK)[None, :]
            base, offsets = locate(row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, 1)
            x = as_floats(tl.load(x_ptr + base + offsets, mask=columns < width, other=0.0))
            code, biased = _codes(
                x, x, seed, row, M, BIAS, STEP, INFINITY, CARRY, MAX, MAX_EXPONENT, LEAST_SCALE, TOP, TOP_MAX, NATIVE,
                False, STOCHASTIC, BLOCK, 1,
            )  # fmt: skip
            tl.store(buffer_ptr + row * BLOCK + columns, code, mask=columns < width)
            tl.store(scales_ptr + row + tl.arange(0, 1), biased.to(tl.uint8), mask=tl.arange(0, 1) < width)


@triton.jit
def _values(
    code, biased, M: tl.constexpr, BIAS: tl.constexpr, INFINITY: tl.constexpr, NATIVE: tl.constexpr, TAME: tl.constexpr
):
    """The values (float32) of rows of codes and their scales; TAME ones are finite."""
    scale = _power_of_two(biased.to(tl.int32))[:, None]
    magnitude = code & 0x7F
    if NATIVE and M == 3:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    else:
        # Shifted, the seven low bits are those of a float16, but for its bias.
        half = ((code.to(tl.int16) << 8) & -0x8000) | (magnitude.to(tl.int16) << (10 - M))
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * (1 << (15 - BIAS)) * scale
    if not TAME:
        infinity = tl.where(code > 0x7F, float("-inf"), float("inf"))
        value = tl.where(magnitude == INFINITY, infinity, value)
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    return value


@triton.jit(do_not_specialize=NUMBERS)
def _decode(
    buffer_ptr, out_ptr,
    numel: tl.int64, scales_offset: tl.int64,
    run: tl.int64, middle: tl.int64, middle_stride: tl.int64, outer_stride: tl.int64,
    M: tl.constexpr, BIAS: tl.constexpr, INFINITY: tl.constexpr, NATIVE: tl.constexpr, NATIVE_BF16: tl.constexpr,
    LAYOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    scales_ptr = buffer_ptr + scales_offset
    tame = (first_row + ROWS) * BLOCK <= numel
    if tame:
        biased = tl.load(scales_ptr + first_row + tl.arange(0, ROWS))
        code = tl.load(buffer_ptr + first_row * BLOCK + places(BLOCK, ROWS))
        tame = tl.max(tl.max((code & 0x7F).to(tl.int32), 1), 0) < INFINITY
        if tame:
            base, offsets = locate(first_row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, ROWS)
            value = _values(code, biased, M, BIAS, INFINITY, NATIVE, True)
            tl.store(out_ptr + base + offsets, rounded(value, out_ptr.dtype.element_ty, NATIVE_BF16))
    if not tame:
        for turn in range(ROWS):
            row = first_row + turn
            width = tl.minimum(numel - row * BLOCK, BLOCK)
            columns = tl.arange(0, BLOCK)[None, :]
            biased = tl.load(scales_ptr + row + tl.arange(0, 1), mask=tl.arange(0, 1) < width, other=0)
            code = tl.load(buffer_ptr + row * BLOCK + columns, mask=columns < width, other=0)
            base, offsets = locate(row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, 1)
            value = _values(code, biased, M, BIAS, INFINITY, NATIVE, False)
            value = rounded(value, out_ptr.dtype.element_ty, NATIVE_BF16)
            tl.store(out_ptr + base + offsets, value, mask=columns < width)


@functools.cache
def _encode_constants(form: Format, dtype: torch.dtype) -> tuple[float, ...]:
    top = form.top_scale(dtype)
    # The largest number whose block has a scale below the top one.
    tame = float(torch.tensor(form.max) * 2.0 ** (top - 1 - 127))
    return (
        form.mantissa, form.bias, form.step, form.infinity, form.carry, form.max, form.max_exponent, form.least_scale,
        top, form.below_power, tame,
    )  # fmt: skip


def encode(
    form: Format,
    core: Tensor,
    buffer: Tensor,
    block_size: int,
    scales_offset: int,
    seed: int | None,
    native: bool | None = None,
) -> Launch | None:
    """`native` forces (or forbids) the hardware's FP8 conversion; the bytes are the same."""
    chosen = native_fp8(core.device) if native is None else native

    def constants() -> tuple[object, ...]:
        return *_encode_constants(form, core.dtype), chosen

    key = (form.mantissa, chosen)
    return launch.encode(_encode, key, constants, core, buffer, block_size, scales_offset, seed)


def decode(
    form: Format, buffer: Tensor, out: Tensor, block_size: int, scales_offset: int, native: bool | None = None
) -> Launch | None:
    """As `encode`, the other way."""
    chosen = native_fp8(out.device) if native is None else native

    def constants() -> tuple[object, ...]:
        return form.mantissa, form.bias, form.infinity, chosen

    return launch.decode(_decode, (form.mantissa, chosen), constants, buffer, out, block_size, scales_offset)
