"""The frame of the FP8 formats: a sign, a few exponent and mantissa bits, and a power-of-two scale a block.

Scales are bytes holding `exponent + 127` as in E8M0 (OCP microscaling formats). What is stored here must never make a
gradient silently wrong, so that, whatever the format says of its largest codes,

- one code of each sign stands for an infinity, and another for NaN. An infinity that became NaN would poison masks;
  one that became finite would hide an overflow from a loss scaler;
- a non-zero element never becomes zero: it takes the smallest code of its sign. ReLU's backward asks `result > 0`.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8hooks.codecs.base import FLOATS, BlockCodec, choose, round_stochastically
from fp8hooks.codecs.philox import BITS

NAN_CODE = 0x7F


@dataclass(frozen=True)
class Format:
    """Numbers of one format.

    Attributes:
        mantissa: mantissa bits; the exponent has the other `7 - mantissa`.
        bias: exponent bias.
        largest: the largest finite code.
    """

    mantissa: int
    bias: int
    largest: int

    @property
    def infinity(self) -> int:
        """The code of an infinity, next to the largest finite one."""
        return self.largest + 1

    @property
    def step(self) -> float:
        """The least positive value: a subnormal step."""
        return 2.0 ** (1 - self.bias - self.mantissa)

    @property
    def max(self) -> float:
        """The largest finite value."""
        exponent, mantissa = divmod(self.largest, 1 << self.mantissa)
        return (1 + mantissa / (1 << self.mantissa)) * 2.0 ** (exponent - self.bias)

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value."""
        return math.frexp(self.max)[1] - 1

    @property
    def carry(self) -> int:
        """Added to the bits of a float32 whose mantissa is over that of `max`, it carries into the exponent."""
        return 0x7FFFFF - int((self.max / 2.0**self.max_exponent - 1) * (1 << 23))

    @property
    def least_scale(self) -> int:
        """Least scale, as a biased exponent.

        `step` times it is at least 2**-133, the least subnormal of bfloat16, so that what is not zero is not zero in
        bfloat16 either; and it is a normal float32.
        """
        return max(1, 127 - 133 - int(math.log2(self.step)))

    @property
    def below_power(self) -> float:
        """The largest value below the least power of two over `max`, halved: all that a block at the very top of its
        dtype's range may use, where rounding up to that power would decode to an infinity."""
        power = 2.0**self.max_exponent
        return power - power * 2.0 ** -(self.mantissa + 1)

    @property
    def half_shift(self) -> int:
        """Shifted by this, the seven low bits are those of a float16, but for its bias."""
        return 10 - self.mantissa

    @property
    def half_exponent(self) -> int:
        """The power of two by which that float16 is too small."""
        return 15 - self.bias

    def scales(self, amax: Tensor) -> Tensor:
        """The scale of blocks whose largest finite magnitude is `amax` (float32): biased exponent, int32.

        It is the least power of two for which `amax / scale <= max`.
        """
        biased = ((amax.view(torch.int32) + self.carry) >> 23) - self.max_exponent
        return biased.clamp_(min=self.least_scale)

    def top_scale(self, dtype: torch.dtype) -> int:
        """The largest scale (a biased exponent) that blocks of `dtype` can get."""
        return int(self.scales(torch.tensor([torch.finfo(dtype).max], dtype=torch.float32)))

    def round(self, scaled: Tensor) -> Tensor:
        """Codes (int16) of finite float32 values within `max`, rounded to nearest, ties to even."""
        # Adding 1.5 * 2**(23 - mantissa) times a value's own power of two (the least normal one's for subnormals) and
        # taking it away again rounds to the mantissa's last bit. No torch.where: it is slow on CPUs.
        big = scaled.view(torch.int32) & 0x7F800000
        big.clamp_(min=(128 - self.bias) << 23).add_(((23 - self.mantissa) << 23) | 0x400000)
        rounded = (scaled + big.view(torch.float32)).sub_(big.view(torch.float32))
        rounded.copysign_(scaled)  # what became zero has lost its sign
        half = rounded.mul_(2.0**-self.half_exponent).to(torch.float16).view(torch.int16)
        return ((half >> self.half_shift) & 0x7F) | ((half >> 8) & 0x80)

    def round_stochastically(self, scaled: Tensor, noise: Tensor) -> Tensor:
        """Codes (int32) of finite float32 values within `max`, rounded up or down so that the mean is right.

        Args:
            noise: numbers from 0 to 2**24 - 1, int32.
        """
        bits = scaled.view(torch.int32)
        drop = 23 - self.mantissa
        # Normal codes: a carry out of the bits that are dropped.
        large = (((bits & 0x7FFFFFFF) + (noise >> (BITS - drop))) >> drop) - ((127 - self.bias) << self.mantissa)
        small = round_stochastically(scaled.abs() * (1 / self.step), noise).int()
        code = torch.where(scaled.abs() < self.step * (1 << self.mantissa), small, large).clamp_(max=self.largest)
        return code | ((bits >> 24) & 0x80)


