"""Squares of 8-bit integers; `fp8hooks.codecs.square8` is the definition, byte for byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.codecs import square8
from fp8hooks.kernels import launch
from fp8hooks.kernels.common import (
    NUMBERS,
    all_at_most,
    as_floats,
    bf16_bits_up,
    locate,
    places,
    rounded,
    row_max,
    uniform,
    with_sign,
)
from fp8hooks.kernels.launch import Launch


@triton.jit
def _codes(
    x, largest, seed, first_row,
    LEAST_R: tl.constexpr, MOST_R: tl.constexpr, TAME: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Codes and scales of rows; TAME ones are finite, and far enough from the end of the range."""
    magnitude = tl.abs(x)
    if not TAME:
        magnitude = tl.where(magnitude < float("inf"), magnitude, 0.0)
        largest = tl.max(magnitude, axis=1)
    scale_bits = bf16_bits_up(tl.maximum(largest, LEAST_R))
    if not TAME:
        scale_bits = tl.minimum(scale_bits, MOST_R)
    inverse = tl.math.div_rn(15876.0, (scale_bits << 16).to(tl.float32, bitcast=True))
    squares = magnitude * inverse[:, None]
    if STOCHASTIC:
        code = tl.floor(tl.sqrt_rn(squares))
        up = uniform(seed, first_row, BLOCK, ROWS) * (2 * code + 1) < squares - code * code
        code = tl.maximum(tl.where(up, code + 1, code), 1.0)
    else:
        # Whole numbers of halves: see the definition. Their roots are far from where rounding goes one way or the
        # other, so that the hardware's approximate root serves.
        halves = (tl.maximum(squares, 0.26) + 6291456.0) - 6291456.0
        code = tl.sqrt(halves)
    if not TAME or STOCHASTIC:
        code = tl.minimum(code, 126.0)
    # Adding 1.5 * 2**23 leaves the nearest integer in the lowest bits.
    signed = tl.where(magnitude == 0, 0.0, with_sign(code, x)) + 12582912.0
    code = signed.to(tl.int32, bitcast=True).to(tl.int8)
    if not TAME:
        wild = tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), axis=1)
        scale_bits = scale_bits | (wild << 15)
        code = tl.where(x == float("inf"), 127, tl.where(x == float("-inf"), -127, code))
        code = tl.where(x != x, -128, code).to(tl.int8)
    return code, scale_bits


@triton.jit(do_not_specialize=NUMBERS)
def _encode(
    x_ptr, buffer_ptr,
    numel: tl.int64, scales_offset: tl.int64, seed: tl.int64,
    run: tl.int64, middle: tl.int64, middle_stride: tl.int64, outer_stride: tl.int64,
    LEAST_R: tl.constexpr, MOST_R: tl.constexpr, TOP: tl.constexpr, STOCHASTIC: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    codes_ptr = buffer_ptr.to(tl.pointer_type(tl.int8))
    scales_ptr = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int16))
    tame = (first_row + ROWS) * BLOCK <= numel
    if tame:
        base, offsets = locate(first_row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, ROWS)
        x = as_floats(tl.load(x_ptr + base + offsets))
        largest = row_max(tl.abs(x))
        tame = all_at_most(largest, TOP)
        if tame:
            code, scale_bits = _codes(x, largest, seed, first_row, LEAST_R, MOST_R, True, STOCHASTIC, BLOCK, ROWS)
            tl.store(codes_ptr + first_row * BLOCK + places(BLOCK, ROWS), code)
            tl.store(scales_ptr + first_row + tl.arange(0, ROWS), scale_bits.to(tl.int16))
    if not tame:
        for turn in range(ROWS):
            row = first_row + turn
            width = tl.minimum(numel - row * BLOCK, BLOCK)
            columns = tl.arange(0, BLOCK)[None, :]
            base, offsets = locate(row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, 1)
            x = as_floats(tl.load(x_ptr + base + offsets, mask=columns < width, other=0.0))
            code, scale_bits = _codes(x, x, seed, row, LEAST_R, MOST_R, False, STOCHASTIC, BLOCK, 1)
            tl.store(codes_ptr + row * BLOCK + columns, code, mask=columns < width)
            tl.store(scales_ptr + row + tl.arange(0, 1), scale_bits.to(tl.int16), mask=tl.arange(0, 1) < width)


@triton.jit
def _values(code, scale_bits, UNIT: tl.constexpr, LEAST: tl.constexpr, TAME: tl.constexpr):
    """The values of rows of codes (float32) and their scales; TAME ones are finite."""
    scale = ((scale_bits & 0x7FFF) << 16).to(tl.float32, bitcast=True)
    value = code * tl.abs(code) * UNIT * scale[:, None]
    if LEAST > 0.0:
        value = tl.where(code > 0, tl.maximum(value, LEAST), tl.where(code < 0, tl.minimum(value, -LEAST), value))
    if not TAME:
        value = tl.where(code == 127, float("inf"), tl.where(code == -127, float("-inf"), value))
        value = tl.where(code == -128, float("nan"), value)
    return value


@triton.jit(do_not_specialize=NUMBERS)
def _decode(
    buffer_ptr, out_ptr,
    numel: tl.int64, scales_offset: tl.int64,
    run: tl.int64, middle: tl.int64, middle_stride: tl.int64, outer_stride: tl.int64,
    UNIT: tl.constexpr, LEAST: tl.constexpr, NATIVE_BF16: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    codes_ptr = buffer_ptr.to(tl.pointer_type(tl.int8))
    scales_ptr = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int16))
    tame = (first_row + ROWS) * BLOCK <= numel
    if tame:
        scale_bits = tl.load(scales_ptr + first_row + tl.arange(0, ROWS)).to(tl.int32)
        code = tl.load(codes_ptr + first_row * BLOCK + places(BLOCK, ROWS)).to(tl.float32)
        tame = tl.min(scale_bits, 0) >= 0
        if tame:
            value = _values(code, scale_bits, UNIT, LEAST, True)
            base, offsets = locate(first_row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, ROWS)
            tl.store(out_ptr + base + offsets, rounded(value, out_ptr.dtype.element_ty, NATIVE_BF16))
    if not tame:
        for turn in range(ROWS):
            row = first_row + turn
            width = tl.minimum(numel - row * BLOCK, BLOCK)
            columns = tl.arange(0, BLOCK)[None, :]
            scale_bits = tl.load(scales_ptr + row + tl.arange(0, 1), mask=tl.arange(0, 1) < width, other=0).to(tl.int32)
            code = tl.load(codes_ptr + row * BLOCK + columns, mask=columns < width, other=0).to(tl.float32)
            base, offsets = locate(row, run, middle, middle_stride, outer_stride, LAYOUT, BLOCK, 1)
            value = rounded(_values(code, scale_bits, UNIT, LEAST, False), out_ptr.dtype.element_ty, NATIVE_BF16)
            tl.store(out_ptr + base + offsets, value, mask=columns < width)


def encode(core: Tensor, buffer: Tensor, block_size: int, scales_offset: int, seed: int | None) -> Launch | None:
    def constants() -> tuple[object, ...]:
        most = square8.MOST_R[core.dtype]
        top = float(torch.tensor(most << 16, dtype=torch.int32).view(torch.float32))
        return square8.LEAST_R, most, top

    return launch.encode(_encode, None, constants, core, buffer, block_size, scales_offset, seed)


def decode(buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> Launch | None:
    def constants() -> tuple[object, ...]:
        return square8.UNIT, square8.LEAST[out.dtype]

    return launch.decode(_decode, None, constants, buffer, out, block_size, scales_offset)
