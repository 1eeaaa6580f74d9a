"""FP8 E4M3 with one power-of-two scale a block.

Elements are `float8_e4m3fn` bytes (OCP 8-bit floating point: 1 sign, 4 exponent, 3 mantissa bits, bias 7), scales are
bytes holding `exponent + 127` as in E8M0 (OCP microscaling formats). Two things differ from those formats, since what
is stored here must never make a gradient silently wrong:

- the two codes of largest magnitude, 0x7E and 0xFE (448), stand for the infinities, so finite codes end at 416. An
  infinity that became NaN would poison masks; one that became finite would hide an overflow from a loss scaler;
- a non-zero element never becomes zero: it takes the smallest code of its sign. ReLU's backward asks `result > 0`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8hooks.codecs.base import FLOATS, BlockCodec, Payload, choose

MAX = 416.0
#: Least scale exponent: 2**-9 (the least code) times 2**-124 is the least subnormal of bfloat16, so that what is
#: not zero is not zero in bfloat16 either.
MIN_EXPONENT = -124
_INF = 0x7E
# The largest code below 2**8: the most that a block at the very top of its dtype's range may use.
_TOP_MAX = 240.0
_MIN_SUBNORMAL = 2.0**-9
# A mantissa over 1.625 (= 416 / 2**8) needs the next exponent: this, added to the bits, carries into it.
_CARRY = 0x7FFFFF - 0x500000


def scale_bytes(amax: Tensor) -> Tensor:
    """The scale of blocks whose largest finite magnitude is `amax` (float32): biased exponent, int32.

    It is the least power of two for which `amax / scale <= 416`.
    """
    biased = ((amax.view(torch.int32) + _CARRY) >> 23) - 8
    return biased.clamp_(min=127 + MIN_EXPONENT)


def top_scale(dtype: torch.dtype) -> int:
    """The largest scale (a biased exponent) that blocks of `dtype` can get."""
    return int(scale_bytes(torch.tensor([torch.finfo(dtype).max])))


def power_of_two(biased: Tensor) -> Tensor:
    """float32 `2**(biased - 127)` for an int32 tensor of biased exponents in 1..254."""
    return (biased << 23).view(torch.float32)


_TOP = {dtype: top_scale(dtype) for dtype in FLOATS}


class Fp8E4M3(BlockCodec):
    """See the module's docstring.

    Error of a finite element x in a block whose scale is s (source: rounding to nearest in a format of 3 mantissa
    bits with gradual underflow): `|x| / 16` or, near zero, half the subnormal step, `s * 2**-10`; an element that
    would round to zero becomes `s * 2**-9`, off by less than that.
    """

    name = "fp8_e4m3"
    scale_dtype = torch.uint8

    def error_bound(self, flat: Tensor) -> Tensor:
        x = flat.double()
        payload = self.encode_reference(flat)
        scale = power_of_two(self.split(payload)[1].int()).double()
        scale = scale.repeat_interleave(self.block_size)[: x.numel()]
        half_step = torch.maximum(x.abs() / 16, scale * 2.0**-10)
        bound = torch.where(x.abs() < scale * 2.0**-10, scale * _MIN_SUBNORMAL, half_step)
        return torch.where((x == 0) | ~x.isfinite(), 0.0, bound)

    def encode_rows(self, rows: Tensor, codes: Tensor, scales: Tensor) -> bool:
        amax = torch.maximum(rows.amax(1), -rows.amin(1)).float()
        # Only a CPU may look at the values: on a GPU that would stall the host.
        on_cpu = rows.device.type == "cpu"
        finite = on_cpu and bool(amax.isfinite().all())
        if finite:
            clean = rows
        else:
            clean = torch.where(rows.isfinite(), rows, 0)
            amax = torch.maximum(clean.amax(1), -clean.amin(1)).float()
        biased = scale_bytes(amax)
        scales.copy_(biased)
        scaled = torch.mul(clean, power_of_two(254 - biased)[:, None])  # float32, exact: the factor is a power of two
        # Just under the dtype's largest value, rounding up to the next power of two would decode to an infinity.
        top = biased >= _TOP[rows.dtype]
        if not on_cpu or bool(top.any()):
            limit = choose(top, _TOP_MAX, MAX)[:, None]
            scaled = scaled.clamp(-limit, limit)
        codes.view(torch.float8_e4m3fn).copy_(scaled)
        if not on_cpu or int((codes << 1).min()) == 0:
            flushed = ((codes << 1) == 0) & (clean != 0)
            codes.bitwise_or_(flushed.to(torch.uint8))
        if not finite:
            sign = (rows < 0).to(torch.uint8) << 7
            codes.copy_(torch.where(rows.isinf(), sign | _INF, torch.where(rows.isnan(), 0x7F, codes)))
        return finite

    def decode_rows(self, codes: Tensor, scales: Tensor, out: Tensor, finite: bool) -> None:
        # The seven low bits shifted by 7 are a float16 of the value times 2**-8, subnormals included; torch's own
        # conversion from float8 is several times slower on CPUs.
        half = codes.view(torch.int8).to(torch.int16)
        half.bitwise_left_shift_(7).bitwise_and_(-0x4080)
        biased = scales.int()
        # 2**8 goes into the scale where that fits a float32, and is a factor of its own in the (rare) block beside it.
        top = biased > 246
        factor = power_of_two(torch.where(top, biased, biased + 8))[:, None]
        value = half.view(torch.float16) * factor
        if out.device.type != "cpu" or bool(top.any()):
            value *= choose(top, 256.0, 1.0)[:, None]
        if not finite:
            magnitude = codes & 0x7F
            infinite = choose(codes > 0x7F, -torch.inf, torch.inf)
            value = torch.where(magnitude == _INF, infinite, torch.where(magnitude == 0x7F, torch.nan, value))
        out.copy_(value)

    def encode_kernel(self, flat: Tensor, buffer: Tensor) -> bool:
        from fp8hooks import kernels

        return kernels.e4m3_encode(flat, buffer, self.block_size, self.scales_offset(flat.numel()))

    def decode_kernel(self, payload: Payload, out: Tensor) -> bool:
        from fp8hooks import kernels

        return kernels.e4m3_decode(payload.buffer, out, self.block_size, self.scales_offset(payload.numel))
