"""Cubes of 8-bit integers; `fp8hooks.codecs.cubic8` is the definition, byte for byte."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.codecs import cubic8
from fp8hooks.kernels.common import launch, load_bits, native_bf16, store_rounded, tile, uniform


@triton.jit
def _cube(x):
    return x * x * x


# A seed is a number like any other: no variant of the kernel for some of them.
@triton.jit(do_not_specialize=["seed"])
def _encode(
    x_ptr, buffer_ptr, numel, scales_offset, seed,
    MIN_SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, offsets, inside = tile(numel, BLOCK, ROWS)
    bits = load_bits(x_ptr + offsets, inside)
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    # What has a sign: neither zero nor NaN.
    signed = (magnitude != 0) & (magnitude <= 0x7F800000)
    some_negative = tl.max(tl.where(signed & (bits < 0), 1, 0), axis=1)
    some_positive = tl.max(tl.where(signed & (bits >= 0), 1, 0), axis=1)
    mixed = some_negative + some_positive == 2
    clean = tl.where(finite, magnitude, 0)
    # Bits of non-negative floats order as the floats do.
    largest = tl.maximum(tl.max(clean, axis=1).to(tl.float32, bitcast=True), MIN_SCALE)
    largest_bits = largest.to(tl.int32, bitcast=True) & -2
    levels = tl.where(mixed, 125.0, 253.0)
    inverse = tl.math.div_rn(_cube(levels), largest_bits.to(tl.float32, bitcast=True))
    cubes = clean.to(tl.float32, bitcast=True) * inverse[:, None]
    root = tl.exp2(tl.log2(tl.maximum(cubes, 1e-30)) * 0.3333333333333333)
    code = (root + 12582912.0) - 12582912.0  # rounded to the nearest integer
    if STOCHASTIC:
        code += tl.where(cubes >= _cube(code + 1), 1.0, 0.0) - tl.where(cubes < _cube(code), 1.0, 0.0)
        distance = _cube(code + 1) - _cube(code)
        up = uniform(seed, rows, BLOCK, ROWS) * distance < cubes - _cube(code)
        code = tl.where(up, code + 1, code)
    else:
        code += tl.where(cubes >= _cube(code + 0.5), 1.0, 0.0) - tl.where(cubes < _cube(code - 0.5), 1.0, 0.0)
    code = tl.minimum(tl.maximum(code, 0.0), levels[:, None]).to(tl.int32)
    code = tl.where((code == 0) & (clean != 0), 1, code)
    mixed_code = tl.where(magnitude == 0x7F800000, 126, code)
    mixed_code = tl.where((bits < 0) & (magnitude != 0), mixed_code | 0x80, mixed_code)
    mixed_code = tl.where(magnitude > 0x7F800000, 127, mixed_code)
    one_code = tl.where(magnitude == 0x7F800000, 254, code)
    one_code = tl.where(magnitude > 0x7F800000, 255, one_code)
    code = tl.where(mixed[:, None], mixed_code, one_code)
    tl.store(buffer_ptr + offsets, code.to(tl.uint8), mask=inside)
    word = tl.where(mixed, largest_bits | 1, tl.where(some_negative != 0, largest_bits | -0x80000000, largest_bits))
    words = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int32))
    tl.store(words + rows, word.to(tl.int32), mask=rows * BLOCK < numel)


@triton.jit
def _decode(
    buffer_ptr, out_ptr, numel, scales_offset,
    LEAST: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NATIVE_BF16: tl.constexpr,
):  # fmt: skip
    rows, offsets, inside = tile(numel, BLOCK, ROWS)
    raw = tl.load(buffer_ptr + offsets, mask=inside, other=0).to(tl.int32)
    words = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.int32))
    word = tl.load(words + rows, mask=rows * BLOCK < numel, other=0)
    mixed = (word & 1) != 0
    largest = (word & 0x7FFFFFFE).to(tl.float32, bitcast=True)
    step = largest * tl.where(mixed, 5.12e-07, 6.175020965739934e-08)
    code = raw & tl.where(mixed, 0x7F, 0xFF)[:, None]
    value = tl.minimum(_cube(code.to(tl.float32)) * step[:, None], largest[:, None])
    value = tl.where(code != 0, tl.maximum(value, LEAST), value)
    value = tl.where(code == tl.where(mixed, 126, 254)[:, None], float("inf"), value)
    value = tl.where(code == tl.where(mixed, 127, 255)[:, None], float("nan"), value)
    negative = tl.where(mixed[:, None], raw > 0x7F, (word < 0)[:, None])
    store_rounded(out_ptr + offsets, tl.where(negative, -value, value), inside, NATIVE_BF16)


def encode(flat: Tensor, buffer: Tensor, block_size: int, scales_offset: int, seed: int | None) -> bool:
    args = (flat, buffer, flat.numel(), scales_offset)
    launch(_encode, flat, flat.numel(), block_size, *args, seed=seed, MIN_SCALE=cubic8.MIN_SCALE)
    return True


def decode(buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> bool:
    args = (buffer, out, out.numel(), scales_offset)
    constants = {"LEAST": cubic8.LEAST[out.dtype], "NATIVE_BF16": native_bf16(out.device)}
    launch(_decode, out, out.numel(), block_size, *args, **constants)
    return True
