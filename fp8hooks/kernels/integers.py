"""Integers with a scale and an offset a block; `fp8hooks.codecs.integers` is the definition, byte for byte."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.codecs import integers
from fp8hooks.kernels.common import (
    NUMBERS,
    all_at_most,
    bf16_bits_up,
    inside,
    load,
    load_floats,
    load_rows,
    locate,
    native_bf16,
    row_max,
    store,
    store_floats,
    store_rows,
    uniform,
)
from fp8hooks.kernels.launch import launch, layout_of, signed


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _tame_codes(
    x, low, high, seed, first_row,
    SHIFT: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Codes, scale and offset words of rows that are whole, finite, and far enough from the end of the range."""
    negative = high < 0
    largest = tl.maximum(tl.abs(low), tl.abs(high))
    least = tl.where(negative | (low > 0), tl.minimum(tl.abs(low), tl.abs(high)), 0.0)
    offset_bits = least.to(tl.int32, bitcast=True) & -0x10000
    one_sided = offset_bits != 0
    offset = _as_float(offset_bits)
    scale_bits = bf16_bits_up((largest - offset) * tl.where(one_sided, 1.0 / (2 * SHIFT - 3), 1.0 / (SHIFT - 2)))
    inverse = tl.math.div_rn(1.0, _as_float(scale_bits << 16))
    steps = (tl.abs(x) - offset[:, None]) * inverse[:, None]
    if STOCHASTIC:
        steps = tl.floor(steps + uniform(seed, first_row, BLOCK, ROWS))
        steps = tl.minimum(steps, tl.where(one_sided, 2.0 * SHIFT - 3, SHIFT - 2.0)[:, None])
    # In a symmetric row what is not zero takes a step, and has a sign; a one-sided one has neither zeros nor signs.
    steps = tl.maximum(steps, tl.where(one_sided, 0.0, 0.51)[:, None])
    sign = x.to(tl.int32, bitcast=True) & tl.where(one_sided, 0, -0x80000000)[:, None]
    steps = tl.where(x == 0, 0.0, _as_float(steps.to(tl.int32, bitcast=True) | sign))
    # Adding 1.5 * 2**23 leaves the nearest integer, ties to even, in the lowest bits.
    code = (steps + tl.where(one_sided, 12582912.0 - SHIFT, 12582912.0)[:, None]).to(tl.int32, bitcast=True)
    word = offset_bits | scale_bits
    return code, tl.where(one_sided & negative, word | -0x80000000, word)


