"""What the pack hook leaves in the autograd graph, and how the tensor comes out of it again.

These objects are all the state there is: they die with the graph node that owns them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fp8hooks.codecs import Payload
from fp8hooks.identity import Geometry, like, view_as


class Site(NamedTuple):
    """Who saves a tensor, and as what."""

    module: str
    op: str
    role: str

    def __str__(self) -> str:
        where = f" in module '{self.module}'" if self.module else ""
        return f"op '{self.op}'{where} (role {self.role})"


class Exact:
    """A tensor kept as it is, with the version it had: an edit in place since then is an error, as in autograd.

    With hooks installed autograd leaves that check to them. A version of None (inference tensors have none) is not
    checked.
    """

    __slots__ = ("site", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int | None, site: Site) -> None:
        self.tensor = tensor
        self.version = version
        self.site = site

    def unpack(self) -> Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] saved by {self.site} is at version "
                f"{self.tensor._version}; expected version {self.version} instead."
            )
        return self.tensor


class Packed:
    """A tensor stored by a codec. Each `unpack` decodes afresh, since whoever asked may write into the result."""

    __slots__ = ("__weakref__", "payload", "shape")

    def __init__(self, payload: Payload, shape: Geometry) -> None:
        self.payload = payload
        self.shape = shape

    def unpack(self) -> Tensor:
        payload, shape = self.payload, self.shape
        if payload.coder is not None:
            memory = payload.coder.decode(payload, *shape.memory)
            if memory is not None:
                return view_as(memory, shape)
        if shape.dense:
            return payload.decode().as_strided(shape.sizes, shape.strides)
        tensor, core = like(shape, payload.dtype, payload.buffer.device)
        payload.decode_into(core)
        return tensor


class Wrapped:
    """A tensor around another: the inner one is saved, the outer one made again."""

    __slots__ = ("inner", "join")

    def __init__(self, inner: Exact | Packed, join: Callable[[Tensor], Tensor]) -> None:
        self.inner = inner
        self.join = join

    def unpack(self) -> Tensor:
        return self.join(self.inner.unpack())


Saved = Exact | Packed | Wrapped
