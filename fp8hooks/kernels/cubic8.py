"""Cubes of 8-bit integers; `fp8hooks.codecs.cubic8` is the definition, byte for byte."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.codecs import cubic8
from fp8hooks.kernels import launch
from fp8hooks.kernels.common import (
    NUMBERS,
    all_at_most,
    as_floats,
    locate,
    places,
    rounded,
    row_max,
    uniform,
)
from fp8hooks.kernels.launch import Launch


@triton.jit
def _cube(x):
    return x * x * x


@triton.jit
def _codes(
    x, low, high, seed, first_row,
    MIN_SCALE: tl.constexpr, TAME: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Codes and words of rows; TAME ones are finite."""
    magnitude = tl.abs(x)
    if TAME:
        some_negative, some_positive = low < 0, high > 0
        largest = tl.maximum(tl.abs(low), tl.abs(high))
    else:
        # Infinities have signs, but are no measure of size; NaN has none.
        some_negative = tl.max((x < 0).to(tl.int32), axis=1) != 0
        some_positive = tl.max((x > 0).to(tl.int32), axis=1) != 0
        magnitude = tl.where(magnitude < float("inf"), magnitude, 0.0)
        largest = tl.max(magnitude, axis=1)
    mixed = some_negative & some_positive
    largest_bits = tl.maximum(largest, MIN_SCALE).to(tl.int32, bitcast=True) & -4
    levels = tl.where(mixed, 125.0, 253.0)
    inverse = tl.math.div_rn(_cube(levels), largest_bits.to(tl.float32, bitcast=True))
    cubes = magnitude * inverse[:, None]
    root = tl.exp2(tl.log2(tl.maximum(cubes, 1e-30)) * 0.3333333333333333)
    code = (root + 12582912.0) - 12582912.0  # rounded to the nearest integer
    if STOCHASTIC:
        code += tl.where(cubes >= _cube(code + 1), 1.0, 0.0) - tl.where(cubes < _cube(code), 1.0, 0.0)
        distance = _cube(code + 1) - _cube(code)
        up = uniform(seed, first_row, BLOCK, ROWS) * distance < cubes - _cube(code)
        code = tl.where(up, code + 1, code)
    else:
        code += tl.where(cubes >= _cube(code + 0.5), 1.0, 0.0) - tl.where(cubes < _cube(code - 0.5), 1.0, 0.0)
    code = tl.where(magnitude == 0, 0.0, tl.minimum(tl.maximum(code, 1.0), levels[:, None])).to(tl.int32)
    sign = tl.where(x < 0, 0x80, 0) & tl.where(mixed, 0x80, 0)[:, None]
    word = tl.where(mixed, largest_bits | 1, tl.where(some_negative, largest_bits | -0x80000000, largest_bits))
    if not TAME:
        infinite = tl.abs(x) == float("inf")
        code = tl.where(infinite, tl.where(mixed, 126, 254)[:, None], code)
        code = tl.where(x != x, tl.where(mixed, 127, 255)[:, None], code)
        sign = tl.where(x != x, 0, sign)
        wild = tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), axis=1)
        word = word | (wild << 1)
    return code | sign, word


@triton.jit(do_not_specialize=NUMBERS)
def _encode(
    x_ptr, buffer_ptr,
    numel: tl.int64, scales_offset: tl.int64, seed: tl.int64,
    run: tl.int64, middle: tl.int64, middle_stride: tl.int64, outer_stride: tl.int64,
    MIN_SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    words_ptr = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int32))
    tame = (first_row + ROWS) * BLOCK <= numel
    if tame:
        base, offsets = locate(first_row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, ROWS)
        x = as_floats(tl.load(x_ptr + base + offsets))
        high, low = row_max(x), -row_max(-x)
        tame = all_at_most(tl.maximum(high, -low, propagate_nan=tl.PropagateNan.ALL), 3.4028234663852886e38)
        if tame:
            code, word = _codes(x, low, high, seed, first_row, MIN_SCALE, True, STOCHASTIC, BLOCK, ROWS)
            tl.store(buffer_ptr + first_row * BLOCK + places(BLOCK, ROWS), code.to(tl.uint8))
            tl.store(words_ptr + first_row + tl.arange(0, ROWS), word.to(tl.int32))
    if not tame:
        for turn in range(ROWS):
            row = first_row + turn
            width = tl.minimum(numel - row * BLOCK, BLOCK)
            columns = tl.arange(0, BLOCK)[None, :]
            base, offsets = locate(row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, 1)
            x = as_floats(tl.load(x_ptr + base + offsets, mask=columns < width, other=0.0))
            code, word = _codes(x, x, x, seed, row, MIN_SCALE, False, STOCHASTIC, BLOCK, 1)
            tl.store(buffer_ptr + row * BLOCK + columns, code.to(tl.uint8), mask=columns < width)
            tl.store(words_ptr + row + tl.arange(0, 1), word.to(tl.int32), mask=tl.arange(0, 1) < width)


