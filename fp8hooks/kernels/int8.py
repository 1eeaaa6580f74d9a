"""INT8 with a scale and an offset a block; `fp8hooks.codecs.int8` is the definition, byte for byte."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.codecs import int8
from fp8hooks.kernels.common import launch, load_bits, native_bf16, store_rounded, tile


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _encode(
    x_ptr, buffer_ptr, numel, scales_offset,
    TOP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, offsets, inside = tile(numel, BLOCK, ROWS)
    bits = load_bits(x_ptr + offsets, inside)
    magnitude = bits & 0x7FFFFFFF
    finite = inside & (magnitude < 0x7F800000)
    counted = inside & (magnitude <= 0x7F800000)  # what has a sign: all but NaN
    # Bits of non-negative floats order as the floats do.
    largest_bits = tl.max(tl.where(finite, magnitude, 0), axis=1)
    least_bits = tl.min(tl.where(finite, magnitude, 0x7F800000), axis=1)
    some_negative = tl.max(tl.where(counted & (bits < 0), 1, 0), axis=1)
    some_positive = tl.max(tl.where(counted & (bits >= 0), 1, 0), axis=1)
    one_sided = (some_negative != some_positive) & (least_bits < 0x7F800000)
    offset_bits = tl.where(one_sided, least_bits, 0) & -0x10000
    one_sided = offset_bits != 0
    negative = one_sided & (some_negative != 0)
    largest = _as_float(largest_bits)
    offset = _as_float(offset_bits)
    span = (largest - offset) * tl.where(one_sided, 0.003952569169960474, 0.007936507936507936)
    span = tl.maximum(span, 1.1754943508222875e-38)
    scale_bits = (span.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    inverse = tl.math.div_rn(1.0, _as_float(scale_bits << 16))

    clean = tl.where(finite, magnitude, 0)
    steps = (_as_float(clean) - offset[:, None]) * inverse[:, None]
    steps = tl.where(finite, steps, 0.0)
    # Adding and taking away 1.5 * 2**23 rounds to the nearest integer, ties to even.
    nearest = ((steps + 12582912.0) - 12582912.0).to(tl.int32)
    towards_zero = tl.maximum(steps - 0.015625, 0.0).to(tl.int32)
    code = tl.where((largest > TOP)[:, None], towards_zero, nearest)
    symmetric = tl.where((code == 0) & (clean != 0), 1, code)
    symmetric = tl.where(magnitude == 0x7F800000, 127, symmetric)
    symmetric = tl.where(bits < 0, -symmetric, symmetric)
    symmetric = tl.where(magnitude > 0x7F800000, -128, symmetric)
    shifted = tl.where(magnitude == 0x7F800000, 126, code - 128)
    shifted = tl.where(magnitude > 0x7F800000, 127, shifted)
    code = tl.where(one_sided[:, None], shifted, symmetric)
    tl.store(buffer_ptr + offsets, code.to(tl.int8).to(tl.uint8, bitcast=True), mask=inside)
    word = offset_bits | scale_bits
    word = tl.where(negative, word | -0x80000000, word)
    words = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int32))
    tl.store(words + rows, word.to(tl.int32), mask=rows * BLOCK < numel)


@triton.jit
def _decode(
    buffer_ptr, out_ptr, numel, scales_offset,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, NATIVE_BF16: tl.constexpr,
):  # fmt: skip
    rows, offsets, inside = tile(numel, BLOCK, ROWS)
    code = tl.load(buffer_ptr + offsets, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    words = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int32))
    word = tl.load(words + rows, mask=rows * BLOCK < numel, other=0)
    offset = _as_float(word & -0x10000)
    one_sided = offset != 0.0
    scale = _as_float(word << 16)
    scale = tl.where(offset < 0.0, -scale, scale)
    steps = code + tl.where(one_sided, 128, 0)[:, None]
    value = steps.to(tl.float32) * scale[:, None] + offset[:, None]
    # An infinity is code 126 in a one-sided block, with the block's sign, and 127 or -127 in a symmetric one.
    limit = tl.where(one_sided, 126, 127)[:, None]
    upward = (code == limit) & ((offset >= 0.0)[:, None])
    downward = tl.where(one_sided[:, None], (code == limit) & ((offset < 0.0)[:, None]), code == -127)
    value = tl.where(upward, float("inf"), tl.where(downward, float("-inf"), value))
    value = tl.where(code == tl.where(one_sided, 127, -128)[:, None], float("nan"), value)
    store_rounded(out_ptr + offsets, value, inside, NATIVE_BF16)


def encode(flat: Tensor, buffer: Tensor, block_size: int, scales_offset: int) -> bool:
    args = (flat, buffer, flat.numel(), scales_offset)
    launch(_encode, flat, flat.numel(), block_size, *args, TOP=int8.TOP[flat.dtype])
    return True


def decode(buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> bool:
    args = (buffer, out, out.numel(), scales_offset)
    launch(_decode, out, out.numel(), block_size, *args, NATIVE_BF16=native_bf16(out.device))
    return True
