"""INT8 with a float32 scale a block; `fp8hooks.codecs.int8` is the definition, byte for byte."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.codecs import int8
from fp8hooks.kernels.common import launch, load_bits, native_bf16, store_rounded


@triton.jit
def _encode(
    x_ptr, buffer_ptr, numel, scales_offset,
    RECIPROCAL: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offsets < numel
    bits = load_bits(x_ptr + offsets, inside)
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    clean = tl.where(finite, magnitude, 0)
    amax = tl.max(clean, axis=1).to(tl.float32, bitcast=True)
    scale = tl.maximum(amax * RECIPROCAL, 1.1754943508222875e-38)
    level = clean.to(tl.float32, bitcast=True) * tl.math.div_rn(1.0, scale)[:, None]
    # Adding and taking away 1.5 * 2**23 rounds to the nearest integer, ties to even.
    level = (level + 12582912.0) - 12582912.0
    code = level.to(tl.int32)
    code = tl.where((code == 0) & (clean != 0), 1, code)
    code = tl.where(magnitude == 0x7F800000, 127, code)
    code = tl.where(bits < 0, -code, code)
    code = tl.where(magnitude > 0x7F800000, -128, code)
    tl.store(buffer_ptr + offsets, code.to(tl.int8).to(tl.uint8, bitcast=True), mask=inside)
    scales = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.float32))
    tl.store(scales + rows, scale, mask=rows * BLOCK < numel)


@triton.jit
def _decode(
    buffer_ptr, out_ptr, numel, scales_offset,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, NATIVE_BF16: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offsets < numel
    code = tl.load(buffer_ptr + offsets, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    scales = (buffer_ptr + scales_offset).to(tl.pointer_type(tl.float32))
    scale = tl.load(scales + rows, mask=rows * BLOCK < numel, other=0.0)
    value = code.to(tl.float32) * scale[:, None]
    value = tl.where(code == 127, float("inf"), value)
    value = tl.where(code == -127, float("-inf"), value)
    value = tl.where(code == -128, float("nan"), value)
    store_rounded(out_ptr + offsets, value, inside, NATIVE_BF16)


def encode(flat: Tensor, buffer: Tensor, block_size: int, scales_offset: int) -> bool:
    args = (flat, buffer, flat.numel(), scales_offset)
    launch(_encode, flat, flat.numel(), block_size, *args, RECIPROCAL=int8.RECIPROCAL)
    return True


def decode(buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> bool:
    args = (buffer, out, out.numel(), scales_offset)
    launch(_decode, out, out.numel(), block_size, *args, NATIVE_BF16=native_bf16(out.device))
    return True
