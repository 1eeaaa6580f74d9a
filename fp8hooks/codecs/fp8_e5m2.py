"""FP8 E5M2: twice E4M3's noise, over the range of float16."""

from __future__ import annotations

import torch

from fp8hooks.codecs.minifloat import Format, Minifloat


class Fp8E5M2(Minifloat):
    """Codes are `float8_e5m2` bytes: float16 without its last eight bits. See `Minifloat` for scale and error."""

    name = "fp8_e5m2"
    format = Format(mantissa=2, bias=15, largest=0x7B)
    torch_dtype = torch.float8_e5m2
