"""INT8: uniform steps of 0.4 to 0.8 % of a block's range."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8hooks.codecs.integers import Integers


class Int8(Integers):
    """A byte an element. See `fp8hooks.codecs.integers` for scale, offset, specials and the error."""

    name = "int8"
    bits = 8

    def write_codes(self, steps: Tensor, codes: Tensor) -> None:
        codes.view(torch.int8).copy_(steps)

    def read_codes(self, codes: Tensor, width: int) -> Tensor:
        return codes.view(torch.int8)
