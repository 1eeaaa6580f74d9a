"""What all kernel families share: reading, writing, launching."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Elements that one program handles: enough to hide the latency of memory, few enough to fill the GPU early.
ELEMENTS = 4096
WARPS = 4


@triton.jit
def tile(numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """This program's rows, its elements' offsets [ROWS, BLOCK], and which of those lie inside the tensor."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return rows, offsets, offsets < numel


@triton.jit
def load_bits(pointers, inside):
    """The float32 bits (int32) of float32, bfloat16 or float16 elements; 0 outside."""
    raw = tl.load(pointers, mask=inside, other=0.0)
    if pointers.dtype.element_ty == tl.bfloat16:
        # By a shift: Triton's interpreter loses a subnormal on the usual way.
        bits = raw.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = raw.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def store_rounded(pointers, value, inside, NATIVE_BF16: tl.constexpr):
    """Store float32 values as the pointers' dtype, rounded to nearest, ties to even."""
    if pointers.dtype.element_ty == tl.bfloat16 and not NATIVE_BF16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, rounded)
        tl.store(pointers, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def bf16_bits_up(scale):
    """bfloat16's bits of positive float32 scales, at least the smallest normal one, rounded up."""
    return (tl.maximum(scale, 1.1754943508222875e-38).to(tl.int32, bitcast=True) + 0xFFFF) >> 16


@triton.jit
def noise(seed, rows, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """24 random bits (int32) for each element of the rows, as `fp8hooks.codecs.philox.noise` has them."""
    counters = rows[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    low, high = counters.to(tl.uint32), (counters >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, low * 0, low * 0)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, BLOCK])
    return (words >> 8).to(tl.int32)


@triton.jit
def uniform(seed, rows, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """`noise` as float32 from 0 up to 1."""
    return noise(seed, rows, BLOCK, ROWS).to(tl.float32) * 5.960464477539063e-08


def native_bf16(device: torch.device) -> bool:
    """Whether float32 is rounded to bfloat16 in hardware (Ampere and later; not by Triton's interpreter)."""
    return _capability(device) >= (8, 0)


def native_fp8(device: torch.device) -> bool:
    """Whether FP8 is converted in hardware (Ada, Hopper and later); elsewhere integer arithmetic does it."""
    return _capability(device) >= (8, 9)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def launch(kernel: Any, on: Tensor, numel: int, block_size: int, *args: Any, **constants: Any) -> None:
    """Run `kernel` over `numel` elements in rows of `block_size`, on the device and current stream of `on`.

    A constant `seed` is for encoders: a number, or None to round to nearest.
    """
    if "seed" in constants:
        seed = constants.pop("seed")
        args = (*args, seed or 0)
        constants["STOCHASTIC"] = seed is not None
    rows = max(1, ELEMENTS // block_size)
    grid = (triton.cdiv(numel, rows * block_size),)
    # Contraction into fused multiply-adds would round differently from the reference.
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    with _current(on.device):
        kernel[grid](*args, BLOCK=block_size, ROWS=rows, **constants, **options)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever device its tensors are on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
