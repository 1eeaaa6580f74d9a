"""What all kernel families share: where a program reads and writes, rounding, random numbers.

A program handles some rows, each of them one block of the codec. It takes a short way if all of its rows are whole and
finite, which nearly all are, and a longer one otherwise.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

#: Elements of one program, and its warps: of 512 to 4096 and 1 to 4 the best compromise on an H200.
ELEMENTS = 1024
WARPS = 2
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
    if LAYOUT == 2:
        rows = (first_row + tl.arange(0, ROWS)).to(tl.int32)
        a_run = (run // BLOCK).to(tl.int32)
        runs, within = rows // a_run, rows % a_run
        outer, inner = runs // middle.to(tl.int32), runs % middle.to(tl.int32)
        base = first_row * 0
        starts = outer.to(tl.int64) * outer_stride + inner.to(tl.int64) * middle_stride + within.to(tl.int64) * BLOCK
        offsets = tl.multiple_of(starts, [16])[:, None] + columns
    else:
        offsets = tl.arange(0, ROWS)[:, None] * BLOCK + columns
        first = first_row * BLOCK
        base = first
        if LAYOUT == 1:
            runs = first // run
            base = tl.multiple_of(runs // middle * outer_stride + runs % middle * middle_stride + first % run, 16)
    return base, offsets


@triton.jit
def inside(first_row, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Which of this program's elements there are, [ROWS, BLOCK]."""
    return first_row * BLOCK + tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :] < numel


@triton.jit
def load(pointers, full, first_row, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """This program's elements [ROWS, BLOCK]; 0 for those that are not there, of which there are none if `full`."""
    # The mask is made where it is needed, so that full programs, nearly all, do without.
    if full:
        value = tl.load(pointers)
    else:
        value = tl.load(pointers, mask=inside(first_row, numel, BLOCK, ROWS), other=0)
    return value


@triton.jit
def store(pointers, value, full, first_row, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """As `load`, the other way."""
    if full:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=inside(first_row, numel, BLOCK, ROWS))


@triton.jit
def load_rows(pointers, full, first_row, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """One number for each row [ROWS] from `pointers`, where the first is; 0 for rows that are not there."""
    rows = tl.arange(0, ROWS)
    if full:
        value = tl.load(pointers + rows)
    else:
        value = tl.load(pointers + rows, mask=(first_row + rows) * BLOCK < numel, other=0)
    return value


@triton.jit
def store_rows(pointers, value, full, first_row, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """As `load_rows`, the other way."""
    rows = tl.arange(0, ROWS)
    if full:
        tl.store(pointers + rows, value)
    else:
        tl.store(pointers + rows, value, mask=(first_row + rows) * BLOCK < numel)


@triton.jit
def load_floats(pointers, full, first_row, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """As `load`, of float32, bfloat16 or float16 elements, as float32."""
    raw = load(pointers, full, first_row, numel, BLOCK, ROWS)
    if INTERPRETED and pointers.dtype.element_ty == tl.bfloat16:
        # By a shift: the interpreter loses a subnormal on the usual way.
        value = (raw.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def store_floats(
    pointers, value, full, first_row, numel,
    NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store float32 values as the pointers' dtype, rounded to nearest, ties to even."""
    if pointers.dtype.element_ty == tl.bfloat16 and not NATIVE_BF16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, rounded)
        store(pointers, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), full, first_row, numel, BLOCK, ROWS)
    else:
        store(pointers, value.to(pointers.dtype.element_ty), full, first_row, numel, BLOCK, ROWS)


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
