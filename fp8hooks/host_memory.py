"""Host memory of a session, in slabs, pinned where there is a GPU. They stay with the session; a region of one is used
again only behind the copies that touched it.
"""

from __future__ import annotations

import os
import threading
from collections import deque

import torch
from torch import Tensor

# Memory is pinned in pieces of so many bytes at least: powers of two, which torch's allocator would round up to.
_SLAB = 1 << 28
_ALIGN = 512


def default_budget() -> int:
    """Half of the memory of this machine, or of the control group that we run in, shared by the local ranks."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 35
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            total = min(total, int(file.read()))
    except (OSError, ValueError):  # no such limit
        pass
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return total // 2 // max(1, int(ranks) if ranks.isdecimal() else 1)


class Region:
    """Some bytes of a slab.

    Attributes:
        memory: them, uint8.
        busy: after the last copies that were launched on them; none on a CPU.
    """

    __slots__ = ("busy", "memory", "slab", "start", "stop")

    def __init__(self, slab: int, start: int, stop: int, memory: Tensor) -> None:
        self.slab = slab
        self.start = start
        self.stop = stop
        self.memory = memory
        self.busy: list[torch.cuda.Event] = []


class _Slab:
    """Host memory, and what of it is free: disjoint [start, stop), sorted, never adjacent.

    Attributes:
        copies: [start, stop) that were given back, each with a copy that may still run there.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.free = [(0, nbytes)]
        self.copies: deque[tuple[int, int, torch.cuda.Event]] = deque()

    def take(self, nbytes: int) -> int | None:
        """The start of `nbytes` that are free no more: the first that suffice."""
        for i, (start, stop) in enumerate(self.free):
            if stop - start >= nbytes:
                rest = [(start + nbytes, stop)] if stop - start > nbytes else []
                self.free[i : i + 1] = rest
                return start
        return None

    def give_back(self, start: int, stop: int) -> None:
        i = next((i for i, (other, _) in enumerate(self.free) if other > start), len(self.free))
        if i < len(self.free) and self.free[i][0] == stop:
            stop = self.free.pop(i)[1]
        if i > 0 and self.free[i - 1][1] == start:
            i -= 1
            start = self.free.pop(i)[0]
        self.free.insert(i, (start, stop))

    def running(self, start: int, stop: int) -> list[torch.cuda.Event]:
        """The copies that may still run on any of these bytes."""
        while self.copies and self.copies[0][2].query():
            self.copies.popleft()
        return [event for first, last, event in self.copies if first < stop and start < last]


class Pool:
    """Host memory of one session, never more than a budget. May be used from any thread.

    Attributes:
        reserved: bytes of all slabs.
        used: bytes of the regions that are out.
        refused: bytes that were asked for in vain.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._slabs: list[_Slab] = []
        self._lock = threading.Lock()
        # Regions come back when a graph dies, which may be in the middle of anything, `take` included: no lock there.
        self._back: deque[Region] = deque()
        self.reserved = 0
        self.used = 0
        self.refused = 0

    def take(self, nbytes: int) -> Region | None:
        """A region of `nbytes`; None if the budget leaves no room."""
        size = -(-nbytes // _ALIGN) * _ALIGN
        with self._lock:
            self._collect()
            for number, slab in enumerate(self._slabs):
                start = slab.take(size)
                if start is not None:
                    return self._region(number, start, size, nbytes)
            if not self._grow(size):
                self.refused += nbytes
                return None
            start = self._slabs[-1].take(size)
            assert start is not None
            return self._region(len(self._slabs) - 1, start, size, nbytes)

    def give_back(self, region: Region) -> None:
        """Its bytes may be used again, after its last copy."""
        self._back.append(region)

    def collect(self) -> int:
        """Count what has come back; the bytes that are out."""
        with self._lock:
            self._collect()
            return self.used

    def _collect(self) -> None:
        while self._back:
            region = self._back.popleft()
            slab = self._slabs[region.slab]
            slab.copies.extend((region.start, region.stop, event) for event in region.busy)
            slab.give_back(region.start, region.stop)
            self.used -= region.stop - region.start

    def _region(self, number: int, start: int, size: int, nbytes: int) -> Region:
        slab = self._slabs[number]
        self.used += size
        region = Region(number, start, start + size, slab.memory[start : start + nbytes])
        region.busy = slab.running(start, start + size)
        return region

    def _grow(self, size: int) -> bool:
        slab = _SLAB
        while slab < size:
            slab *= 2
        while slab > self._budget - self.reserved:
            slab //= 2
        if slab < size:
            return False
        try:
            self._slabs.append(_Slab(slab))
        except RuntimeError:  # the system pins no more
            self._budget = self.reserved
            return False
        self.reserved += slab
        return True
