"""Cubes of 8-bit integers: fine steps near zero and near the largest alike, for probabilities and their logarithms.

Backward exponentiates a log-probability, so one near -10 wants a small absolute error (FP8's relative one is too
coarse); and the gradient of a confident class is about the log-probability itself, -0.001 say, which wants a small
relative error (a uniform step is far too coarse). An element is the cube of its code times a scale: at the block's
largest R the step is 1.2 % of it, at R/1000 12 % of that, and the least code is R * 6e-8.

A block whose elements have one sign (zeros aside) has codes 0..253, 254 for an infinity and 255 for NaN. In another
the high bit is the sign and the others are 0..125, 126, 127. The scale is the float32 R; its sign is that of the
block, its last mantissa bit says that signs are mixed, and the one before that something is not finite.

As in every codec here a non-zero element never becomes zero and no sign changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8hooks.codecs.base import FLOATS, BlockCodec, choose, stochastic_step

ONE_SIGN_LEVELS, MIXED_LEVELS = 253, 125
#: Least R: its reciprocal times 253**3 is finite.
MIN_SCALE = 2.0**-100
#: What a non-zero code decodes to at least: the least positive value of the dtype.
LEAST = {dtype: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in FLOATS}


class Cubic8(BlockCodec):
    """See the module's docstring.

    Error of a finite element x in a block with largest R and L levels (source: half the distance of neighbouring
    cubes, rounded in the cube root, with c = L * cbrt(|x| / R)): `(1.5 c**2 + 1.5 c + 1) * R / L**3`.
    """

    name = kernel_family = "cubic8"
    scale_dtype = torch.int32

    def error_bound(self, flat: Tensor) -> Tensor:
        x = flat.double()
        words = self.split(self.encode_reference(flat))[1].repeat_interleave(self.block_size)[: x.numel()]
        levels = choose((words & 1) != 0, MIXED_LEVELS, ONE_SIGN_LEVELS).double()
        largest = (words & 0x7FFFFFFC).view(torch.float32).double()
        c = levels * (x.abs() / largest).nan_to_num(posinf=0).pow(1 / 3)
        bound = (1.5 * c * c + 1.5 * c + 1) * largest / levels**3 + x.abs() * 2.0**-20
        return torch.where((x == 0) | ~x.isfinite(), 0.0, bound)

    def encode_rows(self, rows: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None) -> bool:
        low, high = rows.amin(1).float(), rows.amax(1).float()
        on_cpu = rows.device.type == "cpu"
        finite = on_cpu and bool((low.isfinite() & high.isfinite()).all())
        clean = rows
        if not finite:
            number = torch.where(rows.isnan(), 0, rows)
            low, high = number.amin(1).float(), number.amax(1).float()
            clean = torch.where(rows.isfinite(), rows, 0)
        # Infinities have signs, but are no measure of size.
        mixed, negative = (low < 0) & (high > 0), low < 0
        if not finite:
            low, high = clean.amin(1).float(), clean.amax(1).float()
        largest = torch.maximum(high, -low).clamp_(min=MIN_SCALE).view(torch.int32) & -4
        sign_bits = torch.where(negative & ~mixed, -0x80000000, 0).int()
        scales.copy_(largest | mixed.int() | sign_bits)
        if not finite:
            scales.bitwise_or_((~rows.isfinite()).any(1).int() << 1)
        levels = choose(mixed, MIXED_LEVELS, ONE_SIGN_LEVELS)
        inverse = (levels * levels * levels) / largest.view(torch.float32)
        cubes = torch.mul(clean, inverse[:, None]).abs_()
        code = cubes.pow(1 / 3).round_()
        # pow is not the same everywhere; these comparisons are, and set right what it left off by one.
        if noise is None:
            code += (cubes >= _cube(code + 0.5)).float() - (cubes < _cube(code - 0.5)).float()
        else:
            code += (cubes >= _cube(code + 1)).float() - (cubes < _cube(code)).float()
            code += stochastic_step(cubes - _cube(code), _cube(code + 1) - _cube(code), noise)
        code = torch.minimum(code.clamp_(min=0), levels[:, None])
        code += (1 - code).clamp_(min=0) * (clean != 0).float()
        code += 128 * ((clean < 0) & mixed[:, None]).float()
        result = code.to(torch.uint8)
        if not finite:
            infinity = torch.where(mixed[:, None], 126 + 128 * (rows < 0), 254).to(torch.uint8)
            nan = torch.where(mixed, 127, 255)[:, None].to(torch.uint8)
            result = torch.where(rows.isinf(), infinity, torch.where(rows.isnan(), nan, result))
        codes.copy_(result)
        return finite

    def decode_rows(self, codes: Tensor, scales: Tensor, out: Tensor, finite: bool) -> None:
        mixed = (scales & 1) != 0
        largest = (scales & 0x7FFFFFFC).view(torch.float32)
        step = largest * choose(mixed, 1 / MIXED_LEVELS**3, 1 / ONE_SIGN_LEVELS**3)
        # In a one-sign block no code has a sign bit; all of them are negative or none.
        magnitude = codes & torch.where(mixed, 0x7F, 0xFF).to(torch.uint8)[:, None]
        code = magnitude.float()
        value = _cube(code).mul_(step[:, None])
        value = torch.minimum(value, largest[:, None])
        least = torch.minimum(code, torch.ones_like(code)).mul_(LEAST[out.dtype])
        value = torch.maximum(value, least)
        if not finite:
            value = torch.where(magnitude == torch.where(mixed, 126, 254)[:, None], torch.inf, value)
            value = torch.where(magnitude == torch.where(mixed, 127, 255)[:, None], torch.nan, value)
        signs = torch.where(mixed[:, None], codes > 0x7F, (scales < 0)[:, None])
        out.copy_(torch.where(signs, -value, value))


def _cube(x: Tensor) -> Tensor:
    return x * x * x
