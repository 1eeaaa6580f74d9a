"""FP8 E4M3 with a power-of-two scale a block; `fp8hooks.codecs.fp8_e4m3` is the definition, byte for byte."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.codecs import FLOATS, fp8_e4m3
from fp8hooks.kernels.common import launch, load_bits, native_bf16, native_fp8, store_rounded


@triton.jit
def _power_of_two(biased):
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round_e4m3(magnitude, NATIVE: tl.constexpr):
    """The code of each float32 in 0..416, rounded to nearest, ties to even."""
    if NATIVE:
        code = magnitude.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        # Adding 2**14 leaves the multiple of 2**-9 (the subnormal step) in the last bits; for larger values, round
        # the 20 bits of mantissa that do not fit, and move the exponent's bias from 127 to 7.
        small = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xF
        bits = magnitude.to(tl.int32, bitcast=True)
        large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        code = tl.where(magnitude < 0.015625, small, large)
    return code


@triton.jit
def _value_e4m3(magnitude, NATIVE: tl.constexpr):
    """The float32 of each code in 0..0x7F."""
    if NATIVE:
        value = magnitude.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        value = (magnitude << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return value


@triton.jit
def _encode(
    x_ptr, buffer_ptr, numel, scales_offset,
    TOP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offsets < numel
    bits = load_bits(x_ptr + offsets, inside)
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    # Bits of non-negative floats order as the floats do.
    amax = tl.max(tl.where(finite, magnitude, 0), axis=1)
    biased = tl.maximum(((amax + 0x2FFFFF) >> 23) - 8, 3)
    limit = tl.where(biased >= TOP, 240.0, 416.0)
    scaled = magnitude.to(tl.float32, bitcast=True) * _power_of_two(254 - biased)[:, None]
    scaled = tl.where(finite, tl.minimum(scaled, limit[:, None]), 0.0)
    code = _round_e4m3(scaled, NATIVE)
    code = tl.where((code == 0) & (magnitude != 0), 1, code)
    code = tl.where(magnitude == 0x7F800000, 0x7E, code)
    code = code | ((bits >> 24) & 0x80)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    tl.store(buffer_ptr + offsets, code.to(tl.uint8), mask=inside)
    tl.store(buffer_ptr + scales_offset + rows, biased.to(tl.uint8), mask=rows * BLOCK < numel)


@triton.jit
def _decode(
    buffer_ptr, out_ptr, numel, scales_offset,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr, NATIVE_BF16: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offsets < numel
    code = tl.load(buffer_ptr + offsets, mask=inside, other=0).to(tl.int32)
    biased = tl.load(buffer_ptr + scales_offset + rows, mask=rows * BLOCK < numel, other=127).to(tl.int32)
    magnitude = code & 0x7F
    value = _value_e4m3(magnitude, NATIVE) * _power_of_two(biased)[:, None]
    value = tl.where(magnitude == 0x7E, float("inf"), value)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits) | ((code & 0x80) << 24)
    store_rounded(out_ptr + offsets, bits.to(tl.float32, bitcast=True), inside, NATIVE_BF16)


_TOP = {dtype: fp8_e4m3.top_scale(dtype) for dtype in FLOATS}


def encode(flat: Tensor, buffer: Tensor, block_size: int, scales_offset: int, native: bool | None = None) -> bool:
    """`native` forces (or forbids) the hardware's FP8 conversion; the bytes are the same."""
    native = native_fp8(flat.device) if native is None else native
    args = (flat, buffer, flat.numel(), scales_offset)
    launch(_encode, flat, flat.numel(), block_size, *args, TOP=_TOP[flat.dtype], NATIVE=native)
    return True


def decode(buffer: Tensor, out: Tensor, block_size: int, scales_offset: int, native: bool | None = None) -> bool:
    """As `encode`, the other way."""
    native = native_fp8(out.device) if native is None else native
    args = (buffer, out, out.numel(), scales_offset)
    launch(_decode, out, out.numel(), block_size, *args, NATIVE=native, NATIVE_BF16=native_bf16(out.device))
    return True
