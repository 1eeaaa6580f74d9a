"""Integers with a scale and an offset a block; `fp8hooks.codecs.integers` is the definition, byte for byte."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.codecs import integers
from fp8hooks.kernels import launch
from fp8hooks.kernels.common import (
    NUMBERS,
    all_at_most,
    as_floats,
    bf16_bits_up,
    locate,
    rounded,
    row_max,
    uniform,
)
from fp8hooks.kernels.launch import Launch


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _tame_codes(
    x, low, high, seed, first_row,
    SHIFT: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Codes, scale and offset words of rows that are whole, finite, and far enough from the end of the range."""
    # Four bits use the codes of infinities and NaN for numbers in rows that have neither.
    LEVELS: tl.constexpr = SHIFT - 1 if SHIFT == 8 else SHIFT - 2
    negative = high < 0
    largest = tl.maximum(tl.abs(low), tl.abs(high))
    least = tl.where(negative | (low > 0), tl.minimum(tl.abs(low), tl.abs(high)), 0.0)
    offset_bits = least.to(tl.int32, bitcast=True) & -0x10000
    one_sided = offset_bits != 0
    offset = _as_float(offset_bits)
    scale_bits = bf16_bits_up((largest - offset) * tl.where(one_sided, 1.0 / (2 * LEVELS + 1), 1.0 / LEVELS))
    inverse = tl.math.div_rn(1.0, _as_float(scale_bits << 16))
    steps = (tl.abs(x) - offset[:, None]) * inverse[:, None]
    if STOCHASTIC:
        steps = tl.floor(steps + uniform(seed, first_row, BLOCK, ROWS))
        steps = tl.minimum(steps, tl.where(one_sided, 2.0 * LEVELS + 1, 1.0 * LEVELS)[:, None])
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
    x, mask, seed, first_row,
    TOP: tl.constexpr, SHIFT: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As `_tame_codes`, for any rows; `mask` says which elements there are."""
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
    wild = tl.max((mask & (magnitude >= 0x7F800000)).to(tl.int32), axis=1)
    if SHIFT == 8:
        share = tl.where(one_sided, tl.where(wild != 0, 1.0 / 13, 1.0 / 15), tl.where(wild != 0, 1.0 / 6, 1.0 / 7))
        levels = tl.where(one_sided, tl.where(wild != 0, 13.0, 15.0), tl.where(wild != 0, 6.0, 7.0))
    else:
        share = tl.where(one_sided, 1.0 / (2 * SHIFT - 3), 1.0 / (SHIFT - 2))
        levels = tl.where(one_sided, 2.0 * SHIFT - 3, SHIFT - 2.0)
    scale_bits = bf16_bits_up((largest - offset) * share)
    inverse = tl.math.div_rn(1.0, _as_float(scale_bits << 16))
    clean = tl.where(finite, magnitude, 0)
    steps = (_as_float(clean) - offset[:, None]) * inverse[:, None]
    steps = tl.where(finite, steps, 0.0)
    if STOCHASTIC:
        rounded = tl.floor(steps + uniform(seed, first_row, BLOCK, ROWS))
        rounded = tl.minimum(rounded, levels[:, None])
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
    word = offset_bits | scale_bits | (wild << 15)
    return tl.where(one_sided[:, None], shifted, symmetric), tl.where(negative, word | -0x80000000, word)


@triton.jit
def _low_places(BLOCK: tl.constexpr, LOW: tl.constexpr):
    """Which byte holds the lowest LOW bits of an element's code, and from which of its bits, [1, BLOCK].

    Four bytes hold those of 32 / LOW elements, so that a thread has whole words to read and write.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    GROUP: tl.constexpr = 32 // LOW
    return columns // GROUP * 4 + columns % 4, columns % GROUP // 4 * LOW