def power_of_two(biased: Tensor) -> Tensor:
    """float32 `2**(biased - 127)` for an int32 tensor of biased exponents in 1..254."""
    return (biased << 23).view(torch.float32)


class Minifloat(BlockCodec, abc.ABC):
    """A codec of one FP8 format; a subclass names the format.

    Error of a finite element x in a block of scale s (source: rounding to nearest with m mantissa bits and gradual
    underflow): `|x| * 2**-(m + 1)` or, near zero, half the subnormal step times s; an element that would round to
    zero becomes one subnormal step, off by less than that.
    """

    scale_dtype = torch.uint8
    kernel_family = "minifloat"
    format: Format
    #: torch's dtype whose conversion gives the same codes, if there is one; it is faster than `Format.round`.
    torch_dtype: torch.dtype | None = None

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.kernel_settings = (self.format,)
        self._top = {dtype: self.format.top_scale(dtype) for dtype in FLOATS}

    def error_bound(self, flat: Tensor) -> Tensor:
        x = flat.double()
        step = power_of_two(self.split(self.encode_reference(flat))[1].int()).double() * self.format.step
        step = step.repeat_interleave(self.block_size)[: x.numel()]
        bound = torch.maximum(x.abs() * 2.0 ** -(self.format.mantissa + 1), step / 2)
        bound = torch.where(x.abs() < step / 2, step, bound)
        return torch.where((x == 0) | ~x.isfinite(), 0.0, bound)

    def encode_rows(self, rows: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None) -> bool:
        form = self.format
        amax = torch.maximum(rows.amax(1), -rows.amin(1)).float()
        # Only a CPU may look at the values: on a GPU that would stall the host.
        on_cpu = rows.device.type == "cpu"
        finite = on_cpu and bool(amax.isfinite().all())
        if finite:
            clean = rows
        else:
            clean = torch.where(rows.isfinite(), rows, 0)
            amax = torch.maximum(clean.amax(1), -clean.amin(1)).float()
        biased = form.scales(amax)
        scales.copy_(biased)
        scaled = torch.mul(clean, power_of_two(254 - biased)[:, None])  # float32, exact: the factor is a power of two
        top = biased >= self._top[rows.dtype]
        if not on_cpu or bool(top.any()):
            limit = choose(top, form.below_power, form.max)[:, None]
            scaled = scaled.clamp(-limit, limit)
        if noise is not None:
            # At the very top of the dtype's range rounding up could make an infinity.
            codes.copy_(form.round_stochastically(scaled, noise * ~top[:, None]))
        elif self.torch_dtype is None:
            codes.copy_(form.round(scaled))
        else:
            codes.view(self.torch_dtype).copy_(scaled)
        if not on_cpu or int((codes << 1).min()) == 0:
            flushed = ((codes << 1) == 0) & (clean != 0)
            codes.bitwise_or_(flushed.to(torch.uint8))
        if not finite:
            sign = (rows < 0).to(torch.uint8) << 7
            special = torch.where(rows.isinf(), sign | form.infinity, codes)
            codes.copy_(torch.where(rows.isnan(), NAN_CODE, special))
        return finite

    def decode_rows(self, codes: Tensor, scales: Tensor, out: Tensor, finite: bool) -> None:
        # torch's own conversion from float8 is several times slower on CPUs than these shifts.
        form = self.format
        half = codes.view(torch.int8).to(torch.int16)
        half.bitwise_left_shift_(form.half_shift).bitwise_and_((0x7F << form.half_shift) - 0x8000)
        biased = scales.int()
        # The float16's own power of two goes into the scale, where that fits a float32, and else is a factor by itself.
        top = biased > 254 - form.half_exponent
        factor = power_of_two(torch.where(top, biased, biased + form.half_exponent))[:, None]
        value = half.view(torch.float16) * factor
        if out.device.type != "cpu" or bool(top.any()):
            value *= choose(top, 2.0**form.half_exponent, 1.0)[:, None]
        if not finite:
            magnitude = codes & 0x7F
            infinite = choose(codes > 0x7F, -torch.inf, torch.inf)
            value = torch.where(magnitude == form.infinity, infinite, value)
            value = torch.where(magnitude == NAN_CODE, torch.nan, value)
        out.copy_(value)
