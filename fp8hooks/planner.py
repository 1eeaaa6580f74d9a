"""The knob: from what a step saved, and a share of it to give back, to a plan.

Saves that share a storage are one piece of memory: it goes as a whole or not at all. Each piece has some ways to be
kept, each with its bytes and its cost, and the plan takes steps from one way to a cheaper one in the order of cost for
a byte given back. That is the greedy solution of a knapsack problem with choices, and right up to its last step, after
which steps that were not needed after all are taken back.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fp8hooks.offload import LEAST_OFFLOADED
from fp8hooks.plan import CODEC, EXACT, HOST, INT4, Plan, Save, Totals
from fp8hooks.saved import Site

# Costs are in picoseconds of a step for a byte, measured on an H200 or, for errors, set beside those.

# Encoding and decoding read and write each byte once: 4.2 TB/s.
_TRAFFIC = 2 * 0.24
# How much compressing a role harms the gradient, for an original byte (shared/numerics: error for a byte given back).
_HARM = {"attention_qk": 0.9, "attention_vo": 0.6, "probability": 0.6, "log_prob": 0.3}
# To the host and back, beside other work: what is saved first has a whole step for it, what is saved last none.
_HOST_FIRST, _HOST_LAST = 7.0, 22.0
# Twice the error of 8 bits, or five times (see `fp8hooks.policy`): after everything else.
_INT4_HARM = {"rms_norm": 120.0, "mul": 120.0}
_INT4_LEAST_HARM = 60.0
# Compressing what somebody else holds at the end of forward frees nothing yet: late, but before 4 bits.
_HELD = 30.0

# How many kinds of tensors the report names where what was asked can't be reached.
_MOST_NAMED = 4


class Way(NamedTuple):
    """How to keep a piece of memory.

    Attributes:
        choice: of its saves.
        device, host: bytes held there.
        cost: see above.
    """

    choice: str
    device: int
    host: int
    cost: float


@dataclass
class _Piece:
    """A storage, and the saves that stand for parts of it.

    Attributes:
        first: the site that saved it first.
        nbytes: of the storage.
        before: bytes that were saved before it in the step.
        stored: by save, bytes of its payload.
        int4: by save, bytes that 4 bits would take; only where they may be used.
        fixed: of those in `stored`, the saves that stay on the device.
        exact: by save that the policy keeps as it is, what names its memory if that can be moved (saves of one name are
            moved as one), and whether it is most of the storage.
        held: somebody else holds it when the session closes.
    """

    first: Site
    nbytes: int
    before: int
    stored: dict[Save, int] = field(default_factory=dict)
    int4: dict[Save, int] = field(default_factory=dict)
    fixed: set[Save] = field(default_factory=set)
    exact: dict[Save, tuple[object, bool]] = field(default_factory=dict)
    held: bool = False

    @property
    def movable(self) -> bool:
        """Whether it is all the policy's to keep as it is, and can be moved."""
        if self.stored or not any(most for _, most in self.exact.values()):
            return False
        names = {name for name, _ in self.exact.values()}
        return len(names) == 1 and None not in names

    @property
    def harm(self) -> float:
        """Of compressing it, for a byte: the mean over its saves."""
        total = sum(self.stored.values())
        return sum(_HARM.get(save.site.role, 0.0) * nbytes for save, nbytes in self.stored.items()) / max(1, total)

    def ways(self, position: float, offload: bool) -> list[Way]:
        """All ways to keep it; `position` in the step goes from 0 to 1."""
        ways = [Way(EXACT, self.nbytes, 0, 0.0)]
        host = _HOST_FIRST + (_HOST_LAST - _HOST_FIRST) * position
        if self.exact:
            if offload and self.movable and self.nbytes >= LEAST_OFFLOADED:
                ways.append(Way(HOST, 0, self.nbytes, host * self.nbytes))
            return ways
        stored, held = sum(self.stored.values()), _HELD * self.nbytes * self.held
        coded = held + _TRAFFIC * (self.nbytes + stored) + self.harm * self.nbytes
        ways.append(Way(CODEC, stored, 0, coded))
        moved = {save: nbytes for save, nbytes in self.stored.items() if nbytes and save not in self.fixed}
        if offload and moved and min(moved.values()) >= LEAST_OFFLOADED:
            out = sum(moved.values())
            ways.append(Way(HOST, stored - out, out, coded + host * out))
        if self.int4 and self.int4.keys() == self.stored.keys():
            small = sum(self.int4.values())
            harm = max(_INT4_HARM.get(save.site.op, _INT4_LEAST_HARM) for save in self.int4)
            ways.append(Way(INT4, small, 0, held + _TRAFFIC * (self.nbytes + small) + harm * self.nbytes))
        return ways

    def choices(self, choice: str) -> Iterator[tuple[Save, str]]:
        """What a way means for its saves."""
        for save in self.exact:
            yield save, choice
        for save, nbytes in self.stored.items():
            # Where one save keeps the memory, no other need store it again; where there are no bytes of its own, it is
            # for another to move them.
            fixed = choice == HOST and save in self.fixed
            yield save, EXACT if self.exact else choice if (nbytes and not fixed) or choice == EXACT else CODEC


