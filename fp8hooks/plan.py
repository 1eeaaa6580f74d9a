"""A plan: what becomes of each saved tensor of a step, as data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fp8hooks.saved import Site

#: What a plan may say of a save: kept as it is; stored by the policy's codec; stored so, in host memory (what the
#: policy keeps exact, as it is); in 4 bits.
EXACT, CODEC, HOST, INT4 = "exact", "codec", "host", "int4"
CHOICES = (EXACT, CODEC, HOST, INT4)

_VERSION = 1


class Save(NamedTuple):
    """One saved tensor of a step: the `occurrence`-th at its site, counting from 0. It has no size: shapes may vary."""

    site: Site
    occurrence: int


class Totals(NamedTuple):
    """Bytes of the step that a plan was made from, and under it.

    Attributes:
        original: that autograd would have held.
        device, host: that are held on the device, and in host memory.
    """

    original: int = 0
    device: int = 0
    host: int = 0


class Plan:
    """What becomes of each save of a step. The same plan gives the same choices in every process.

    Args:
        choices: one of `CHOICES` for each save. Saves that it does not name are stored by the policy's codec.
        asked: the share of bytes to give back that it was made for, from 0 to 1.
        totals: of the step that it was made from.
        rest: what holds most of the bytes that stay on the device, in words, with the bytes.
    """

    def __init__(
        self, choices: Mapping[Save, str], asked: float, totals: Totals, rest: tuple[tuple[str, int], ...] = ()
    ) -> None:
        self.choices = dict(choices)
        self.asked = asked
        self.totals = totals
        self.rest = tuple(rest)

    @property
    def reached(self) -> float:
        """The share that it gives back in a step like the one that it was made from."""
        original, device, _ = self.totals
        return 1 - device / original if original else 0.0

    def of(self, save: Save) -> str:
        """What becomes of a save."""
        return self.choices.get(save, CODEC)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Plan({len(self.choices)} saves, asked {self.asked:.3f}, reached {self.reached:.3f})"

    def __str__(self) -> str:
        original, device, host = self.totals
        lines = [
            f"{self.asked:.3f} of {original:,} bytes to be given back, {self.reached:.3f} reached: "
            f"{device:,} stay on the device, {host:,} go to host memory."
        ]
        for choice in CHOICES:
            sites = Counter((save.site.op, save.site.role) for save, chosen in self.choices.items() if chosen == choice)
            named = ", ".join(f"{count} {op} ({role})" for (op, role), count in sorted(sites.items()))
            if sites:
                lines.append(f"{choice}: {named}")
        return "\n".join(lines)

    # As JSON

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which `from_dict` makes an equal plan."""
        saves = [
            {**save.site._asdict(), "occurrence": save.occurrence, "choice": choice}
            for save, choice in sorted(self.choices.items())
        ]
        return {
            "version": _VERSION,
            "asked": self.asked,
            "totals": self.totals._asdict(),
            "rest": [list(item) for item in self.rest],
            "saves": saves,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` described.

        Raises:
            ValueError: that is no plan, or one of another version; says which part.
        """
        if not isinstance(data, Mapping) or data.get("version") != _VERSION:
            version = data.get("version") if isinstance(data, Mapping) else data
            raise ValueError(f"plan: version {version!r} given, {_VERSION} allowed")
        try:
            totals = Totals(**{name: int(value) for name, value in data["totals"].items()})
            rest = tuple((str(what), int(nbytes)) for what, nbytes in data["rest"])
            saves = dict(_save_from(entry) for entry in data["saves"])
            asked = float(data["asked"])
            if not 0 <= asked <= 1:
                raise ValueError(f"asked: {asked} given, 0 to 1 allowed;")
            return cls(saves, asked, totals, rest)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"plan: {error} is wrong or missing; what Plan.to_dict gives is allowed") from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan that `save` wrote.

        Raises:
            OSError: no such file. ValueError: no plan in it.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"plan: {str(path)!r} is not JSON: {error}") from error
        return cls.from_dict(data)


def _save_from(entry: Mapping[str, Any]) -> tuple[Save, str]:
    choice = entry["choice"]
    if choice not in CHOICES:
        raise ValueError(f"choice: {choice!r} given, one of {', '.join(CHOICES)} allowed;")
    site = Site(str(entry["module"]), str(entry["op"]), str(entry["role"]))
    return Save(site, int(entry["occurrence"])), choice
