"""FP8 E3M4: half of E4M3's noise, over a range of 2**-6 to 29 times the block's scale."""

from __future__ import annotations

from fp8hooks.codecs.minifloat import Format, Minifloat


class Fp8E3M4(Minifloat):
    """1 sign, 3 exponent and 4 mantissa bits, bias 3; not a dtype of torch's.

    The highest exponent holds numbers too, up to 29; only its last two codes are an infinity and NaN. See `Minifloat`
    for the scale, the specials and the error.
    """

    name = "fp8_e3m4"
    format = Format(mantissa=4, bias=3, largest=0x7D)
