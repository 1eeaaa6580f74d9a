"""One bit an element; `fp8hooks.codecs.bits` is the definition, byte for byte."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8hooks.kernels import launch
from fp8hooks.kernels.common import NUMBERS, as_floats, native_bf16, rounded


@triton.jit(do_not_specialize=NUMBERS)
def _pack(x_ptr, buffer_ptr, numel: tl.int64, SIGNS: tl.constexpr, EIGHT: tl.constexpr, BYTES: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BYTES
    within = tl.arange(0, BYTES)
    elements = first * 8 + within[:, None] * 8 + tl.arange(0, EIGHT)[None, :]
    x = tl.load(x_ptr + elements, mask=elements < numel, other=0)
    bits = ~(as_floats(x) <= 0.0) if SIGNS else x != 0
    packed = tl.sum(bits.to(tl.int32) << tl.arange(0, EIGHT)[None, :], axis=1)
    tl.store(buffer_ptr + first + within, packed.to(tl.uint8), mask=(first + within) * 8 < numel)


@triton.jit(do_not_specialize=NUMBERS)
def _unpack(
    buffer_ptr, out_ptr, numel: tl.int64, FLOAT: tl.constexpr, NATIVE_BF16: tl.constexpr, EIGHT: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BYTES
    within = tl.arange(0, BYTES)
    packed = tl.load(buffer_ptr + first + within, mask=(first + within) * 8 < numel, other=0).to(tl.int32)
    bits = (packed[:, None] >> tl.arange(0, EIGHT)[None, :]) & 1
    elements = first * 8 + within[:, None] * 8 + tl.arange(0, EIGHT)[None, :]
    if FLOAT:
        value = rounded(bits.to(tl.float32), out_ptr.dtype.element_ty, NATIVE_BF16)
    else:
        value = bits != 0
    tl.store(out_ptr + elements, value, mask=elements < numel)


def pack(flat: Tensor, buffer: Tensor, signs: bool) -> None:
    launch.start(_pack, (signs,), (flat, buffer), (flat.numel(),), lambda: (signs,), flat.numel(), 8)


def unpack(buffer: Tensor, out: Tensor) -> None:
    constants = (out.is_floating_point(), native_bf16(out.device))
    launch.start(_unpack, (), (buffer, out), (out.numel(),), lambda: constants, out.numel(), 8)
