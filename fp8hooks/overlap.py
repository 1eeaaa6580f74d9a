"""Encoding beside the operations that come after, and decoding ahead of those that will ask, in CUDA graphs.

On a second stream, which the graph records as a branch. Layers of width 512, whose kernels leave most of an H200 idle,
took 1.20 of the uncompressed time without it, 1.12 with it. Outside graphs it is not done: the host would pay for the
events, and Llama-3-8B's layers took 1.056 to 1.063 of the uncompressed time with any settings, 1.060 without, since
large products leave an encoder no registers.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fp8hooks.codecs import Coder, Payload
from fp8hooks.identity import Geometry, edited_message
from fp8hooks.offload import Fetcher

if TYPE_CHECKING:
    from fp8hooks.saved import Packed, Site

# So many saves later the first stream waits for the second, and the tensor's memory may be used again.
_LAG = 2

# So many tensors are decoded ahead at most, and dropped if backward did not ask for them among the next so many.
_AHEAD = 2
_PATIENCE = 4

_streams = threading.local()


def side_stream(device: int) -> torch.cuda.Stream:
    """The second stream of this thread on a GPU."""
    known: dict[int, torch.cuda.Stream] = _streams.__dict__.setdefault("side", {})
    stream = known.get(device)
    if stream is None:
        stream = known[device] = torch.cuda.Stream(device)
    return stream


def _after(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


class _Encoding(NamedTuple):
    """An encoder that was launched on the second stream.

    Attributes:
        tensor, version, site: what it reads, as it was, and who saved it.
        stream: the first stream.
        done: an event after it.
    """

    payload: Payload
    tensor: Tensor
    version: int
    site: Site
    stream: torch.cuda.Stream
    done: torch.cuda.Event


class Encoder:
    """Launches encoders on the second stream, for one entry of a session on one thread."""

    def __init__(self) -> None:
        self._running: deque[_Encoding] = deque()
        self._captured: bool | None = None

    def encode(self, coder: Coder, tensor: Tensor, pointer: int, site: Site) -> Payload | None:
        """As `Coder.encode`, for the memory of `tensor`; None outside graphs."""
        if self._captured is None:
            # A graph that is captured inside the session would end before this is closed.
            self._captured = torch.cuda.is_current_stream_capturing()
        if not self._captured or not torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream()
        side = side_stream(stream.device_index)
        side.wait_event(_after(stream))
        payload = coder.encode(pointer, side.cuda_stream)
        if payload is None:
            return None
        payload.ready = _after(side)
        self._running.append(_Encoding(payload, tensor.detach(), tensor._version, site, stream, payload.ready))
        while len(self._running) > _LAG:
            self._finish()
        return payload

    def close(self) -> None:
        """Let the first stream wait for all that still runs."""
        while self._running:
            self._finish()

    def _finish(self) -> None:
        payload, tensor, version, site, stream, done = self._running.popleft()
        stream.wait_event(done)
        payload.ready = None
        if tensor._version != version:
            # Autograd would say so when backward asks for the tensor, and so will we.
            payload.edited = edited_message(tensor, version, str(site))


class Ahead:
    """A tensor that the second stream decodes before it is asked for."""

    __slots__ = ("_done", "_geometry", "_memory", "_stream")

    def __init__(self, memory: Tensor, geometry: Geometry, stream: torch.cuda.Stream, done: torch.cuda.Event) -> None:
        self._memory: Tensor | None = memory
        self._geometry = geometry
        self._stream = stream
        self._done = done

    def take(self, shape: Geometry) -> Tensor | None:
        """The memory, of `shape.memory`; None if it was made for another stream than the current one."""
        memory = self._memory
        if memory is None or torch.cuda.current_stream() != self._stream:
            return None
        self._stream.wait_event(self._done)
        self._memory = None
        return memory if shape is self._geometry else memory.as_strided(*shape.memory)

    def __del__(self) -> None:
        # The first stream may use this memory for something else from now on.
        if self._memory is not None:
            self._stream.wait_event(self._done)


class Trace:
    """The compressed saves of one entry of a session, by number, and the order in which backward asks for them.

    Args:
        order: after which number which one was asked for, in this or an earlier step; learned from step to step.
        settle: lets go of what has been copied to the host.
    """

    def __init__(self, order: dict[int, int], settle: Callable[[], None]) -> None:
        self._order = order
        self._settle = settle
        self._saves: list[weakref.ref[Packed]] = []
        self._last: int | None = None
        self._asked = 0
        self._ahead: deque[tuple[int, weakref.ref[Payload]]] = deque()
        self._fetcher: Fetcher | None = None
        self._decodes = False

    def add(self, packed: Packed) -> None:
        """Number another save."""
        packed.trace, packed.number = self, len(self._saves)
        self._saves.append(weakref.ref(packed))
        if packed.payload.home is None:
            self._decodes = True
        elif self._fetcher is None:
            self._fetcher = Fetcher(self._settle)

    def ask(self, number: int) -> None:
        """Backward has asked for a save: fetch, or decode, those that will come after it."""
        if self._last is not None and self._last != number:
            self._order[self._last] = number
        self._last = number
        if self._fetcher is not None and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._fetcher.ask(number, self._saves, self._following)
        if not self._decodes or not torch.cuda.is_current_stream_capturing():
            return
        self._asked += 1
        self._forget()
        for _ in range(2 * _AHEAD):
            following = self._order.get(number)
            if following is None or following >= len(self._saves) or len(self._ahead) >= _AHEAD:
                return
            number = following
            packed = self._saves[number]()
            if packed is not None and _start(packed):
                self._ahead.append((self._asked, weakref.ref(packed.payload)))

    def _following(self, number: int) -> int | None:
        """The save that will be asked for after a number; where nothing has been learned yet, the one before it."""
        return self._order.get(number, number - 1 if number else None)

    def _forget(self) -> None:
        """What was asked for, or has waited too long."""
        kept = [
            (since, found)
            for since, found in self._ahead
            if (payload := found()) is not None and payload.ahead is not None and not self._late(since, payload)
        ]
        self._ahead = deque(kept)

    def _late(self, since: int, payload: Payload) -> bool:
        late = self._asked - since > _PATIENCE
        if late:
            payload.ahead = None
        return late


def _start(packed: Packed) -> bool:
    """Decode on the second stream, if it is not decoded already."""
    payload, shape = packed.payload, packed.shape
    coder = payload.coder
    if (
        payload.home is not None
        or coder is None
        or not coder.can_decode
        or payload.ahead is not None
        or payload.ready is not None
    ):
        return False
    if payload.shared is not None and payload.shared.decoded:
        return False
    stream = torch.cuda.current_stream()
    side = side_stream(stream.device_index)
    side.wait_event(_after(stream))
    memory = coder.decode(payload, *shape.memory, stream=side.cuda_stream)
    if memory is None:
        return False
    payload.ahead = Ahead(memory, shape, stream, _after(side))
    return True
