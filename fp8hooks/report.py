"""The report of a step as a table."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from fp8hooks.compiled import Compiled
from fp8hooks.plan import INT4, Plan
from fp8hooks.saved import Site
from fp8hooks.stats import Bucket, Stats

# A step may give back so much less than was asked before the report says so.
_TOLERANCE = 0.02


class Report:
    """A rendering of `Stats`: `print` it, or give it to a rich console.

    Args:
        stats: what to show.
        by_module: a row for each module, and for each node of a compiled graph; otherwise they are summed up.
        compiled: what compiled graphs hold.
        plan: that the step followed.
    """

    def __init__(
        self,
        stats: Stats,
        by_module: bool = False,
        compiled: Sequence[Compiled] = (),
        plan: Plan | None = None,
    ) -> None:
        self.stats = stats
        self.plan = plan
        self.by_module = by_module
        self.compiled = compiled

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()
        if self.compiled:
            yield self.compiled_table()
        yield from self.remarks()

    def _repr_html_(self) -> str:
        """For notebooks."""
        console = Console(file=io.StringIO(), width=110, record=True)
        console.print(self)
        return console.export_html(inline_styles=True, code_format='<pre style="line-height:1.2">{code}</pre>')

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=110).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def table(self) -> Table:
        """What eager operations saved."""
        columns = [*(["module"] if self.by_module else []), "op", "role", "codec"]
        title = f"fp8hooks: saved for backward in step {self.stats.steps}"
        return _table(title, columns, self._rows(), self.stats)

    def compiled_table(self) -> Table:
        """What graphs that `torch.compile` made hold."""
        rows: dict[tuple[str, ...], Bucket] = {}
        everything = Bucket()
        for entry in self.compiled:
            names = (entry.node,) if self.by_module else ()
            row = rows.setdefault((str(entry.graph), *names, entry.site.op, entry.site.role, entry.codec), Bucket())
            for bucket in (row, everything):
                bucket.add(1, entry.original_bytes, entry.stored_bytes)
        columns = ["graph", *(["node"] if self.by_module else []), "op", "role", "codec"]
        title = "in compiled graphs, for each call of one"
        return _table(title, columns, [(list(names), bucket) for names, bucket in rows.items()], everything)

    def remarks(self) -> Iterable[str]:
        stats = self.stats
        yield f"Weights that autograd saved too, held by their modules anyway: {format_bytes(stats.weight_bytes)}."
        if stats.not_freed:
            ops = ", ".join(f"{op} {format_bytes(nbytes)}" for op, nbytes in sorted(stats.not_freed.items()))
            yield f"Compressed, but still held by somebody else when the session closed, by op: {ops}."
        outside = sum(bucket.stored_bytes for op, bucket in stats.by_op.items() if "CompiledFunction" in op)
        if outside:
            yield f"Saved exactly by compiled graphs that could not take the hooks in: {format_bytes(outside)}."
        if self.plan is not None and 0 < stats.savings < min(self.plan.asked, self.plan.reached) - _TOLERANCE:
            yield (
                f"This step gave back {stats.savings:.2f} of its bytes, {self.plan.reached:.2f} were planned from "
                "another one; session.plan = None makes a new plan from the next."
            )
        if self.plan is not None and INT4 in self.plan.choices.values() and INT4 in stats.by_codec:
            yield (
                f"Stored in 4 bits by the plan: {format_bytes(stats.by_codec[INT4].original_bytes)} of what autograd "
                "would hold. They may double the gradient's error or more: measure it with fp8hooks.audit, or allow "
                "offload."
            )
        yield from stats.notes

    def _rows(self) -> Iterable[tuple[list[str], Bucket]]:
        rows: dict[tuple[str, ...], Bucket] = {}
        for (site, codec), bucket in self.stats.sites.items():
            row = rows.setdefault(_names(site, codec, self.by_module), Bucket())
            row.add(bucket.tensors, bucket.original_bytes, bucket.stored_bytes, bucket.elements, bucket.host_bytes)
        for names, bucket in sorted(rows.items(), key=lambda item: -item[1].original_bytes):
            if bucket.original_bytes or bucket.stored_bytes or bucket.host_bytes:
                yield list(names), bucket


def _table(title: str, columns: list[str], rows: Iterable[tuple[list[str], Bucket]], everything: Bucket) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD)
    for column in columns:
        long = column in ("module", "op", "node")
        table.add_column(column, overflow="fold", no_wrap=not long, min_width=18 if long else None)
    host = everything.host_bytes > 0
    for column in ("saves", "before", "after", *(["on host"] if host else []), "saved"):
        table.add_column(column, justify="right", no_wrap=True)
    for names, bucket in rows:
        table.add_row(*names, *_cells(bucket, host))
    table.add_section()
    table.add_row("all", *[""] * (len(columns) - 1), *_cells(everything, host), style="bold")
    return table


def _names(site: Site, codec: str, by_module: bool) -> tuple[str, ...]:
    return (*((site.module,) if by_module else ()), site.op, site.role, codec)


def _cells(bucket: Bucket, host: bool) -> list[str]:
    return [
        str(bucket.tensors),
        format_bytes(bucket.original_bytes),
        format_bytes(bucket.stored_bytes),
        *([format_bytes(bucket.host_bytes)] if host else []),
        f"{bucket.savings:.0%}",
    ]


def format_bytes(count: float) -> str:
    """A byte count for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
