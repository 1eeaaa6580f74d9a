"""What the pack hook leaves in the autograd graph, and how the tensor comes out of it again.

These objects are all the state there is: they die with the graph node that owns them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fp8hooks import devices, profiling
from fp8hooks.codecs import Payload
from fp8hooks.identity import Geometry, core_of, edited_message, view_as
from fp8hooks.overlap import Trace


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
            raise RuntimeError(edited_message(self.tensor, self.version, str(self.site)))
        return self.tensor


def keep_exact(tensor: Tensor, site: Site) -> Exact:
    """A tensor as it is, to be checked for edits."""
    # Detached: holding an output of the node that holds us would be a cycle that only gc could free.
    kept = tensor.detach()
    try:
        return Exact(kept, kept._version, site)
    except RuntimeError:  # an inference tensor
        return Exact(kept, None, site)


class Packed:
    """A tensor stored by a codec. Each `unpack` decodes afresh, since whoever asked may write into the result.

    Attributes:
        trace, number: for decoding it ahead, see `fp8hooks.overlap`.
        shares: its consumer is one of torch's own, which autograd's version counters see writing, and so may be given
            what was decoded for another one. See `Shared`.
    """

    __slots__ = ("__weakref__", "number", "payload", "shape", "shares", "trace")

    def __init__(self, payload: Payload, shape: Geometry, shares: bool) -> None:
        self.payload = payload
        self.shape = shape
        self.shares = shares
        self.trace: Trace | None = None
        self.number = 0

    def unpack(self) -> Tensor:
        if profiling.active():
            with profiling.span("decode"):
                tensor = self._tensor()
        else:
            tensor = self._tensor()
        if self.trace is not None:
            self.trace.ask(self.number)
        return tensor

    def _tensor(self) -> Tensor:
        payload, shape = self.payload, self.shape
        if payload.ready is not None and payload.home is None:
            torch.cuda.current_stream(payload.buffer.device).wait_event(payload.ready)
        if payload.edited is not None:
            raise RuntimeError(payload.edited)
        if self.shares and payload.shared is not None:
            memory: Tensor = payload.shared.memory(self._memory)
            return memory.as_strided(shape.sizes, shape.strides)
        return view_as(self._memory(), shape)

    def _memory(self) -> Tensor:
        """New memory, of `Geometry.memory`, with what was stored."""
        payload, shape = self.payload.here(), self.shape
        if payload.ahead is not None:
            taken: Tensor | None = payload.ahead.take(shape)
            payload.ahead = None
            if taken is not None:
                return taken
        if payload.coder is not None:
            memory = payload.coder.decode(payload, *shape.memory)
            if memory is not None:
                return memory
        if shape.dense:
            return payload.decode().as_strided(*shape.memory)
        memory = torch.empty(shape.span, dtype=payload.dtype, device=payload.buffer.device)
        payload.decode_into(core_of(memory, shape))
        return memory


class Moved:
    """A tensor kept as it is, its storage in host memory, with the version it had, checked as that of `Exact`.

    Args:
        tensor: what was saved; its memory is not held.
        packed: what gives back the bytes of its storage.
    """

    __slots__ = ("_bits", "_packed", "_place", "_probe", "_site", "_version")

    def __init__(self, tensor: Tensor, packed: Packed, site: Site) -> None:
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._bits = tensor.is_conj(), tensor.is_neg()
        # A tensor without memory that shares the version counter: whoever edits the other one counts here too.
        self._probe = tensor.detach()
        self._version = self._probe._version
        self._probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._packed = packed
        self._site = site

    def unpack(self) -> Tensor:
        probe = self._probe
        if probe._version != self._version:
            raise RuntimeError(edited_message(probe, self._version, str(self._site), tuple(self._place[1])))
        storage = self._packed.unpack().untyped_storage()
        tensor = torch.empty(0, dtype=probe.dtype, device=probe.device).set_(storage, *self._place)
        conjugate, negative = self._bits
        tensor = torch._conj(tensor) if conjugate else tensor
        return torch._neg_view(tensor) if negative else tensor


# The one `Shared` of each thread that holds decoded memory.
_holder = threading.local()


class Shared:
    """What several consumers of a payload get: decoded for the first, dropped after the last.

    It is also dropped as soon as another one is decoded on the same thread, so that consumers which are far apart, or
    never come, keep at most one tensor alive.
    """

    __slots__ = ("__weakref__", "_kept", "_left", "users")

    def __init__(self) -> None:
        self.users = 1
        self._left = 0
        self._kept: tuple[Tensor, int, int] | None = None

    @property
    def decoded(self) -> bool:
        """Whether it holds decoded memory now."""
        return self._kept is not None

    def memory(self, decode: Callable[[], Tensor]) -> Tensor:
        """What `decode` gives, or what it gave to another consumer."""
        kept = self._kept
        if kept is not None:
            memory, version, stream = kept
            if memory._version == version and devices.stream_of(memory) == stream:
                self._left -= 1
                if self._left <= 0:
                    self._kept = None
                return memory
        memory = decode()
        self._hold(memory)
        return memory

    def _hold(self, memory: Tensor) -> None:
        before = getattr(_holder, "held", None)
        before = None if before is None else before()
        if before is not None and before is not self:
            before._kept = None
        self._left = self.users - 1
        self._kept = (memory, memory._version, devices.stream_of(memory))
        _holder.held = weakref.ref(self)


class Wrapped:
    """A tensor around another: the inner one is saved, the outer one made again."""

    __slots__ = ("inner", "join")

    def __init__(self, inner: Exact | Moved | Packed, join: Callable[[Tensor], Tensor]) -> None:
        self.inner = inner
        self.join = join

    def unpack(self) -> Tensor:
        return self.join(self.inner.unpack())


Saved = Exact | Moved | Packed | Wrapped
