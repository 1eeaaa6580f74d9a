"""Squares of 8-bit integers; `fp8hooks.codecs.square8` is the definition, byte for byte."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.codecs import square8
from fp8hooks.kernels.common import (
    bf16_bits_up,
    launch,
    load_bits,
    native_bf16,
    store_rounded,
    tile,
    uniform,
)


# A seed is a number like any other: no variant of the kernel for some of them.
@triton.jit(do_not_specialize=["seed"])
def _encode(
    x_ptr, buffer_ptr, numel, scales_offset, seed,
    LEAST_R: tl.constexpr, MOST_R: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, offsets, inside = tile(numel, BLOCK, ROWS)
    bits = load_bits(x_ptr + offsets, inside)
    magnitude = bits & 0x7FFFFFFF
    clean = tl.where(magnitude < 0x7F800000, magnitude, 0)
    # Bits of non-negative floats order as the floats do.
    largest = tl.max(clean, axis=1).to(tl.float32, bitcast=True)
    scale_bits = tl.minimum(bf16_bits_up(tl.maximum(largest, LEAST_R)), MOST_R)
    inverse = tl.math.div_rn(15876.0, (scale_bits << 16).to(tl.float32, bitcast=True))
    squares = clean.to(tl.float32, bitcast=True) * inverse[:, None]
    root = tl.sqrt_rn(squares)
    if STOCHASTIC:
        code = tl.floor(root)
        up = uniform(seed, rows, BLOCK, ROWS) * (2 * code + 1) < squares - code * code
        code = tl.where(up, code + 1, code)
    else:
        code = (root + 12582912.0) - 12582912.0  # rounded to the nearest integer
    code = tl.minimum(code, 126.0).to(tl.int32)
    code = tl.where((code == 0) & (clean != 0), 1, code)
    code = tl.where(magnitude == 0x7F800000, 127, code)
    code = tl.where(bits < 0, -code, code)
    code = tl.where(magnitude > 0x7F800000, -128, code)
    tl.store(buffer_ptr + offsets, code.to(tl.int8).to(tl.uint8, bitcast=True), mask=inside)
    scales = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int16))
    tl.store(scales + rows, scale_bits.to(tl.int16), mask=rows * BLOCK < numel)


@triton.jit
def _decode(
    buffer_ptr, out_ptr, numel, scales_offset,
    UNIT: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NATIVE_BF16: tl.constexpr,
):  # fmt: skip
    rows, offsets, inside = tile(numel, BLOCK, ROWS)
    code = tl.load(buffer_ptr + offsets, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    scales = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int16))
    scale_bits = tl.load(scales + rows, mask=rows * BLOCK < numel, other=0).to(tl.int32) << 16
    steps = code.to(tl.float32)
    value = steps * tl.abs(steps) * UNIT * scale_bits.to(tl.float32, bitcast=True)[:, None]
    if LEAST > 0.0:
        value = tl.where(code > 0, tl.maximum(value, LEAST), tl.where(code < 0, tl.minimum(value, -LEAST), value))
    value = tl.where(code == 127, float("inf"), tl.where(code == -127, float("-inf"), value))
    value = tl.where(code == -128, float("nan"), value)
    store_rounded(out_ptr + offsets, value, inside, NATIVE_BF16)


def encode(flat: Tensor, buffer: Tensor, block_size: int, scales_offset: int, seed: int | None) -> bool:
    args = (flat, buffer, flat.numel(), scales_offset)
    constants = {"LEAST_R": square8.LEAST_R, "MOST_R": square8.MOST_R[flat.dtype]}
    launch(_encode, flat, flat.numel(), block_size, *args, seed=seed, **constants)
    return True


def decode(buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> bool:
    args = (buffer, out, out.numel(), scales_offset)
    constants = {"UNIT": square8.UNIT, "LEAST": square8.LEAST[out.dtype], "NATIVE_BF16": native_bf16(out.device)}
    launch(_decode, out, out.numel(), block_size, *args, **constants)
    return True
