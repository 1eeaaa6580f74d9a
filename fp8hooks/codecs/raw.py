"""The bytes as they are: for tensors that are moved and not compressed."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8hooks.codecs.base import Codec, Payload


class Raw(Codec):
    """The buffer is the tensor's own memory, which must be dense; any dtype."""

    name = "raw"
    dtypes = frozenset()

    def encode(self, core: Tensor, limit: int | None = None, seed: int | None = None) -> Payload:
        return Payload(self, core.reshape(-1).view(torch.uint8), core.numel(), core.dtype)

    def decode(self, payload: Payload) -> Tensor:
        return payload.buffer.view(payload.dtype)

    def nbytes(self, numel: int) -> int:
        return 16 * numel

    def error_bound(self, flat: Tensor) -> Tensor:
        return torch.zeros(flat.numel(), dtype=torch.float64, device=flat.device)
