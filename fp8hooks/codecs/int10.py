"""Integers of 10 bits: a quarter of INT8's error, for q and k, which attention's backward exponentiates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8hooks.codecs.integers import Integers


class Int10(Integers):
    """A block holds the upper eight bits of all its codes, and then the lower two, four elements a byte, the first in
    the lowest bits. See `fp8hooks.codecs.integers` for scale, offset, specials and the error."""

    name = "int10"
    bits = 10

    def row_bytes(self, width: int) -> int:
        return width + -(-width // 4)

    def write_codes(self, steps: Tensor, codes: Tensor) -> None:
        code, width = steps.to(torch.int16), steps.shape[1]
        codes[:, :width].view(torch.int8).copy_(code >> 2)
        low = F.pad(code & 3, (0, -width % 4)).view(len(code), -1, 4)
        codes[:, width:].copy_((low << _shifts(codes)).sum(2, dtype=torch.int16))

    def read_codes(self, codes: Tensor, width: int) -> Tensor:
        high = codes[:, :width].view(torch.int8).to(torch.int16) << 2
        low = codes[:, width:, None].to(torch.int16) >> _shifts(codes)
        return high | (low & 3).flatten(1)[:, :width]


def _shifts(on: Tensor) -> Tensor:
    return torch.arange(0, 8, 2, dtype=torch.int16, device=on.device)
