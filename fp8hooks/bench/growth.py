"""`fp8hooks bench growth`: how what we cost grows with layers, sequence and batch: it should grow as the model does."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import fp8hooks
from fp8hooks.bench import families
from fp8hooks.bench.llama import SHAPES
from fp8hooks.bench.steps import Way, measure
from fp8hooks.devices import find_device, name_of

#: What is varied, by which factors of the model's own.
AXES = ("layers", "length", "batch")
FACTORS = (0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Point:
    """One size.

    Attributes:
        axis, size: what was varied, and to what.
        plain, ours: milliseconds of a step.
        saves: tensors that were compressed.
        gigabytes: that were compressed.
    """

    axis: str
    size: int
    plain: float
    ours: float
    saves: int
    gigabytes: float

    @property
    def per_gigabyte(self) -> float:
        """Milliseconds that a gigabyte costs."""
        return (self.ours - self.plain) / self.gigabytes

    @property
    def per_save(self) -> float:
        """Microseconds that a save costs, in a model so small that nothing else does."""
        return (self.ours - self.plain) / self.saves * 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--model", default="llama", choices=SHAPES, help="(default %(default)s)")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES), metavar="AXIS")
    parser.add_argument("--repeats", type=int, default=7, help="times to measure (default %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, ... (default %(default)s)")
    parser.add_argument("--out", metavar="JSON", help="write the figures to this file too")


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    if options.repeats < 1:
        raise ValueError(f"--repeats: {options.repeats} given, 1 or more allowed")
    device = find_device(options.device)
    points = []
    with console.status("") as status:
        for axis in options.axes:
            own = getattr(SHAPES[options.model], axis)
            for size in dict.fromkeys(max(1, int(own * factor)) for factor in FACTORS):
                status.update(f"{axis} {size}")
                points.append(_measure(options.model, axis, size, device, options.repeats))
    title = f"what compressing costs, {options.model}, bfloat16, {name_of(device)}, torch {torch.__version__}"
    console.print(table(title, points))
    if options.out:
        Path(options.out).write_text(json.dumps([dataclasses.asdict(point) for point in points], indent=1))


def _measure(name: str, axis: str, size: int, device: torch.device, repeats: int) -> Point:
    torch.manual_seed(0)
    sizes = {axis: size}
    model = families.build(name, device, torch.bfloat16, sizes.get("layers"), sizes.get("batch"), sizes.get("length"))
    session = fp8hooks.compress()
    ways = {"plain": Way(model), "fp8hooks": Way(model, lambda: session)}
    results = measure(model, model.inputs(), ways, repeats)
    compressed = [bucket for (_, codec), bucket in session.stats.sites.items() if codec != "exact"]
    return Point(
        axis,
        size,
        results["plain"].milliseconds,
        results["fp8hooks"].milliseconds,
        sum(bucket.tensors for bucket in compressed),
        sum(bucket.original_bytes for bucket in compressed) / 1e9,
    )


def table(title: str, points: list[Point]) -> Table:
    """A row for each size; the last two columns stay the same where cost is linear, one or the other."""
    found = Table(title=title)
    for column in ("", "size", "plain ms", "fp8hooks ms", "ratio", "saves", "GB", "ms a GB", "us a save"):
        found.add_column(column, justify="right" if column else "left")
    for point in points:
        found.add_row(
            point.axis,
            str(point.size),
            f"{point.plain:.2f}",
            f"{point.ours:.2f}",
            f"{point.ours / point.plain:.3f}",
            str(point.saves),
            f"{point.gigabytes:.3g}",
            f"{point.per_gigabyte:.2f}",
            f"{point.per_save:.1f}",
        )
    return found