@triton.jit
def _packed(code, BLOCK: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr):
    """The bytes of the lowest LOW bits of codes, [ROWS, BLOCK * LOW // 8]."""
    _, shift = _low_places(BLOCK, LOW)
    groups = tl.reshape((code & ((1 << LOW) - 1)) << shift, [ROWS * BLOCK * LOW // 32, 8 // LOW, 4])
    return tl.reshape(tl.sum(groups, axis=1), [ROWS, BLOCK * LOW // 8]).to(tl.uint8)


@triton.jit(do_not_specialize=NUMBERS)
def _encode(
    x_ptr, buffer_ptr,
    numel: tl.int64, scales_offset: tl.int64, seed: tl.int64,
    run: tl.int64, middle: tl.int64, middle_stride: tl.int64, outer_stride: tl.int64,
    TOP: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    SHIFT: tl.constexpr = 1 << (BITS - 1)
    LOW: tl.constexpr = BITS % 8
    UPPER: tl.constexpr = BITS // 8 * BLOCK
    STRIDE: tl.constexpr = UPPER + BLOCK * LOW // 8
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    words_ptr = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int32))
    tame = (first_row + ROWS) * BLOCK <= numel
    if tame:
        base, offsets = locate(first_row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, ROWS)
        x = as_floats(tl.load(x_ptr + base + offsets))
        high, low = row_max(x), -row_max(-x)
        tame = all_at_most(tl.maximum(high, -low, propagate_nan=tl.PropagateNan.ALL), TOP)
        if tame:
            code, word = _tame_codes(x, low, high, seed, first_row, SHIFT, STOCHASTIC, BLOCK, ROWS)
            row_ptr = buffer_ptr + first_row * STRIDE
            starts = tl.arange(0, ROWS)[:, None] * STRIDE
            if UPPER:
                upper_ptr = row_ptr.to(tl.pointer_type(tl.int8)) + (starts + tl.arange(0, BLOCK)[None, :])
                tl.store(upper_ptr, (code >> LOW).to(tl.int8))
            if LOW:
                low_ptr = row_ptr + (starts + (UPPER + tl.arange(0, BLOCK * LOW // 8)[None, :]))
                tl.store(low_ptr, _packed(code, BLOCK, ROWS, LOW))
            tl.store(words_ptr + first_row + tl.arange(0, ROWS), word.to(tl.int32))
    if not tame:
        for turn in range(ROWS):
            row = first_row + turn
            width = tl.minimum(numel - row * BLOCK, BLOCK)
            columns = tl.arange(0, BLOCK)[None, :]
            base, offsets = locate(row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, 1)
            x = as_floats(tl.load(x_ptr + base + offsets, mask=columns < width, other=0.0))
            code, word = _wild_codes(x, columns < width, seed, row, TOP, SHIFT, STOCHASTIC, BLOCK, 1)
            row_ptr = buffer_ptr + row * STRIDE
            if UPPER:
                tl.store(
                    row_ptr.to(tl.pointer_type(tl.int8)) + columns, (code >> LOW).to(tl.int8), mask=columns < width
                )
            if LOW:
                packed = tl.arange(0, BLOCK * LOW // 8)[None, :]
                low = _packed(tl.where(columns < width, code, 0), BLOCK, 1, LOW)
                start = width if UPPER else 0
                tl.store(row_ptr + (start + packed), low, mask=packed // 4 * (32 // LOW) < width)
            tl.store(words_ptr + row + tl.arange(0, 1), word.to(tl.int32), mask=tl.arange(0, 1) < width)


@triton.jit
def _values(code, word, SHIFT: tl.constexpr, TAME: tl.constexpr):
    """The values (float32) of rows of codes and their words; TAME ones are finite."""
    offset = _as_float(word & -0x10000)
    one_sided = offset != 0.0
    scale = _as_float((word & 0x7FFF) << 16)
    scale = tl.where(offset < 0.0, -scale, scale)
    steps = code.to(tl.float32) + tl.where(one_sided, 1.0 * SHIFT, 0.0)[:, None]
    value = steps * scale[:, None] + offset[:, None]
    if not TAME:
        # An infinity is the last code but one in a one-sided row, with the row's sign.
        limit = tl.where(one_sided, SHIFT - 2, SHIFT - 1)[:, None]
        upward = (code == limit) & ((offset >= 0.0)[:, None])
        downward = tl.where(one_sided[:, None], (code == limit) & ((offset < 0.0)[:, None]), code == 1 - SHIFT)
        infinite = tl.where(upward, float("inf"), tl.where(downward, float("-inf"), value))
        infinite = tl.where(code == tl.where(one_sided, SHIFT - 1, -SHIFT)[:, None], float("nan"), infinite)
        value = tl.where(((word & 0x8000) != 0)[:, None], infinite, value)
    return value


@triton.jit(do_not_specialize=NUMBERS)
def _decode(
    buffer_ptr, out_ptr,
    numel: tl.int64, scales_offset: tl.int64,
    run: tl.int64, middle: tl.int64, middle_stride: tl.int64, outer_stride: tl.int64,
    BITS: tl.constexpr, NATIVE_BF16: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    SHIFT: tl.constexpr = 1 << (BITS - 1)
    LOW: tl.constexpr = BITS % 8
    UPPER: tl.constexpr = BITS // 8 * BLOCK
    STRIDE: tl.constexpr = UPPER + BLOCK * LOW // 8
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    words_ptr = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int32))
    tame = (first_row + ROWS) * BLOCK <= numel
    if tame:
        word = tl.load(words_ptr + first_row + tl.arange(0, ROWS))
        row_ptr = buffer_ptr + first_row * STRIDE
        starts = tl.arange(0, ROWS)[:, None] * STRIDE
        columns = tl.arange(0, BLOCK)[None, :]
        if UPPER:
            code = tl.load(row_ptr.to(tl.pointer_type(tl.int8)) + (starts + columns)).to(tl.int32)
        if LOW:
            byte, shift = _low_places(BLOCK, LOW)
            low = (tl.load(row_ptr + (starts + (UPPER + byte))).to(tl.int32) >> shift) & ((1 << LOW) - 1)
            if UPPER:
                code = (code << LOW) | low
            else:
                code = (low ^ SHIFT) - SHIFT
        tame = tl.max(word & 0x8000, 0) == 0
        if tame:
            base, offsets = locate(first_row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, ROWS)
            value = _values(code, word, SHIFT, True)
            tl.store(out_ptr + base + offsets, rounded(value, out_ptr.dtype.element_ty, NATIVE_BF16))
    if not tame:
        for turn in range(ROWS):
            row = first_row + turn
            width = tl.minimum(numel - row * BLOCK, BLOCK)
            columns = tl.arange(0, BLOCK)[None, :]
            word = tl.load(words_ptr + row + tl.arange(0, 1), mask=tl.arange(0, 1) < width, other=0)
            row_ptr = buffer_ptr + row * STRIDE
            if UPPER:
                upper_ptr = row_ptr.to(tl.pointer_type(tl.int8)) + columns
                code = tl.load(upper_ptr, mask=columns < width, other=0).to(tl.int32)
            if LOW:
                byte, shift = _low_places(BLOCK, LOW)
                start = width if UPPER else 0
                low = tl.load(row_ptr + (start + byte), mask=columns < width, other=0).to(tl.int32)
                low = (low >> shift) & ((1 << LOW) - 1)
                if UPPER:
                    code = (code << LOW) | low
                else:
                    code = (low ^ SHIFT) - SHIFT
            value = _values(code, word, SHIFT, False)
            base, offsets = locate(row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, 1)
            value = rounded(value, out_ptr.dtype.element_ty, NATIVE_BF16)
            tl.store(out_ptr + base + offsets, value, mask=columns < width)


def encode(
    bits: int, core: Tensor, buffer: Tensor, block_size: int, scales_offset: int, seed: int | None
) -> Launch | None:
    def constants() -> tuple[object, ...]:
        return integers.TOP[core.dtype], bits

    return launch.encode(_encode, bits, constants, core, buffer, block_size, scales_offset, seed)


def decode(bits: int, buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> Launch | None:
    def constants() -> tuple[object, ...]:
        return (bits,)

    return launch.decode(_decode, bits, constants, buffer, out, block_size, scales_offset)