class Recorder:
    """Numbers the saves of one entry of a session, and remembers those that its plan does not name.

    Args:
        plan: what the entry follows; None: there is none yet.
    """

    def __init__(self, plan: Plan | None) -> None:
        self._plan = plan
        self._counts: dict[Site, int] = {}
        self._pieces: dict[int, _Piece] = {}
        self._saved = 0
        # What is neither compressed nor moved, by what it is.
        self._fixed: Counter[str] = Counter()

    def number(self, site: Site) -> Save:
        """The save that comes now at a site."""
        occurrence = self._counts.get(site, 0)
        self._counts[site] = occurrence + 1
        return Save(site, occurrence)

    def _known(self, save: Save) -> bool:
        return self._plan is not None and save in self._plan.choices

    def exact(self, save: Save, address: int, storage_bytes: int, name: object, most: bool) -> None:
        """A save was kept as it is; see `_Piece.exact`. `name` is None if it can't be moved."""
        if not self._known(save):
            self._piece(save, address, storage_bytes).exact[save] = name, most

    def compressed(
        self, save: Save, address: int, storage_bytes: int, stored: int, int4: int | None, movable: bool
    ) -> None:
        """A save was compressed to `stored` bytes; 4 bits, if they may be used, would take `int4`."""
        if self._known(save):
            return
        piece = self._piece(save, address, storage_bytes)
        piece.stored[save] = stored
        if not movable:
            piece.fixed.add(save)
        if int4 is not None:
            piece.int4[save] = int4

    def shared(self, save: Save, address: int, bears_int4: bool) -> None:
        """A save uses the payload of another one of its storage; `bears_int4`: it could do with 4 bits too."""
        piece = self._pieces.get(address)
        if piece is not None and not self._known(save):
            piece.stored[save] = 0
            if bears_int4:
                piece.int4[save] = 0

    def replaced(self, save: Save | None, address: int) -> None:
        """A save of a storage, compressed before, now uses the payload of another one, and has none of its own."""
        piece = self._pieces.get(address)
        if save is not None and piece is not None and save in piece.stored:
            piece.stored[save] = piece.int4[save] = 0

    def fixed(self, what: str, nbytes: int) -> None:
        """Something was kept that no plan can change."""
        if self._plan is not None:
            return
        self._saved += nbytes
        self._fixed[what] += nbytes

    def _piece(self, save: Save, address: int, storage_bytes: int) -> _Piece:
        piece = self._pieces.get(address)
        if piece is None:
            piece = self._pieces[address] = _Piece(save.site, storage_bytes, self._saved)
            self._saved += storage_bytes
        return piece

    def close(self, alive: Callable[[int], bool]) -> None:
        """Forward is over; `alive` tells whether somebody still holds a storage."""
        for address, piece in self._pieces.items():
            # Of what is kept as it is we are somebody ourselves.
            piece.held = not piece.exact and alive(address)

    @property
    def empty(self) -> bool:
        """Whether nothing was saved that a plan could speak of."""
        return not self._pieces

    @property
    def original_bytes(self) -> int:
        """Bytes that autograd would have held."""
        return self._saved

    def plan(self, asked: float, offload: bool = False, host_budget: int = 0) -> Plan:
        """As `make_plan`, of what this one has seen."""
        return make_plan([self], asked, offload, host_budget)

    def ways(self, offload: bool) -> list[tuple[_Piece, list[Way]]]:
        """Every piece of memory, with the ways to keep it."""
        total = max(1, self._saved)
        return [(piece, piece.ways(piece.before / total, offload)) for piece in self._pieces.values()]

    @property
    def fixed_bytes(self) -> Counter[str]:
        """What no plan can change, by what it is."""
        return self._fixed


