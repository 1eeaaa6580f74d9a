"""`fp8hooks bench knob`: what memory costs in time and error, by the share given back, beside other ways to save it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import fp8hooks
from fp8hooks.bench import peers
from fp8hooks.bench.llama import SHAPES, Llama
from fp8hooks.bench.steps import Result, Way, measure, pareto
from fp8hooks.devices import find_device, name_of

SAVINGS = (0.0, 0.25, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--shape", default="llama", choices=SHAPES, help="of the layers (default %(default)s)")
    parser.add_argument(
        "--savings", type=float, nargs="+", default=SAVINGS, metavar="S", help="to ask for (default %(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="WAY", help="besides the first, ways whose names have one of these"
    )
    parser.add_argument("--repeats", type=int, default=7, help="times to measure (default %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, ... (default %(default)s)")
    parser.add_argument("--out", metavar="JSON", help="write the figures to this file too")
    parser.add_argument("--plot", metavar="PNG", help="draw memory against time")


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    if options.repeats < 1:
        raise ValueError(f"--repeats: {options.repeats} given, 1 or more allowed")
    sessions = {f"fp8hooks, {s:g}": _session(s) for s in options.savings}
    device = find_device(options.device)
    torch.manual_seed(0)
    model = Llama(SHAPES[options.shape], device, torch.bfloat16)
    ways = {"eager": Way(model)}
    ways |= {name: Way(model, functools.partial(_same, session)) for name, session in sessions.items()}
    others = peers.eager(model, console.print) | peers.compiled(model)
    ways = peers.chosen(ways | others, options.only)
    with torch._dynamo.config.patch(recompile_limit=32):
        results = measure(model, model.inputs(), ways, options.repeats)
    title = f"forward and backward, {options.shape}, bfloat16, {name_of(device)}, torch {torch.__version__}"
    sessions = {name: session for name, session in sessions.items() if name in results}
    console.print(_table(title, results, sessions))
    if options.out:
        found = {
            name: {**dataclasses.asdict(result), **_ledger(sessions.get(name))} for name, result in results.items()
        }
        Path(options.out).write_text(json.dumps(found, indent=1))
    if options.plot:
        pareto(results, list(sessions), options.plot, title)


def _session(savings: float) -> fp8hooks.Session:
    try:
        return fp8hooks.compress(memory_savings=savings, offload=None)
    except ValueError as error:
        raise ValueError(f"--savings: {error}") from error


def _same(session: fp8hooks.Session) -> fp8hooks.Session:
    return session


def _ledger(session: fp8hooks.Session | None) -> dict[str, float]:
    if session is None:
        return {}
    stats = session.stats
    return {"given_back": stats.savings, "host_bytes": stats.host_bytes, "original_bytes": stats.original_bytes}


def _table(title: str, results: dict[str, Result], sessions: dict[str, fp8hooks.Session]) -> Table:
    first = next(iter(results.values()))
    table = Table(title=title)
    columns = (
        "",
        "step ms",
        "of eager",
        "given back",
        "held GiB",
        "of eager",
        "peak GiB",
        "of eager",
        "host GiB",
        "error",
    )
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=bool(column))
    for name, result in results.items():
        if result.failure is not None:
            table.add_row(name, f"[red]{escape(result.failure)}[/red]")
            continue
        stats = sessions[name].stats if name in sessions else None
        table.add_row(
            name,
            f"{result.milliseconds:.1f}",
            f"{result.milliseconds / first.milliseconds:.3f}",
            "" if stats is None else f"{stats.savings:.3f}",
            f"{result.held / 2**30:.2f}",
            f"{result.held / first.held:.3f}",
            f"{result.peak / 2**30:.2f}",
            f"{result.peak / first.peak:.3f}",
            "" if stats is None else f"{stats.host_bytes / 2**30:.2f}",
            f"{result.error:.4f}",
        )
    return table
