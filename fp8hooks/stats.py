"""The ledger: what one step saved, and what of it is held now."""

from __future__ import annotations

import logging
import re
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from fp8hooks.codecs import Payload
from fp8hooks.saved import Site

_log = logging.getLogger(__name__)


@dataclass
class Bucket:
    """Sums over some of the saved tensors.

    Attributes:
        tensors: how often autograd saved one.
        original_bytes: unique storage that autograd would have held for them; the first to save it is charged.
        stored_bytes: bytes held in its place on the device.
        elements: elements of the payloads that were made.
        host_bytes: bytes held in host memory.
    """

    tensors: int = 0
    original_bytes: int = 0
    stored_bytes: int = 0
    elements: int = 0
    host_bytes: int = 0

    def add(self, tensors: int, original_bytes: int, stored_bytes: int, elements: int = 0, host_bytes: int = 0) -> None:
        self.tensors += tensors
        self.original_bytes += original_bytes
        self.stored_bytes += stored_bytes
        self.elements += elements
        self.host_bytes += host_bytes

    @property
    def savings(self) -> float:
        """The share given back, from 0 to 1 (below 0 if more is held than before)."""
        return 1 - self.stored_bytes / self.original_bytes if self.original_bytes else 0.0

    def to_dict(self) -> dict[str, float]:
        return {
            "tensors": self.tensors,
            "original_bytes": self.original_bytes,
            "stored_bytes": self.stored_bytes,
            "elements": self.elements,
            "host_bytes": self.host_bytes,
            "savings": self.savings,
        }


@dataclass
class Stats(Bucket):
    """What one step saved: the latest time that the session was open.

    Parameters are not counted: their modules hold them, whether autograd saves them or not.

    Attributes:
        steps: how many times the session has been open, this one included.
        weight_bytes: unique storage of parameters, and of casts and views of them, that autograd saved.
        not_freed_bytes: of the compressed tensors' storage, what somebody else still held when the session closed;
            compressing that gained nothing yet.
        by_role, by_codec, by_op: the same sums by name.
        sites: the same sums by `Site` (module, op, role) and codec.
        not_freed: `not_freed_bytes` by op.
    """

    steps: int = 0
    weight_bytes: int = 0
    not_freed: dict[str, int] = field(default_factory=dict)
    by_role: dict[str, Bucket] = field(default_factory=dict)
    by_codec: dict[str, Bucket] = field(default_factory=dict)
    by_op: dict[str, Bucket] = field(default_factory=dict)
    sites: dict[tuple[Site, str], Bucket] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def not_freed_bytes(self) -> int:
        return sum(self.not_freed.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON or a logger."""
        return {
            **super().to_dict(),
            "steps": self.steps,
            "weight_bytes": self.weight_bytes,
            "not_freed_bytes": self.not_freed_bytes,
            "by_role": _plain(self.by_role),
            "by_codec": _plain(self.by_codec),
            "by_op": _plain(self.by_op),
            "sites": [
                {**site._asdict(), "codec": codec, **bucket.to_dict()} for (site, codec), bucket in self.sites.items()
            ],
            "notes": list(self.notes),
        }


def _plain(buckets: dict[str, Bucket]) -> dict[str, dict[str, float]]:
    return {name: bucket.to_dict() for name, bucket in buckets.items()}


#: Sums of one context: by site and codec, [tensors, original bytes, stored bytes, elements, host bytes].
Rows = dict[tuple[Site, str], list[int]]


class Ledger:
    """Counts for one session, from any number of threads.

    Each context writes into rows of its own; they are added up when somebody asks. Payloads are watched through weak
    references, never held. The callbacks of those run whenever a graph dies, in the middle of anything, so all they
    do is one atomic operation on a dictionary, without a lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[weakref.ref[Payload], int] = {}
        self._logged: set[str] = set()
        self.steps = 0
        self._forget()

    def _forget(self) -> None:
        self._rows: list[Rows] = []
        self._weights: dict[int, int] = {}
        self._not_freed: dict[str, int] = {}
        self._notes: list[str] = []

    def begin_step(self) -> None:
        """Forget the step before."""
        with self._lock:
            self._forget()
            self.steps += 1

    def rows(self) -> Rows:
        """New rows, for one context of this step."""
        rows: Rows = {}
        self._rows.append(rows)
        return rows

    @property
    def contexts(self) -> int:
        """How many contexts of this step have asked for rows."""
        return len(self._rows)

    def record_weight(self, address: int, nbytes: int) -> None:
        """Count the storage of a parameter, or of a view or copy of one, once."""
        self._weights[address] = nbytes

    def record_not_freed(self, op: str, nbytes: int) -> None:
        """Count storage that was compressed and is still held by somebody."""
        with self._lock:
            self._not_freed[op] = self._not_freed.get(op, 0) + nbytes

    def note(self, text: str) -> None:
        """Say something in the report, once a step, and in the log, once and for all, whatever its figures."""
        if text not in self._notes:
            self._notes.append(text)
            kind = re.sub(r"[\d.,]+", "", text)
            if kind not in self._logged:
                self._logged.add(kind)
                _log.warning("%s", text)

    def watch(self, payload: Payload) -> weakref.ref[Payload]:
        """Count a payload among what is held, for as long as it lives; a weak reference to it."""
        reference = weakref.ref(payload, self._live.pop)
        self._live[reference] = payload.nbytes
        return reference

    @property
    def held_bytes(self) -> int:
        """Bytes of all payloads alive now, of this step and of earlier ones."""
        return sum(self._live.copy().values())

    def stats(self) -> Stats:
        """The sums of this step so far."""
        stats = Stats(
            steps=self.steps,
            weight_bytes=sum(list(self._weights.values())),
            not_freed=dict(self._not_freed),
            notes=list(self._notes),
        )
        for rows in list(self._rows):
            for key, row in list(rows.items()):
                site, codec = key
                for bucket in (
                    stats,
                    stats.sites.setdefault(key, Bucket()),
                    stats.by_role.setdefault(site.role, Bucket()),
                    stats.by_codec.setdefault(codec, Bucket()),
                    stats.by_op.setdefault(site.op, Bucket()),
                ):
                    bucket.add(*row)
        return stats
