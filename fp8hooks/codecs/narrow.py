"""Integers in the smallest type that holds them all, without loss."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8hooks.codecs.base import Codec, Payload

_TYPES = (torch.uint8, torch.int16, torch.int32)


class Narrow(Codec):
    """The buffer holds the elements as uint8, int16 or int32; which, its size tells."""

    name = "narrow"
    dtypes = frozenset({torch.int64, torch.int32})

    def encode(self, core: Tensor, limit: int | None = None, seed: int | None = None) -> Payload | None:
        flat = core.reshape(-1)
        if limit is not None:
            least, most = 0, limit - 1
        elif flat.device.type == "cpu":
            least, most = int(flat.min()), int(flat.max())
        else:
            return None  # the values can't be asked without waiting for the GPU
        for dtype in _TYPES:
            info = torch.iinfo(dtype)
            if dtype.itemsize < flat.dtype.itemsize and info.min <= least and most <= info.max:
                return Payload(self, flat.to(dtype).view(torch.uint8), flat.numel(), flat.dtype, finite=True)
        return None

    def decode(self, payload: Payload) -> Tensor:
        size = payload.buffer.numel() // payload.numel
        dtype = next(dtype for dtype in _TYPES if dtype.itemsize == size)
        return payload.buffer.view(dtype).to(payload.dtype)

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def error_bound(self, flat: Tensor) -> Tensor:
        return torch.zeros(flat.numel(), dtype=torch.float64, device=flat.device)
