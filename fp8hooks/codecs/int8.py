"""INT8 with a scale and, where it pays, an offset a block: uniform steps, for what backward exponentiates.

A block that has elements of both signs, or a zero, is symmetric: codes -126..126 are multiples of the scale, 127 and
-127 stand for the infinities, -128 for NaN. A block whose elements all have one sign and are not zero is one-sided:
an offset near its smallest magnitude is taken off first, so that a common offset costs no precision, and log
probabilities near 0 (those that matter) keep theirs. Its codes are `code - 128` for 0..253 steps from the offset, 254
for an infinity, 255 for NaN.

Scale and offset are bfloat16 bits in one int32: the scale in the lower half, the offset, which has the block's sign,
in the upper. An offset of 0 marks a symmetric block.

As in every codec here a non-zero element never becomes zero and no sign changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8hooks.codecs.base import FLOATS, BlockCodec, choose

LEVELS, ONE_SIDED_LEVELS = 126, 253
#: Least scale: the smallest normal float32, so that its reciprocal is finite and a product with it not zero.
MIN_SCALE = 2.0**-126
#: Blocks that reach beyond this round towards the offset: rounding up could decode to an infinity.
TOP = {dtype: torch.finfo(dtype).max * 0.98 for dtype in FLOATS}


def float_bits(word: Tensor) -> Tensor:
    """float32 with the given bits (int32)."""
    return word.view(torch.float32)


class Int8(BlockCodec):
    """See the module's docstring.

    Error of a finite element (rounding to the nearest multiple of the scale s): `s / 2`, and the float32 roundings of
    a difference, two products and a sum. An element that would round to zero becomes `s`; in a block that reaches
    beyond 98 % of the dtype's range rounding is towards the offset. Both are off by less than `1.02 s`.
    """

    name = kernel_family = "int8"
    scale_dtype = torch.int32

    def error_bound(self, flat: Tensor) -> Tensor:
        x = flat.double()
        words = self.split(self.encode_reference(flat))[1]
        scale = float_bits(words << 16).double().repeat_interleave(self.block_size)[: x.numel()]
        top = x.new_zeros(x.numel(), dtype=torch.bool)
        for elements, _, width in self._pieces(x.numel(), x.device):
            rows = torch.where(x[elements].isfinite(), x[elements], 0).view(-1, width)
            top[elements] = (rows.abs().amax(1, keepdim=True) > TOP[flat.dtype]).expand_as(rows).reshape(-1)
        coarse = top | (x.abs() <= scale / 2)
        bound = torch.where(coarse, scale * 1.02, scale / 2) + x.abs() * 2.0**-20
        return torch.where((x == 0) | ~x.isfinite(), 0.0, bound)

    def encode_rows(self, rows: Tensor, codes: Tensor, scales: Tensor) -> bool:
        low, high = rows.amin(1), rows.amax(1)
        on_cpu = rows.device.type == "cpu"
        finite = on_cpu and bool((low.isfinite() & high.isfinite()).all())
        clean = rows
        infinite_low = infinite_high = torch.zeros((), dtype=torch.bool, device=rows.device)
        if not finite:
            wild = ~rows.isfinite()
            infinite_low, infinite_high = (rows == -torch.inf).any(1), (rows == torch.inf).any(1)
            low, high = torch.where(wild, torch.inf, rows).amin(1), torch.where(wild, -torch.inf, rows).amax(1)
            clean = torch.where(wild, 0, rows)
        low, high = low.float(), high.float()
        some = low <= high  # some element is finite
        negative = some & (high < 0) & ~infinite_high
        one_sided = negative | (some & (low > 0) & ~infinite_low)
        largest = torch.where(some, torch.maximum(low.abs(), high.abs()), 0.0)
        least = torch.where(one_sided, torch.minimum(low.abs(), high.abs()), 0.0)
        offset_bits = least.view(torch.int32) & -0x10000
        one_sided = offset_bits != 0
        span = (largest - float_bits(offset_bits)) * choose(one_sided, 1 / ONE_SIDED_LEVELS, 1 / LEVELS)
        # Rounded up to bfloat16, so that no element lies beyond the last level.
        scale_bits = (span.clamp_(min=MIN_SCALE).view(torch.int32) + 0xFFFF) >> 16
        sign_bits = torch.where(one_sided & negative, -0x80000000, 0).int()
        scales.copy_(offset_bits | sign_bits | scale_bits)
        offset = float_bits(offset_bits | sign_bits)
        inverse = float_bits(float_bits(scale_bits << 16).reciprocal().view(torch.int32) | sign_bits)
        steps = torch.sub(clean, offset[:, None]).mul_(inverse[:, None])
        top = largest > TOP[rows.dtype]
        if not on_cpu or bool(top.any()):
            towards_zero = torch.trunc(torch.copysign((steps.abs() - 1 / 64).clamp_(min=0), steps))
            steps = torch.where(top[:, None], towards_zero, steps.round())
        else:
            steps.round_()
        if not on_cpu or not bool(one_sided.all()):
            # One step of its sign for what is not zero and would be; arithmetic, since torch.where is slow on CPUs.
            flushed = (1 - steps.abs()).clamp_(min=0)
            steps.add_(flushed.mul_(clean.sign()).mul_(choose(one_sided, 0.0, 1.0)[:, None]))
        steps.sub_(choose(one_sided, 128.0, 0.0)[:, None])
        if not finite:
            infinity = torch.where(one_sided[:, None], 126.0, rows.float().sign() * 127)
            nan = choose(one_sided, 127.0, -128.0)[:, None]
            steps = torch.where(rows.isinf(), infinity, torch.where(rows.isnan(), nan, steps))
        codes.view(torch.int8).copy_(steps)
        return finite

    def decode_rows(self, codes: Tensor, scales: Tensor, out: Tensor, finite: bool) -> None:
        steps = codes.view(torch.int8)
        offset = float_bits(scales & -0x10000)
        one_sided = offset != 0
        scale = float_bits((scales << 16) | torch.where(offset < 0, -0x80000000, 0).int())
        value = torch.add(steps, choose(one_sided, 128.0, 0.0)[:, None])
        value.mul_(scale[:, None]).add_(offset[:, None])
        if not finite:
            infinite = torch.where(one_sided[:, None], steps == 126, (steps == 127) | (steps == -127))
            nan = steps == torch.where(one_sided, 127, -128)[:, None]
            sign = torch.where(one_sided[:, None], offset[:, None], steps.float())
            value = torch.where(infinite, torch.copysign(torch.full_like(value, torch.inf), sign), value)
            value = torch.where(nan, torch.nan, value)
        out.copy_(value)
