"""The knob: from a share of memory to give back to a plan of what to compress.

The first step compresses all that the policy allows and is measured here. From it a plan keeps exact as much as the
asked share leaves room for, the most harmful to compress first.
"""

from __future__ import annotations

from typing import NamedTuple

from fp8hooks.saved import Site

# How much compressing a role harms the gradient, most first (shared/numerics: error per byte given back).
_HARM = {"attention_qk": 3, "attention_vo": 2, "probability": 2, "log_prob": 1, "activation": 0}


class Save(NamedTuple):
    """One stored tensor of a step: the `occurrence`-th at its site, counting from 0."""

    site: Site
    occurrence: int


class Plan:
    """Which saves to keep exact. `reached` is the share that it gives back in a step like the one it was made from."""

    def __init__(self, exact: frozenset[Save], reached: float) -> None:
        self.exact = exact
        self.reached = reached


class Recorder:
    """Numbers the saves of a step, and remembers their bytes while there is no plan yet."""

    def __init__(self) -> None:
        self._counts: dict[Site, int] = {}
        self._saves: dict[Save, tuple[int, int]] = {}
        self._exact_bytes = 0

    def next_save(self, site: Site) -> Save:
        occurrence = self._counts.get(site, 0)
        self._counts[site] = occurrence + 1
        return Save(site, occurrence)

    def compressed(self, save: Save, original_bytes: int, stored_bytes: int) -> None:
        self._saves[save] = (original_bytes, stored_bytes)

    def recompressed(self, save: Save | None, stored_bytes: int) -> None:
        """A save that was compressed is stored otherwise now, by its whole memory."""
        if save is not None and save in self._saves:
            self._saves[save] = (self._saves[save][0], stored_bytes)

    def exact(self, nbytes: int) -> None:
        self._exact_bytes += nbytes

    def plan(self, asked: float) -> Plan:
        """The plan that gives back at least the share `asked`, if any does, with the least harm."""
        original = self._exact_bytes + sum(before for before, _ in self._saves.values())
        given_back = original - self._exact_bytes - sum(after for _, after in self._saves.values())
        needed = asked * original
        exact = set()
        # Among equals the small ones last: they settle how close the plan comes to what was asked.
        by_harm = sorted(self._saves.items(), key=lambda item: (-_HARM.get(item[0].site.role, 0), -item[1][0]))
        for save, (before, after) in by_harm:
            gain = before - after
            if given_back - gain >= needed:
                exact.add(save)
                given_back -= gain
        return Plan(frozenset(exact), given_back / original if original else 0.0)

    @property
    def empty(self) -> bool:
        return not self._saves