def make_plan(recorders: Sequence[Recorder], asked: float, offload: bool = False, host_budget: int = 0) -> Plan:
    """The plan that gives back at least the share `asked`, if any does, at the least cost.

    Args:
        recorders: of entries that saved different things.
        offload: whether host memory may be used, up to `host_budget` bytes.
    """
    found = [entry for recorder in recorders for entry in recorder.ways(offload)]
    original = sum(recorder.original_bytes for recorder in recorders)
    chosen = _choose([ways for _, ways in found], asked * original, host_budget)
    rest: Counter[str] = Counter()
    for recorder in recorders:
        rest.update(recorder.fixed_bytes)
    choices: dict[Save, str] = {}
    fixed = sum(rest.values())
    for (piece, _), way in zip(found, chosen, strict=True):
        choices.update(piece.choices(way.choice))
        who = ", held by somebody else too" if piece.held else ""
        rest[f"{piece.first.op} ({piece.first.role}{who})"] += way.device
    totals = Totals(original, fixed + sum(way.device for way in chosen), sum(way.host for way in chosen))
    most = tuple((what, nbytes) for what, nbytes in rest.most_common(_MOST_NAMED) if nbytes)
    return Plan(choices, asked, totals, most)


class _Step(NamedTuple):
    """From one way of a piece to a cheaper one; ordered by cost for a byte, the largest first among equals."""

    price: float
    minus_gain: int
    piece: int
    way: Way
    before: Way


def _next_step(index: int, now: Way, ways: list[Way]) -> _Step | None:
    """The step from `now` that costs least for a byte given back."""
    steps = (
        _Step((way.cost - now.cost) / (now.device - way.device), way.device - now.device, index, way, now)
        for way in ways
        if way.device < now.device
    )
    return min(steps, default=None)


def _choose(ways: list[list[Way]], needed: float, host_left: int) -> list[Way]:
    """One way for each piece, so that at least `needed` bytes less stay on the device than in their first ways.

    Which steps are taken, and in which order, does not depend on `needed`, only how many are; and a larger number is
    never left with fewer bytes by what is taken back. So more asked never gives less.
    """
    chosen = [options[0] for options in ways]
    heap = [step for index, now in enumerate(chosen) if (step := _next_step(index, now, ways[index])) is not None]
    heapq.heapify(heap)
    taken: list[_Step] = []
    given = 0
    while heap and given < needed:
        step = heapq.heappop(heap)
        index, way = step.piece, step.way
        if way.host > host_left:
            ways[index] = [other for other in ways[index] if other.host <= host_left]
        else:
            host_left -= way.host
            given -= step.minus_gain
            chosen[index] = way
            taken.append(step)
        following = _next_step(index, chosen[index], ways[index])
        if following is not None:
            heapq.heappush(heap, following)
    for step in reversed(taken):
        if chosen[step.piece] is step.way and given + step.minus_gain >= needed:
            chosen[step.piece] = step.before
            given += step.minus_gain
    return chosen
