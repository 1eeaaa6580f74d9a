"""Payloads in host memory: copied out behind forward, copied back ahead of backward, on streams of their own.

What is copied is already 8 bits an element. On a CPU the copies are plain ones, and all else is the same.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fp8hooks.host_memory import Pool, Region, default_budget

if TYPE_CHECKING:
    from fp8hooks.codecs import Payload
    from fp8hooks.saved import Packed

#: A copy of fewer bytes is not worth its launch.
LEAST_OFFLOADED = 1 << 16

#: So many bytes may be on their way out, and still take up memory of the device, or be back before they are asked for,
#: beyond what the device has room for anyway.
IN_FLIGHT = 1 << 29


class _Streams:
    """The streams of a GPU on which copies run: one out, one back, since the bus has both directions."""

    def __init__(self, device: int) -> None:
        self.out = torch.cuda.Stream(device)
        self.back = torch.cuda.Stream(device)


_streams: dict[int, _Streams] = {}


def _streams_of(device: torch.device) -> _Streams:
    assert device.index is not None
    return _streams.get(device.index) or _streams.setdefault(device.index, _Streams(device.index))


def _after(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _copy(target: Tensor, source: Tensor, stream: torch.cuda.Stream, region: Region) -> torch.cuda.Event:
    """Copy on `stream`, behind what runs now and what the region waits for; an event after it."""
    stream.wait_event(_after(torch.cuda.current_stream(stream.device)))
    for event in region.busy:
        stream.wait_event(event)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    done = _after(stream)
    region.busy = [done]
    return done


class _Back(NamedTuple):
    """Bytes on their way back, or there.

    Attributes:
        buffer: on the device, allocated on `stream`.
        done: after the copy.
    """

    buffer: Tensor
    stream: torch.cuda.Stream
    done: torch.cuda.Event


class Home:
    """Bytes in host memory, of a buffer that was on a device. It gives its region back when it dies.

    Attributes:
        nbytes, device: of the buffer.
        resident: the buffer itself, while the copy out of it may run.
    """

    __slots__ = ("__weakref__", "_back", "_lock", "_pool", "_region", "device", "nbytes", "resident")

    def __init__(self, pool: Pool, region: Region, buffer: Tensor) -> None:
        self._pool = pool
        self._region = region
        self._back: _Back | None = None
        self._lock = threading.Lock()
        self.nbytes = buffer.numel()
        self.device = buffer.device
        self.resident: Tensor | None = None

    def buffer(self) -> Tensor:
        """The bytes on the device, for the current stream: those that are there yet, or came ahead, or come now."""
        resident = self.resident
        if resident is not None:
            return resident
        if self.device.type != "cuda":
            return self._region.memory.clone()
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "fp8hooks: a tensor that was saved before a CUDA graph is captured is in host memory and can't be "
                "brought back inside; capture forward too, or set offload=False"
            )
        with self._lock:
            back, self._back = self._back or self._fetch(), None
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(back.done)
        if stream != back.stream:
            back.buffer.record_stream(stream)
        return back.buffer

    def fetch(self) -> bool:
        """Start to bring the bytes back, for the current stream; False if they are there, or don't fit."""
        if self.resident is not None or self.device.type != "cuda":
            return False
        with self._lock:
            if self._back is not None:
                return False
            try:
                self._back = self._fetch()
            except torch.OutOfMemoryError:  # later, then, when it must be
                return False
        return True

    @property
    def fetched(self) -> bool:
        """Whether bytes that came ahead wait to be asked for."""
        return self._back is not None

    def drop(self) -> None:
        """Forget what came ahead."""
        with self._lock:
            back, self._back = self._back, None
        if back is not None:
            # The memory may be used for something else on its stream from now on.
            back.stream.wait_event(back.done)

    def _fetch(self) -> _Back:
        stream = torch.cuda.current_stream(self.device)
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        done = _copy(buffer, self._region.memory, _streams_of(self.device).back, self._region)
        return _Back(buffer, stream, done)

    def __del__(self) -> None:
        if self._back is not None:
            self._back.stream.wait_event(self._back.done)
        self._pool.give_back(self._region)


class _Out(NamedTuple):
    """A copy out that may still run."""

    home: weakref.ref[Home]
    buffer: Tensor
    stream: torch.cuda.Stream
    done: torch.cuda.Event


