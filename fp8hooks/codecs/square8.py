"""Squares of 8-bit integers: for activations, which crowd around zero and reach far.

An element is `c * |c|` times the block's scale, for a code c of -126..126. At the block's largest magnitude R the step
is 1.6 % of R, at R/100 0.16 %, where INT8 has 0.8 % everywhere and FP8 E4M3 6 to 12 % of the element. On a normal
distribution the noise is INT8's (0.7 % of the standard deviation), on one with long tails half of it; E3M4's is twice
as large, E4M3's four times, on both. `fp8hooks.bench.numerics` measures what that does to gradients.

127 and -127 stand for the infinities, -128 for NaN. The scale is R / 126**2, with R rounded up to bfloat16, whose bits
are stored; their sign marks a block with infinities or NaN in it. So the largest element of a bfloat16 block, and any
mask of zeros and one such number, come back exactly.

As in every codec here a non-zero element never becomes zero and no sign changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8hooks.codecs.base import BlockCodec, stochastic_step
from fp8hooks.codecs.integers import finite_part, scale_bits, scale_from_bits, specials, with_specials

LEVELS = 126
#: float32 of 1 / 126**2; 126**2 times it is 1.
UNIT = 6.29881615168415e-05
#: R is at least this, so that 126**2 / R is finite, and at most that, as bfloat16 bits: what the dtype can hold.
LEAST_R = 2.0**-100
MOST_R = {torch.float32: 0x7F7F, torch.bfloat16: 0x7F7F, torch.float16: 0x477F}
#: What a non-zero code decodes to at least in float16, which can't hold all of what R / 126**2 may be.
LEAST = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-24}


class Square8(BlockCodec):
    """See the module's docstring.

    Error of a finite element x in a block of scale s = R / 126**2 (source: half the distance of neighbouring squares
    around y = |x| / s is at most `sqrt(y) + 1/2`): `(sqrt(|x| / s) + 1/2) * s`, and float32's roundings. An element
    that would round to zero becomes s.
    """

    name = kernel_family = "square8"
    scale_dtype = torch.int16

    def error_bound(self, flat: Tensor) -> Tensor:
        x = flat.double()
        largest = scale_from_bits(self.split(self.encode_reference(flat))[1]).double()
        scale = (largest * UNIT).repeat_interleave(self.block_size)[: x.numel()]
        root = (x.abs() / scale).nan_to_num(posinf=0).sqrt()
        bound = torch.where(root < 0.5, 1.0, root + 0.5) * scale + x.abs() * 2.0**-20
        return torch.where((x == 0) | ~x.isfinite(), 0.0, bound)

    def encode_rows(self, rows: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None) -> bool:
        clean, largest, finite = finite_part(rows)
        bits = scale_bits(largest.clamp_(min=LEAST_R)).clamp_(max=MOST_R[rows.dtype])
        scales.copy_(bits if finite else bits - ((~rows.isfinite()).any(1).int() << 15))
        largest = scale_from_bits(bits)
        # One division: a number over a tensor would be a reciprocal and a product, which rounds twice.
        squares = torch.mul(clean, torch.full_like(largest, LEVELS**2).div_(largest)[:, None]).abs_()
        if noise is None:
            # Whole numbers of halves are as good, since rounding a root turns between them, at n * n + n + 1/4; and
            # their roots are so far from n + 1/2 that an approximate root (a GPU's) is rounded alike.
            code = squares.clamp_(min=0.26).add_(6291456.0).sub_(6291456.0).sqrt_().round_()
        else:
            code = squares.sqrt().floor_()
            code += stochastic_step(squares - code * code, 2 * code + 1, noise)
        # What is not zero gets a code that is not, and R was rounded down if up was out of range.
        code.clamp_(1, LEVELS).mul_(clean.sign())
        codes.view(torch.int8).copy_(code if finite else with_specials(code, rows, LEVELS + 1))
        return finite

    def decode_rows(self, codes: Tensor, scales: Tensor, out: Tensor, finite: bool) -> None:
        code = codes.view(torch.int8).float()
        value = (code * code.abs()).mul_(UNIT).mul_(scale_from_bits(scales)[:, None])
        if LEAST[out.dtype]:
            value = torch.maximum(value.abs(), code.abs().clamp_(max=1).mul_(LEAST[out.dtype])).copysign_(code)
        out.copy_(value if finite else specials(value, code, LEVELS + 1))


def encode_fused(rows: Tensor) -> tuple[Tensor, Tensor]:
    """As the codec, in operations that a compiler can fuse: [..., k] as codes (int8, alike) and scales (int16 [...]).

    Equal to the codec's up to what the compiler does to float32 arithmetic.
    """
    x = rows.float()
    finite = x.abs() < torch.inf
    magnitude = torch.where(finite, x.abs(), 0.0)
    bits = scale_bits(magnitude.amax(-1).clamp(min=LEAST_R)).clamp(max=MOST_R[rows.dtype])
    squares = magnitude * (float(LEVELS**2) / scale_from_bits(bits))[..., None]
    halves = (squares.clamp(min=0.26) * 2).round() * 0.5
    code = halves.sqrt().round().clamp(max=LEVELS)
    code = torch.where(x < 0, -code, torch.where(x == 0, 0.0, code))
    code = torch.where(finite, code, torch.where(x > 0, LEVELS + 1.0, -(LEVELS + 1.0)))
    code = torch.where(x != x, -(LEVELS + 2.0), code)
    return code.to(torch.int8), bits.to(torch.int16)


def decode_fused(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode_fused`, in `dtype`."""
    code = codes.float()
    value = code * code.abs() * UNIT * scale_from_bits(scales)[..., None]
    if LEAST[dtype]:
        least = code.clamp(-1, 1) * LEAST[dtype]
        value = torch.where(code > 0, torch.maximum(value, least), torch.minimum(value, least))
    return specials(value, code, LEVELS + 1).to(dtype)
