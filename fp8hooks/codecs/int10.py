"""Integers of 10 bits: a quarter of INT8's error, for q and k, which attention's backward exponentiates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8hooks.codecs.integers import Integers


class Int10(Integers):
    """A block holds the upper eight bits of all its codes, and then the lower two: of 16 elements in four bytes, byte j
    those of the elements j, j + 4, j + 8 and j + 12, from the lowest bits up (so that a thread of a kernel has whole
    words to read and write). See `fp8hooks.codecs.integers` for scale, offset, specials and the error."""

    name = "int10"
    bits = 10

    def row_bytes(self, width: int) -> int:
        return width + -(-width // 16) * 4

    def write_codes(self, steps: Tensor, codes: Tensor) -> None:
        code, width = steps.to(torch.int16), steps.shape[1]
        codes[:, :width].view(torch.int8).copy_(code >> 2)
        low = F.pad(code & 3, (0, -width % 16)).view(len(code), -1, 4, 4)
        codes[:, width:].copy_((low << _shifts(codes)).sum(2, dtype=torch.int16).flatten(1))

    def read_codes(self, codes: Tensor, width: int) -> Tensor:
        high = codes[:, :width].view(torch.int8).to(torch.int16) << 2
        low = codes[:, width:].to(torch.int16).view(len(codes), -1, 1, 4) >> _shifts(codes)
        return high | (low & 3).flatten(1)[:, :width]


def _shifts(on: Tensor) -> Tensor:
    return torch.arange(0, 8, 2, dtype=torch.int16, device=on.device)[:, None]
