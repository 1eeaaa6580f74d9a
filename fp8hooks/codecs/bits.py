"""One bit an element: bool masks, and float tensors that hold zero and one other value (dropout's noise on a CPU),
without loss; and the signs that are all of a tensor that some backwards look at."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8hooks.codecs.base import FLOATS, Codec, Payload

# Eight bytes of 0 or 1, seen as one int64, times this: the top byte gathers their lowest bits.
_GATHER = 0x0102040810204080
# A byte times this is that byte eight times; of each copy the mask keeps another bit.
_SPREAD = 0x0101010101010101
_KEEP = -0x7FBFDFEFF7FBFDFF
_ONES = 0x7F7F7F7F7F7F7F7F


class Bits(Codec):
    """The buffer holds 8 elements a byte, and for floats before it the other value, in eight bytes."""

    name = "bits"
    dtypes = FLOATS | {torch.bool}

    def encode(self, core: Tensor, limit: int | None = None, seed: int | None = None) -> Payload | None:
        flat = core.reshape(-1)
        numel = flat.numel()
        if flat.dtype is torch.bool:
            return Payload(self, _pack(flat), numel, flat.dtype, finite=True)
        if flat.device.type != "cpu":
            return None  # whether there are two values can't be asked without waiting for the GPU
        other = flat.max() if bool(flat.max() > 0) else flat.min()
        mask = flat != 0
        if not other.isfinite() or not torch.equal(flat, mask.to(flat.dtype) * other):
            return None
        head = other.to(torch.float64).reshape(1).view(torch.uint8)
        return Payload(self, torch.cat((head, _pack(mask))), numel, flat.dtype, finite=True)

    def decode(self, payload: Payload) -> Tensor:
        if payload.dtype is torch.bool:
            return _unpack(payload.buffer, payload.numel)
        other = payload.buffer[:8].view(torch.float64).to(payload.dtype)
        return _unpack(payload.buffer[8:], payload.numel).to(payload.dtype).mul_(other)

    def nbytes(self, numel: int) -> int:
        return -(-numel // 8)

    def error_bound(self, flat: Tensor) -> Tensor:
        return torch.zeros(flat.numel(), dtype=torch.float64, device=flat.device)


class Signs(Codec):
    """One bit an element: whether it is positive (or NaN), all that ReLU's backward asks. Decodes to 1 and 0."""

    name = "signs"
    dtypes = FLOATS

    def encode(self, core: Tensor, limit: int | None = None, seed: int | None = None) -> Payload:
        flat = core.reshape(-1)
        return Payload(self, _pack(~(flat <= 0)), flat.numel(), flat.dtype, finite=True)

    def decode(self, payload: Payload) -> Tensor:
        return _unpack(payload.buffer, payload.numel).to(payload.dtype)

    def nbytes(self, numel: int) -> int:
        return -(-numel // 8)

    def error_bound(self, flat: Tensor) -> Tensor:
        return torch.where(flat <= 0, -flat, (flat - 1).abs()).double()


def _pack(mask: Tensor) -> Tensor:
    numel = mask.numel()
    padded = torch.zeros(-(-numel // 8) * 8, dtype=torch.bool, device=mask.device)
    padded[:numel] = mask
    return ((padded.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def _unpack(packed: Tensor, numel: int) -> Tensor:
    spread = (packed.to(torch.int64) * _SPREAD) & _KEEP
    return (((spread + _ONES) >> 7) & _SPREAD).view(torch.bool)[:numel]