class Offloader:
    """Moves buffers to the host, for one session."""

    def __init__(self, budget: int | None) -> None:
        self.budget = default_budget() if budget is None else budget
        self.pool = Pool(self.budget)
        self._out: deque[_Out] = deque()
        self._out_bytes = 0
        self._lock = threading.Lock()

    def suits(self, buffer: Tensor) -> bool:
        """Whether a buffer may be moved: it is worth a copy, frees what is short, and no CUDA graph is captured."""
        if buffer.numel() < LEAST_OFFLOADED:
            return False
        if buffer.is_cuda:
            return not torch.cuda.is_current_stream_capturing()
        # Beside a GPU the memory of the CPU is not what is short; without one this serves for trying things out.
        return buffer.device.type == "cpu" and not torch.cuda.is_available()

    @property
    def busy(self) -> bool:
        """Whether copies may be on their way."""
        return bool(self._out)

    def move(self, buffer: Tensor, room: int = 0, foreign: bool = False) -> Home | None:
        """Copy a buffer (uint8, contiguous) to the host; None if there is no room.

        Args:
            room: bytes that the device has left for copies that still run, beside `IN_FLIGHT`.
            foreign: its memory was not allocated here, and so maybe on another stream than the current one.
        """
        region = self.pool.take(buffer.numel())
        if region is None:
            return None
        home = Home(self.pool, region, buffer)
        if not buffer.is_cuda:
            region.memory.copy_(buffer)
            return home
        home.resident = buffer
        out = _streams_of(buffer.device).out
        done = _copy(region.memory, buffer, out, region)
        if foreign:
            buffer.record_stream(out)
        with self._lock:
            self._out.append(_Out(weakref.ref(home), buffer, torch.cuda.current_stream(buffer.device), done))
            self._out_bytes += home.nbytes
        self.settle(room)
        return home

    def settle(self, room: int = 0) -> None:
        """Let go of buffers that have been copied, and of the oldest while too many are on their way; see `move`."""
        most = IN_FLIGHT + max(0, room)
        with self._lock:
            while self._out:
                home, buffer, stream, done = self._out[0]
                if not done.query():
                    if self._out_bytes <= most:
                        return
                    stream.wait_event(done)
                self._out.popleft()
                self._out_bytes -= buffer.numel()
                found = home()
                if found is not None:
                    found.resident = None


# So many payloads are on their way back at most, and dropped if nobody asked for them among the next so many.
_AHEAD = 64
_PATIENCE = 256
# So many saves are looked at for one that backward asks for.
_LOOKED_AT = 256


class Fetcher:
    """Brings payloads back ahead of backward, for one entry of a session."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._lock = threading.Lock()
        self._cursor: int | None = None
        self._expected: int | None = None
        self._count = 0
        self._asked: set[int] = set()
        self._waiting: list[tuple[int, weakref.ref[Home]]] = []
        # Payloads of the device that backward has asked for; their bytes make room as they die.
        self._leaving: weakref.WeakSet[Payload] = weakref.WeakSet()
        self._left: deque[tuple[weakref.ref[Payload], int]] = deque()
        self._freed = 0

    def ask(self, number: int, saves: Sequence[weakref.ref[Packed]], following: Callable[[int], int | None]) -> None:
        """Backward has asked for a save: fetch those that will come after it, in the order that `following` tells."""
        self._settle()
        with self._lock:
            self._count += 1
            if number in self._asked:  # once more through a graph that was retained
                self._asked.clear()
            self._asked.add(number)
            self._make_room(saves[number]())
            after = following(number)
            if number != self._expected or self._cursor is None:
                self._cursor = after
            self._expected = after
            self._fetch(saves, following)

    def _make_room(self, packed: Packed | None) -> None:
        if packed is not None and packed.payload.home is None and packed.payload not in self._leaving:
            self._leaving.add(packed.payload)
            self._left.append((weakref.ref(packed.payload), packed.payload.nbytes))
        while self._left and self._left[0][0]() is None:
            self._freed += self._left.popleft()[1]
        kept = []
        for since, found in self._waiting:
            home = found()
            if home is None or not home.fetched:
                continue
            if self._count - since > _PATIENCE:
                home.drop()
            else:
                kept.append((since, found))
        self._waiting = kept

    def _fetch(self, saves: Sequence[weakref.ref[Packed]], following: Callable[[int], int | None]) -> None:
        homes = [home for _, found in self._waiting if (home := found()) is not None]
        room = IN_FLIGHT + self._freed - sum(home.nbytes for home in homes)
        for _ in range(_LOOKED_AT):
            if self._cursor is not None and self._cursor >= len(saves):  # learned in an entry that had more saves
                self._cursor = None
            if self._cursor is None or len(self._waiting) >= _AHEAD:
                return
            packed = saves[self._cursor]()
            home = None if packed is None or self._cursor in self._asked else packed.payload.home
            if home is not None:
                if home.nbytes > room and self._waiting:
                    return
                if home.fetch():
                    room -= home.nbytes
                    self._waiting.append((self._count, weakref.ref(home)))
            self._cursor = following(self._cursor)