@triton.jit
def _values(raw, word, LEAST: tl.constexpr, TAME: tl.constexpr):
    """The values (float32) of rows of codes and their words; TAME ones are finite."""
    mixed = (word & 1) != 0
    largest = (word & 0x7FFFFFFC).to(tl.float32, bitcast=True)
    step = largest * tl.where(mixed, 5.12e-07, 6.175020965739934e-08)
    code = raw & tl.where(mixed, 0x7F, 0xFF)[:, None]
    value = tl.minimum(_cube(code.to(tl.float32)) * step[:, None], largest[:, None])
    value = tl.where(code != 0, tl.maximum(value, LEAST), value)
    if not TAME:
        wild = tl.where(code == tl.where(mixed, 126, 254)[:, None], float("inf"), value)
        wild = tl.where(code == tl.where(mixed, 127, 255)[:, None], float("nan"), wild)
        value = tl.where(((word & 2) != 0)[:, None], wild, value)
    return tl.where(tl.where(mixed[:, None], raw > 0x7F, (word < 0)[:, None]), -value, value)


@triton.jit(do_not_specialize=NUMBERS)
def _decode(
    buffer_ptr, out_ptr,
    numel: tl.int64, scales_offset: tl.int64,
    run: tl.int64, middle: tl.int64, middle_stride: tl.int64, outer_stride: tl.int64,
    LEAST: tl.constexpr, NATIVE_BF16: tl.constexpr, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    words_ptr = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int32))
    tame = (first_row + ROWS) * BLOCK <= numel
    if tame:
        word = tl.load(words_ptr + first_row + tl.arange(0, ROWS))
        raw = tl.load(buffer_ptr + first_row * BLOCK + places(BLOCK, ROWS)).to(tl.int32)
        tame = tl.max(word & 2, 0) == 0
        if tame:
            base, offsets = locate(first_row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, ROWS)
            value = _values(raw, word, LEAST, True)
            tl.store(out_ptr + base + offsets, rounded(value, out_ptr.dtype.element_ty, NATIVE_BF16))
    if not tame:
        for turn in range(ROWS):
            row = first_row + turn
            width = tl.minimum(numel - row * BLOCK, BLOCK)
            columns = tl.arange(0, BLOCK)[None, :]
            word = tl.load(words_ptr + row + tl.arange(0, 1), mask=tl.arange(0, 1) < width, other=0)
            raw = tl.load(buffer_ptr + row * BLOCK + columns, mask=columns < width, other=0).to(tl.int32)
            base, offsets = locate(row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, 1)
            value = rounded(_values(raw, word, LEAST, False), out_ptr.dtype.element_ty, NATIVE_BF16)
            tl.store(out_ptr + base + offsets, value, mask=columns < width)


def encode(core: Tensor, buffer: Tensor, block_size: int, scales_offset: int, seed: int | None) -> Launch | None:
    def constants() -> tuple[object, ...]:
        return (cubic8.MIN_SCALE,)

    return launch.encode(_encode, None, constants, core, buffer, block_size, scales_offset, seed)


def decode(buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> Launch | None:
    def constants() -> tuple[object, ...]:
        return (cubic8.LEAST[out.dtype],)

    return launch.decode(_decode, None, constants, buffer, out, block_size, scales_offset)
