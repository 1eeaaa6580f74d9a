"""Integers with a scale and an offset a block; `fp8hooks.codecs.integers` is the definition, byte for byte."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.codecs import integers
from fp8hooks.kernels.common import (
    bf16_bits_up,
    launch,
    load_bits,
    native_bf16,
    store_rounded,
    tile,
    uniform,
)


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _places(rows, numel, BLOCK: tl.constexpr):
    """Where a row's bytes begin, and how many elements it has: the last row may be short."""
    width = tl.minimum(numel - rows * BLOCK, BLOCK)
    return rows * (BLOCK + BLOCK // 4), width


@triton.jit
def _store_codes(
    buffer_ptr, code, rows, offsets, inside, numel, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    if BITS == 8:
        tl.store(buffer_ptr + offsets, code.to(tl.int8).to(tl.uint8, bitcast=True), mask=inside)
    else:
        start, width = _places(rows, numel, BLOCK)
        columns = tl.arange(0, BLOCK)[None, :]
        high = (code >> 2).to(tl.int8).to(tl.uint8, bitcast=True)
        tl.store(buffer_ptr + start[:, None] + columns, high, mask=inside)
        low = tl.where(inside, code & 3, 0) << ((columns % 4) * 2)
        packed = tl.sum(tl.reshape(low, [ROWS, BLOCK // 4, 4]), axis=2)
        quarters = tl.arange(0, BLOCK // 4)[None, :]
        low_ptr = buffer_ptr + (start + width)[:, None] + quarters
        tl.store(low_ptr, packed.to(tl.uint8), mask=quarters * 4 < width[:, None])


@triton.jit
def _load_codes(buffer_ptr, rows, offsets, inside, numel, BITS: tl.constexpr, BLOCK: tl.constexpr):
    if BITS == 8:
        code = tl.load(buffer_ptr + offsets, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    else:
        start, width = _places(rows, numel, BLOCK)
        columns = tl.arange(0, BLOCK)[None, :]
        high = tl.load(buffer_ptr + start[:, None] + columns, mask=inside, other=0).to(tl.int8, bitcast=True)
        low = tl.load(buffer_ptr + (start + width)[:, None] + columns // 4, mask=inside, other=0).to(tl.int32)
        code = (high.to(tl.int32) << 2) | ((low >> ((columns % 4) * 2)) & 3)
    return code


# A seed is a number like any other: no variant of the kernel for some of them.
@triton.jit(do_not_specialize=["seed"])
def _encode(
    x_ptr, buffer_ptr, numel, scales_offset, seed,
    TOP: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    SHIFT: tl.constexpr = 1 << (BITS - 1)
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
    span = (largest - offset) * tl.where(one_sided, 1.0 / (2 * SHIFT - 3), 1.0 / (SHIFT - 2))
    scale_bits = bf16_bits_up(span)
    inverse = tl.math.div_rn(1.0, _as_float(scale_bits << 16))

    clean = tl.where(finite, magnitude, 0)
    steps = (_as_float(clean) - offset[:, None]) * inverse[:, None]
    steps = tl.where(finite, steps, 0.0)
    if STOCHASTIC:
        rounded = tl.floor(steps + uniform(seed, rows, BLOCK, ROWS))
        rounded = tl.minimum(rounded, tl.where(one_sided, 2.0 * SHIFT - 3, SHIFT - 2.0)[:, None])
    else:
        # Adding and taking away 1.5 * 2**23 rounds to the nearest integer, ties to even.
        rounded = (steps + 12582912.0) - 12582912.0
    towards_zero = tl.maximum(steps - 0.015625, 0.0).to(tl.int32)
    code = tl.where((largest > TOP)[:, None], towards_zero, rounded.to(tl.int32))
    symmetric = tl.where((code == 0) & (clean != 0), 1, code)
    symmetric = tl.where(magnitude == 0x7F800000, SHIFT - 1, symmetric)
    symmetric = tl.where(bits < 0, -symmetric, symmetric)
    symmetric = tl.where(magnitude > 0x7F800000, -SHIFT, symmetric)
    shifted = tl.where(magnitude == 0x7F800000, SHIFT - 2, code - SHIFT)
    shifted = tl.where(magnitude > 0x7F800000, SHIFT - 1, shifted)
    code = tl.where(one_sided[:, None], shifted, symmetric)
    _store_codes(buffer_ptr, code, rows, offsets, inside, numel, BITS, BLOCK, ROWS)
    word = offset_bits | scale_bits
    word = tl.where(negative, word | -0x80000000, word)
    words = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int32))
    tl.store(words + rows, word.to(tl.int32), mask=rows * BLOCK < numel)


@triton.jit
def _decode(
    buffer_ptr, out_ptr, numel, scales_offset,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NATIVE_BF16: tl.constexpr,
):  # fmt: skip
    SHIFT: tl.constexpr = 1 << (BITS - 1)
    rows, offsets, inside = tile(numel, BLOCK, ROWS)
    code = _load_codes(buffer_ptr, rows, offsets, inside, numel, BITS, BLOCK)
    words = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int32))
    word = tl.load(words + rows, mask=rows * BLOCK < numel, other=0)
    offset = _as_float(word & -0x10000)
    one_sided = offset != 0.0
    scale = _as_float(word << 16)
    scale = tl.where(offset < 0.0, -scale, scale)
    steps = code + tl.where(one_sided, SHIFT, 0)[:, None]
    value = steps.to(tl.float32) * scale[:, None] + offset[:, None]
    # An infinity is the last code but one in a one-sided block, with the block's sign.
    limit = tl.where(one_sided, SHIFT - 2, SHIFT - 1)[:, None]
    upward = (code == limit) & ((offset >= 0.0)[:, None])
    downward = tl.where(one_sided[:, None], (code == limit) & ((offset < 0.0)[:, None]), code == 1 - SHIFT)
    value = tl.where(upward, float("inf"), tl.where(downward, float("-inf"), value))
    value = tl.where(code == tl.where(one_sided, SHIFT - 1, -SHIFT)[:, None], float("nan"), value)
    store_rounded(out_ptr + offsets, value, inside, NATIVE_BF16)


def encode(bits: int, flat: Tensor, buffer: Tensor, block_size: int, scales_offset: int, seed: int | None) -> bool:
    args = (flat, buffer, flat.numel(), scales_offset)
    launch(_encode, flat, flat.numel(), block_size, *args, seed=seed, BITS=bits, TOP=integers.TOP[flat.dtype])
    return True


def decode(bits: int, buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> bool:
    args = (buffer, out, out.numel(), scales_offset)
    launch(_decode, out, out.numel(), block_size, *args, BITS=bits, NATIVE_BF16=native_bf16(out.device))
    return True
