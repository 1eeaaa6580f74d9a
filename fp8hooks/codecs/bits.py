"""One bit an element: bool masks, and float tensors that hold zero and one other value (dropout's noise on a CPU),
without loss; and the signs that are all of a tensor that some backwards look at."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8hooks import kernels
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
            return Payload(self, pack(flat), numel, flat.dtype, finite=True)
        if flat.device.type != "cpu":
            return None  # whether there are two values can't be asked without waiting for the GPU
        other = flat.max() if bool(flat.max() > 0) else flat.min()
        mask = flat != 0
        if not other.isfinite() or not torch.equal(flat, mask.to(flat.dtype) * other):
            return None
        head = other.to(torch.float64).reshape(1).view(torch.uint8)
        return Payload(self, torch.cat((head, pack(mask))), numel, flat.dtype, finite=True)

    def decode(self, payload: Payload) -> Tensor:
        if payload.dtype is torch.bool:
            return unpack(payload.buffer, payload.numel, torch.bool)
        other = payload.buffer[:8].view(torch.float64).to(payload.dtype)
        return unpack(payload.buffer[8:], payload.numel, payload.dtype).mul_(other)

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
        return Payload(self, pack(flat, signs=True), flat.numel(), flat.dtype, finite=True)

    def decode(self, payload: Payload) -> Tensor:
        return unpack(payload.buffer, payload.numel, payload.dtype)

    def nbytes(self, numel: int) -> int:
        return -(-numel // 8)

    def error_bound(self, flat: Tensor) -> Tensor:
        return torch.where(flat <= 0, -flat, (flat - 1).abs()).double()


def pack(flat: Tensor, signs: bool = False) -> Tensor:
    """A bit for each element, eight a byte (uint8), the first in the lowest: of a bool itself, of a number its sign."""
    if flat.is_cuda:
        buffer = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)
        if kernels.pack_bits(flat, buffer, signs):
            return buffer
    return pack_reference(flat, signs)


def unpack(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack`: a flat tensor of `dtype` with 1 and 0."""
    if packed.is_cuda:
        out = torch.empty(numel, dtype=dtype, device=packed.device)
        if kernels.unpack_bits(packed, out):
            return out
    return unpack_reference(packed, numel, dtype)


def pack_reference(flat: Tensor, signs: bool = False) -> Tensor:
    """`pack` in plain torch operations."""
    padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.bool, device=flat.device)
    padded[: flat.numel()] = ~(flat <= 0) if signs else flat
    return ((padded.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def unpack_reference(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """`unpack` in plain torch operations."""
    spread = (packed.to(torch.int64) * _SPREAD) & _KEEP
    return (((spread + _ONES) >> 7) & _SPREAD).view(torch.bool)[:numel].to(dtype)