@triton.jit
def _wild_codes(
    x, seed, first_row, numel,
    TOP: tl.constexpr, SHIFT: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As `_tame_codes`, for any rows."""
    mask = inside(first_row, numel, BLOCK, ROWS)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    finite = mask & (magnitude < 0x7F800000)
    counted = mask & (magnitude <= 0x7F800000)  # what has a sign: all but NaN
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
    scale_bits = bf16_bits_up((largest - offset) * tl.where(one_sided, 1.0 / (2 * SHIFT - 3), 1.0 / (SHIFT - 2)))
    inverse = tl.math.div_rn(1.0, _as_float(scale_bits << 16))
    clean = tl.where(finite, magnitude, 0)
    steps = (_as_float(clean) - offset[:, None]) * inverse[:, None]
    steps = tl.where(finite, steps, 0.0)
    if STOCHASTIC:
        rounded = tl.floor(steps + uniform(seed, first_row, BLOCK, ROWS))
        rounded = tl.minimum(rounded, tl.where(one_sided, 2.0 * SHIFT - 3, SHIFT - 2.0)[:, None])
    else:
        rounded = (steps + 12582912.0) - 12582912.0
    towards_zero = tl.maximum(steps - 0.015625, 0.0).to(tl.int32)
    code = tl.where((largest > TOP)[:, None], towards_zero, rounded.to(tl.int32))
    symmetric = tl.where((code == 0) & (clean != 0), 1, code)
    symmetric = tl.where(magnitude == 0x7F800000, SHIFT - 1, symmetric)
    symmetric = tl.where(bits < 0, -symmetric, symmetric)
    symmetric = tl.where(magnitude > 0x7F800000, -SHIFT, symmetric)
    shifted = tl.where(magnitude == 0x7F800000, SHIFT - 2, code - SHIFT)
    shifted = tl.where(magnitude > 0x7F800000, SHIFT - 1, shifted)
    wild = tl.max((mask & (magnitude >= 0x7F800000)).to(tl.int32), axis=1)
    word = offset_bits | scale_bits | (wild << 15)
    return tl.where(one_sided[:, None], shifted, symmetric), tl.where(negative, word | -0x80000000, word)


@triton.jit
def _tens(first_row, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """For codes of 10 bits: where rows begin, [ROWS, 1], and how many elements they have; the last may be short."""
    rows = tl.arange(0, ROWS)[:, None]
    width = tl.minimum(numel - first_row * BLOCK - rows * BLOCK, BLOCK).to(tl.int32)
    return rows * (BLOCK + BLOCK // 4), width


@triton.jit
def _low_places(columns):
    """For codes of 10 bits: which byte holds an element's lower two bits, and from which of its bits."""
    return columns // 16 * 4 + columns % 4, columns % 16 // 4 * 2


@triton.jit(do_not_specialize=NUMBERS)
def _encode(
    x_ptr, buffer_ptr,
    numel: tl.int64, scales_offset: tl.int64, seed: tl.int64,
    run: tl.int64, middle: tl.int64, middle_stride: tl.int64, outer_stride: tl.int64,
    TOP: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    SHIFT: tl.constexpr = 1 << (BITS - 1)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    full = (first_row + ROWS) * BLOCK <= numel
    base, offsets = locate(first_row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, ROWS)
    x = load_floats(x_ptr + base + offsets, full, first_row, numel, BLOCK, ROWS)
    high, low = row_max(x), -row_max(-x)
    if full & all_at_most(tl.maximum(high, -low, propagate_nan=tl.PropagateNan.ALL), TOP):
        code, word = _tame_codes(x, low, high, seed, first_row, SHIFT, STOCHASTIC, BLOCK, ROWS)
    else:
        code, word = _wild_codes(x, seed, first_row, numel, TOP, SHIFT, STOCHASTIC, BLOCK, ROWS)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    if BITS == 8:
        codes_ptr = (buffer_ptr + first_row * BLOCK).to(tl.pointer_type(tl.int8))
        store(codes_ptr + (rows[:, None] * BLOCK + columns), code.to(tl.int8), full, first_row, numel, BLOCK, ROWS)
    else:
        starts, width = _tens(first_row, numel, BLOCK, ROWS)
        row_ptr = buffer_ptr + first_row * (BLOCK + BLOCK // 4)
        high_ptr = row_ptr.to(tl.pointer_type(tl.int8)) + (starts + columns)
        store(high_ptr, (code >> 2).to(tl.int8), full, first_row, numel, BLOCK, ROWS)
        _, shift = _low_places(columns)
        low_bits = tl.where(columns < width, code & 3, 0) << shift
        packed = tl.sum(tl.reshape(low_bits, [ROWS * BLOCK // 16, 4, 4]), axis=1)
        packed = tl.reshape(packed, [ROWS, BLOCK // 4]).to(tl.uint8)
        places = tl.arange(0, BLOCK // 4)[None, :]
        if full:
            tl.store(row_ptr + (rows[:, None] * (BLOCK + BLOCK // 4) + BLOCK + places), packed)
        else:
            tl.store(row_ptr + (starts + width + places), packed, mask=places // 4 * 16 < width)
    words_ptr = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int32)) + first_row
    store_rows(words_ptr, word.to(tl.int32), full, first_row, numel, BLOCK, ROWS)


@triton.jit(do_not_specialize=NUMBERS)
def _decode(
    buffer_ptr, out_ptr,
    numel: tl.int64, scales_offset: tl.int64,
    run: tl.int64, middle: tl.int64, middle_stride: tl.int64, outer_stride: tl.int64,
    BITS: tl.constexpr, NATIVE_BF16: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    SHIFT: tl.constexpr = 1 << (BITS - 1)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    full = (first_row + ROWS) * BLOCK <= numel
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    if BITS == 8:
        codes_ptr = (buffer_ptr + first_row * BLOCK).to(tl.pointer_type(tl.int8))
        code = load(codes_ptr + (rows[:, None] * BLOCK + columns), full, first_row, numel, BLOCK, ROWS).to(tl.int32)
    else:
        starts, width = _tens(first_row, numel, BLOCK, ROWS)
        row_ptr = buffer_ptr + first_row * (BLOCK + BLOCK // 4)
        byte, shift = _low_places(columns)
        high_ptr = row_ptr.to(tl.pointer_type(tl.int8)) + (starts + columns)
        if full:
            high = tl.load(high_ptr).to(tl.int32)
            low = tl.load(row_ptr + (rows[:, None] * (BLOCK + BLOCK // 4) + BLOCK + byte)).to(tl.int32)
        else:
            high = tl.load(high_ptr, mask=columns < width, other=0).to(tl.int32)
            low = tl.load(row_ptr + (starts + width + byte), mask=columns < width, other=0).to(tl.int32)
        code = (high << 2) | ((low >> shift) & 3)
    words_ptr = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int32)) + first_row
    word = load_rows(words_ptr, full, first_row, numel, BLOCK, ROWS)
    offset = _as_float(word & -0x10000)
    one_sided = offset != 0.0
    scale = _as_float((word & 0x7FFF) << 16)
    scale = tl.where(offset < 0.0, -scale, scale)
    steps = code.to(tl.float32) + tl.where(one_sided, 1.0 * SHIFT, 0.0)[:, None]
    value = steps * scale[:, None] + offset[:, None]
    if tl.max(word & 0x8000, 0) != 0:
        # An infinity is the last code but one in a one-sided row, with the row's sign.
        limit = tl.where(one_sided, SHIFT - 2, SHIFT - 1)[:, None]
        upward = (code == limit) & ((offset >= 0.0)[:, None])
        downward = tl.where(one_sided[:, None], (code == limit) & ((offset < 0.0)[:, None]), code == 1 - SHIFT)
        value = tl.where(upward, float("inf"), tl.where(downward, float("-inf"), value))
        value = tl.where(code == tl.where(one_sided, SHIFT - 1, -SHIFT)[:, None], float("nan"), value)
    base, offsets = locate(first_row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, ROWS)
    store_floats(out_ptr + base + offsets, value, full, first_row, numel, NATIVE_BF16, BLOCK, ROWS)


def encode(bits: int, core: Tensor, buffer: Tensor, block_size: int, scales_offset: int, seed: int | None) -> bool:
    found = layout_of(core, block_size)
    if found is None:
        return False
    layout, places = found
    numel = core.numel()

    def constants() -> tuple[object, ...]:
        return integers.TOP[core.dtype], bits, seed is not None, layout

    numbers = (numel, scales_offset, signed(seed), *places)
    launch(_encode, (bits, layout, seed is not None), (core, buffer), numbers, constants, numel, block_size)
    return True


def decode(bits: int, buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> bool:
    found = layout_of(out, block_size)
    if found is None:
        return False
    layout, places = found
    numel = out.numel()

    def constants() -> tuple[object, ...]:
        return bits, native_bf16(out.device), layout

    launch(_decode, (bits, layout), (buffer, out), (numel, scales_offset, *places), constants, numel, block_size)
    return True
