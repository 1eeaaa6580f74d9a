"""Integers with a scale and, where it pays, an offset a block: uniform steps, for what backward exponentiates.

A block that has elements of both signs, or a zero, is symmetric: codes are multiples of the scale. With b bits they
are `-(2**(b-1) - 2)` to `2**(b-1) - 2`; `2**(b-1) - 1` and its negative stand for the infinities, `-2**(b-1)` for NaN.
A block whose elements all have one sign and are not zero is one-sided: an offset near its smallest magnitude is taken
off first, so that a common offset costs no precision. Its codes are `2**(b-1)` less than 0 to `2**b - 3` steps from
the offset, then one for an infinity and one for NaN. With few bits the codes for infinities and NaN are dear: a width
may use them for numbers in blocks that have neither (`plain_levels`).

Scale and offset are bfloat16 bits in one int32: the scale in the lower half, the offset, which has the block's sign,
in the upper. An offset of 0 marks a symmetric block; the scale's own sign bit, one with infinities or NaN in it.

As in every codec here a non-zero element never becomes zero and no sign changes.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from fp8hooks.codecs.base import FLOATS, BlockCodec, choose, round_stochastically

#: Least scale: the smallest normal float32, so that its reciprocal is finite and a product with it not zero.
MIN_SCALE = 2.0**-126
#: Blocks that reach beyond this need care: rounding up could decode to an infinity.
TOP = {dtype: torch.finfo(dtype).max * 0.98 for dtype in FLOATS}


class Integers(BlockCodec, abc.ABC):
    """A codec of one width; a subclass says how its codes lie in bytes. See the module's docstring.

    Error of a finite element (rounding to the nearest multiple of the scale s): `s / 2`, and the float32 roundings of
    a difference, two products and a sum. An element that would round to zero becomes `s`; in a block that reaches
    beyond 98 % of the dtype's range rounding is towards the offset. Both are off by less than `1.02 s`.
    """

    scale_dtype = torch.int32
    kernel_family = "integers"
    #: Bits of a code.
    bits: int

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.kernel_settings = (self.bits,)
        #: Half of the number of codes.
        self.shift = 1 << (self.bits - 1)
        #: Steps that the largest element is from the offset: in symmetric blocks, and in one-sided ones.
        self.levels, self.one_sided_levels = self.shift - 2, 2 * self.shift - 3
        #: The same in blocks whose elements are all finite.
        self.plain_levels, self.plain_one_sided_levels = self.levels, self.one_sided_levels

    @abc.abstractmethod
    def write_codes(self, steps: Tensor, codes: Tensor) -> None:
        """Write the whole numbers `steps` (float32 [n, k]) as `codes` (uint8 [n, row_bytes(k)])."""

    @abc.abstractmethod
    def read_codes(self, codes: Tensor, width: int) -> Tensor:
        """The integers [n, width] that `write_codes` wrote."""

    def error_bound(self, flat: Tensor) -> Tensor:
        x = flat.double()
        words = self.split(self.encode_reference(flat))[1]
        scale = scale_from_bits(words).double().repeat_interleave(self.block_size)[: x.numel()]
        top = x.new_zeros(x.numel(), dtype=torch.bool)
        for piece in self._pieces(x.numel(), x.device):
            part = x[piece.elements]
            rows = torch.where(part.isfinite(), part, 0).view(-1, piece.width)
            top[piece.elements] = (rows.abs().amax(1, keepdim=True) > TOP[flat.dtype]).expand_as(rows).reshape(-1)
        coarse = top | (x.abs() <= scale / 2)
        bound = torch.where(coarse, scale * 1.02, scale / 2) + x.abs() * 2.0**-20
        return torch.where((x == 0) | ~x.isfinite(), 0.0, bound)

    def encode_rows(self, rows: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None) -> bool:
        low, high = rows.amin(1), rows.amax(1)
        on_cpu = rows.device.type == "cpu"
        finite = on_cpu and bool((low.isfinite() & high.isfinite()).all())
        clean = rows
        wild_rows = torch.zeros((), dtype=torch.bool, device=rows.device)
        infinite_low = infinite_high = torch.zeros((), dtype=torch.bool, device=rows.device)
        if not finite:
            wild = ~rows.isfinite()
            wild_rows = wild.any(1)
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
        levels = torch.where(
            one_sided,
            choose(wild_rows, self.one_sided_levels, self.plain_one_sided_levels),
            choose(wild_rows, self.levels, self.plain_levels),
        )
        shares = torch.where(
            one_sided,
            choose(wild_rows, 1 / self.one_sided_levels, 1 / self.plain_one_sided_levels),
            choose(wild_rows, 1 / self.levels, 1 / self.plain_levels),
        )
        span = (largest - float_bits(offset_bits)) * shares
        bits = scale_bits(span)
        sign_bits = torch.where(one_sided & negative, -0x80000000, 0).int()
        scales.copy_(offset_bits | sign_bits | bits)
        if not finite:
            scales.bitwise_or_(wild_rows.int() << 15)
        offset = float_bits(offset_bits | sign_bits)
        inverse = float_bits(scale_from_bits(bits).reciprocal().view(torch.int32) | sign_bits)
        steps = torch.sub(clean, offset[:, None]).mul_(inverse[:, None])
        top = largest > TOP[rows.dtype]
        towards_zero = None
        if not on_cpu or bool(top.any()):
            towards_zero = torch.trunc(torch.copysign((steps.abs() - 1 / 64).clamp_(min=0), steps))
        if noise is None:
            steps.round_()
        else:
            steps = torch.minimum(round_stochastically(steps.abs(), noise), levels[:, None]).copysign_(steps)
        if towards_zero is not None:
            steps = torch.where(top[:, None], towards_zero, steps)
        if not on_cpu or not bool(one_sided.all()):
            # One step of its sign for what is not zero and would be; arithmetic, since torch.where is slow on CPUs.
            flushed = (1 - steps.abs()).clamp_(min=0)
            steps.add_(flushed.mul_(clean.sign()).mul_(choose(one_sided, 0.0, 1.0)[:, None]))
        steps.sub_(choose(one_sided, self.shift, 0.0)[:, None])
        if not finite:
            infinity = torch.where(one_sided[:, None], self.shift - 2.0, rows.float().sign() * (self.shift - 1))
            nan = choose(one_sided, self.shift - 1, -self.shift)[:, None]
            steps = torch.where(rows.isinf(), infinity, torch.where(rows.isnan(), nan, steps))
        self.write_codes(steps, codes)
        return finite

    def decode_rows(self, codes: Tensor, scales: Tensor, out: Tensor, finite: bool) -> None:
        steps = self.read_codes(codes, out.shape[1])
        offset = float_bits(scales & -0x10000)
        one_sided = offset != 0
        scale = float_bits(((scales & 0x7FFF) << 16) | torch.where(offset < 0, -0x80000000, 0).int())
        value = torch.add(steps, choose(one_sided, self.shift, 0.0)[:, None])
        value.mul_(scale[:, None]).add_(offset[:, None])
        if not finite:
            highest = self.shift - 1
            marked = ((scales & 0x8000) != 0)[:, None]
            infinite = marked & torch.where(one_sided[:, None], steps == highest - 1, steps.abs() == highest)
            nan = marked & (steps == torch.where(one_sided, highest, -self.shift)[:, None])
            sign = torch.where(one_sided[:, None], offset[:, None], steps.float())
            value = torch.where(infinite, torch.copysign(torch.full_like(value, torch.inf), sign), value)
            value = torch.where(nan, torch.nan, value)
        out.copy_(value)


def finite_part(rows: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Rows with 0 for what is not finite; the largest magnitude of each (float32); whether all is known to be finite.

    Only a CPU looks at the values: on a GPU that would stall the host.
    """
    largest = torch.maximum(rows.amax(1), -rows.amin(1)).float()
    if rows.device.type == "cpu" and bool(largest.isfinite().all()):
        return rows, largest, True
    clean = torch.where(rows.isfinite(), rows, 0)
    return clean, torch.maximum(clean.amax(1), -clean.amin(1)).float(), False


def scale_bits(scale: Tensor) -> Tensor:
    """bfloat16's bits (int32) of positive float32 scales, rounded up, so that no element lies beyond the last level."""
    return (scale.clamp(min=MIN_SCALE).view(torch.int32) + 0xFFFF) >> 16


def scale_from_bits(bits: Tensor) -> Tensor:
    """float32 of scales given as bfloat16's bits (int16 or int32)."""
    return ((bits.int() & 0x7FFF) << 16).view(torch.float32)


def with_specials(code: Tensor, rows: Tensor, infinity: int) -> Tensor:
    """Codes with `infinity` and `-infinity` where rows are infinite, and `-infinity - 1` where they are NaN."""
    special = torch.where(rows.isinf(), rows.float().sign() * infinity, code)
    return torch.where(rows.isnan(), float(-infinity - 1), special)


def specials(value: Tensor, code: Tensor, infinity: int) -> Tensor:
    """Values with the infinities and NaN for which `with_specials` wrote codes."""
    value = torch.where(code.abs() == infinity, code * torch.inf, value)
    return torch.where(code == -infinity - 1, torch.nan, value)


def float_bits(word: Tensor) -> Tensor:
    """float32 with the given bits (int32)."""
    return word.view(torch.float32)
