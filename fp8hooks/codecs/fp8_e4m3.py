"""FP8 E4M3: 2.6 % noise an element over a range of 2**-9 to 416 times the block's scale."""

from __future__ import annotations

import torch

from fp8hooks.codecs.minifloat import Format, Minifloat


class Fp8E4M3(Minifloat):
    """Codes are `float8_e4m3fn` bytes (OCP 8-bit floating point), but that 448 of either sign means infinity.

    So the largest finite value is 416. See `Minifloat` for the scale, the specials and the error.
    """

    name = "fp8_e4m3"
    format = Format(mantissa=3, bias=7, largest=0x7D)
    torch_dtype = torch.float8_e4m3fn
