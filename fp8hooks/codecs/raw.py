"""The bytes as they are: for storages that are moved and not compressed."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8hooks.codecs.base import Codec, Payload


class Raw(Codec):
    """The buffer is the tensor's own memory; uint8."""

    name = "raw"
    dtypes = frozenset({torch.uint8})

    def encode(self, core: Tensor, limit: int | None = None, seed: int | None = None) -> Payload:
        return Payload(self, core.reshape(-1), core.numel(), core.dtype, finite=True)

    def decode(self, payload: Payload) -> Tensor:
        return payload.buffer

    def nbytes(self, numel: int) -> int:
        return numel

    def error_bound(self, flat: Tensor) -> Tensor:
        return torch.zeros(flat.numel(), dtype=torch.float64, device=flat.device)
