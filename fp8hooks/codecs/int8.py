"""INT8 with one float32 scale a block: uniform steps, for what is exponentiated in backward (attention's q and k).

Codes -126..126 are multiples of the scale; 127 and -127 stand for the infinities and -128 for NaN. As in every codec
here a non-zero element never becomes zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8hooks.codecs.base import BlockCodec, Payload

LEVELS = 126
#: Least scale: the smallest normal float32, so that its reciprocal is finite and a product with it not zero.
MIN_SCALE = 2.0**-126
_INF, _NAN = 127, -128
# One unit below 1/126: 126 scales then never exceed the block's largest magnitude, and so never overflow.
RECIPROCAL = float.fromhex("0x1.041040p-7")


class Int8(BlockCodec):
    """See the module's docstring.

    Error of a finite element (rounding to the nearest multiple of the scale s): `s / 2` and the float32 roundings of
    the division and the product; an element that would round to zero becomes `s`, off by less than that.
    """

    name = "int8"
    scale_dtype = torch.float32

    def error_bound(self, flat: Tensor) -> Tensor:
        x = flat.double()
        scale = self.split(self.encode_reference(flat))[1].double()
        scale = scale.repeat_interleave(self.block_size)[: x.numel()]
        bound = torch.where(x.abs() <= scale / 2, scale, scale / 2 + x.abs() * 2.0**-21)
        return torch.where((x == 0) | ~x.isfinite(), 0.0, bound)

    def encode_rows(self, rows: Tensor, codes: Tensor, scales: Tensor) -> bool:
        amax = torch.maximum(rows.amax(1), -rows.amin(1)).float()
        on_cpu = rows.device.type == "cpu"
        finite = on_cpu and bool(amax.isfinite().all())
        if finite:
            clean = rows
        else:
            clean = torch.where(rows.isfinite(), rows, 0)
            amax = torch.maximum(clean.amax(1), -clean.amin(1)).float()
        scale = (amax * RECIPROCAL).clamp_(min=MIN_SCALE)
        scales.copy_(scale)
        levels = torch.mul(clean, scale.reciprocal()[:, None]).round_()
        if not on_cpu or float(levels.abs().min()) == 0:
            levels = torch.where((levels == 0) & (clean != 0), clean.sign(), levels)
        if not finite:
            levels = torch.where(rows.isinf(), rows.float().sign() * _INF, levels)
            levels = torch.where(rows.isnan(), float(_NAN), levels)
        codes.view(torch.int8).copy_(levels)
        return finite

    def decode_rows(self, codes: Tensor, scales: Tensor, out: Tensor, finite: bool) -> None:
        levels = codes.view(torch.int8)
        value = levels * scales[:, None]
        if not finite:
            infinite = torch.where(levels > 0, torch.inf, -torch.inf)
            value = torch.where((levels == _INF) | (levels == -_INF), infinite, value)
            value = torch.where(levels == _NAN, torch.nan, value)
        out.copy_(value)

    def encode_kernel(self, flat: Tensor, buffer: Tensor) -> bool:
        from fp8hooks import kernels

        return kernels.int8_encode(flat, buffer, self.block_size, self.scales_offset(flat.numel()))

    def decode_kernel(self, payload: Payload, out: Tensor) -> bool:
        from fp8hooks import kernels

        return kernels.int8_decode(payload.buffer, out, self.block_size, self.scales_offset(payload.numel))
