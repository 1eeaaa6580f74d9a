"""What all kernel families share: where a program reads and writes, rounding, random numbers.

A program handles some rows, each of them one block of the codec: all at once if they are tame, that is whole, finite,
and below the very end of the dtype's range, as nearly all are; otherwise one after the other, so that the many
registers which wild rows take do not keep the GPU from running many programs.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

#: Elements of one program, and its warps. One warp needs no barriers, and an SM can hold 32 of its programs.
ELEMENTS = 1024
WARPS = 1
#: The kernels' 64-bit parameters: numbers like any others, with no variants of the kernels for some of them.
NUMBERS = ["numel", "scales_offset", "seed", "run", "middle", "middle_stride", "outer_stride"]

# Whether Triton's interpreter runs the kernels, as it decides when they are defined.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# How the elements of a row are found: DENSE, one run of memory; TILES, where all rows of a program lie in one run;
# BLOCKS, where each row does.
DENSE, TILES, BLOCKS = 0, 1, 2


@triton.jit
def locate(
    first_row, run, middle, middle_stride, outer_stride, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Where this program's elements lie: the offset of the first, and those of all from there, [ROWS, BLOCK].

    A tensor that is not dense has runs of `run` elements (a multiple of BLOCK), `middle` of them `middle_stride` apart,
    and those groups `outer_stride` apart, which are multiples of 16 so that whole words are read.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    base = first_row * BLOCK
    offsets = tl.arange(0, ROWS)[:, None] * BLOCK + columns
    if LAYOUT != 0:
        # Rows are counted in 32 bits: a division of 64 bits costs more than all else that is done to an element.
        rows = first_row.to(tl.int32)
        if LAYOUT == 2:
            rows += tl.arange(0, ROWS)
        a_run = (run // BLOCK).to(tl.int32)
        runs, within = rows // a_run, rows % a_run
        outer, inner = runs // middle.to(tl.int32), runs % middle.to(tl.int32)
        starts = outer.to(tl.int64) * outer_stride + inner.to(tl.int64) * middle_stride + within.to(tl.int64) * BLOCK
        if LAYOUT == 2:
            base = first_row * 0
            offsets = tl.multiple_of(starts, [16])[:, None] + columns
        else:
            base = tl.multiple_of(starts, 16)
    return base, offsets


@triton.jit
def places(BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Where elements of neighbouring rows lie from the first, [ROWS, BLOCK]."""
    return tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def as_floats(raw):
    """float32, bfloat16 or float16 elements as float32."""
    if INTERPRETED and raw.dtype == tl.bfloat16:
        # By a shift: the interpreter loses a subnormal on the usual way.
        value = (raw.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def rounded(value, TYPE: tl.constexpr, NATIVE_BF16: tl.constexpr):
    """float32 values as TYPE, rounded to nearest, ties to even."""
    if tl.bfloat16 == TYPE and not NATIVE_BF16:
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        result = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(TYPE)
    return result


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_max(value):
    """The largest of each row; NaN if there is one in it."""
    return tl.reduce(value, 1, _larger)


@triton.jit
def all_at_most(rows, limit):
    """Whether no row's number is over the limit or NaN."""
    return tl.max((~(rows <= limit)).to(tl.int32), 0) == 0


@triton.jit
def with_sign(magnitude, x):
    """The magnitude with the sign of x."""
    bits = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits_up(scale):
    """bfloat16's bits of positive float32 scales, at least the smallest normal one, rounded up."""
    return (tl.maximum(scale, 1.1754943508222875e-38).to(tl.int32, bitcast=True) + 0xFFFF) >> 16


@triton.jit
def noise(seed, first_row, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """24 random bits (int32) for each element, as `fp8hooks.codecs.philox.noise` has them."""
    counters = first_row * (BLOCK // 4) + (
        tl.arange(0, ROWS)[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    )
    low, high = counters.to(tl.uint32), (counters >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, low * 0, low * 0)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, BLOCK])
    return (words >> 8).to(tl.int32)


@triton.jit
def uniform(seed, first_row, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """`noise` as float32 from 0 up to 1."""
    return noise(seed, first_row, BLOCK, ROWS).to(tl.float32) * 5.960464477539063e-08


def native_bf16(device: torch.device) -> bool:
    """Whether float32 is rounded to bfloat16 in hardware (Ampere and later; not by Triton's interpreter)."""
    return _capability(device) >= (8, 0)


def native_fp8(device: torch.device) -> bool:
    """Whether FP8 is converted in hardware (Ada, Hopper and later); elsewhere integer arithmetic does it."""
    return _capability(device) >= (8, 9)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
