"""INT4: a quarter of bfloat16's bytes and a bit, where memory is dearer than ten times INT8's error."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8hooks.codecs.integers import Integers

#: More elements to a scale, and an outlier takes the steps of too many neighbours.
LARGEST_BLOCK = 32


class Int4(Integers):
    """Of 8 elements in four bytes, byte j holds those of the elements j and j + 4, the first in its lower half.

    Blocks have 16 or 32 elements, whatever larger size is asked for. Those whose elements are all finite use all codes
    for numbers: 7 steps to either side, or 15 from the offset. See `fp8hooks.codecs.integers` for the rest.
    """

    name = "int4"
    bits = 4

    def __init__(self, block_size: int) -> None:
        super().__init__(min(block_size, LARGEST_BLOCK))
        self.plain_levels, self.plain_one_sided_levels = self.shift - 1, 2 * self.shift - 1

    def row_bytes(self, width: int) -> int:
        return -(-width // 8) * 4

    def write_codes(self, steps: Tensor, codes: Tensor) -> None:
        code = F.pad(steps.to(torch.int16) & 15, (0, -steps.shape[1] % 8)).view(len(steps), -1, 2, 4)
        codes.copy_((code[:, :, 0] | (code[:, :, 1] << 4)).flatten(1))

    def read_codes(self, codes: Tensor, width: int) -> Tensor:
        both = codes.to(torch.int16).view(len(codes), -1, 1, 4)
        code = torch.cat((both & 15, both >> 4), 2).flatten(1)[:, :width]
        return (code ^ 8) - 8
