"""`fp8hooks bench knob`: what memory costs in time and error, by the share given back, beside other ways to save it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fp8hooks
from fp8hooks.bench.compile import backend, chosen, compiled_layers, forward_through
from fp8hooks.bench.llama import SHAPES, Llama
from fp8hooks.bench.step import forward_recomputing
from fp8hooks.bench.steps import Result, Way, measure
from fp8hooks.devices import find_device, name_of

SAVINGS = (0.0, 0.25, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)

# Selective checkpointing keeps what is dear to compute.
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


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
    ways = chosen(ways | peers(model, console), options.only)
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
        plot(results, sessions, options.plot, title)


def _session(savings: float) -> fp8hooks.Session:
    try:
        return fp8hooks.compress(memory_savings=savings, offload=None)
    except ValueError as error:
        raise ValueError(f"--savings: {error}") from error


def _same(session: fp8hooks.Session) -> fp8hooks.Session:
    return session


def peers(model: Llama, console: Console) -> dict[str, Way]:
    """Other ways to have less memory taken, those of libraries only where they are installed."""
    found = {
        "checkpoint each layer": Way(functools.partial(forward_recomputing, model)),
        "selective checkpoint": Way(functools.partial(_recompute_selectively, model)),
    }
    for budget in (1.0, 0.5, 0.25):
        layers = compiled_layers(model, backend(activation_memory_budget=budget))
        found[f"compiled, budget {budget:g}"] = Way(forward_through(model, layers))
    if next(model.parameters()).is_cuda:
        pinned = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=True)
        found["save_on_cpu, pinned"] = Way(model, pinned)
        for name, make in _offloaders():
            if make is None:
                console.print(f"{name}: not installed, not measured.")
            else:
                found[name] = Way(model, make)
    return found


def _recompute_selectively(model: Llama, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, _KEPT)
    return model(x, run=functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))


def _offloaders() -> Sequence[tuple[str, Callable[[], Any] | None]]:
    """Activation offloading of other libraries; None where it can't be imported."""
    found: list[tuple[str, Callable[[], Any] | None]] = []
    for name, module in (("TRL", "trl.models.activation_offloading"), ("torchtune", "torchtune.training")):
        try:
            kind = __import__(module, fromlist=["OffloadActivations"]).OffloadActivations
        except (ImportError, AttributeError):
            kind = None
        found.append((f"{name} OffloadActivations", kind))
    return found


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


def plot(results: dict[str, Result], sessions: dict[str, fp8hooks.Session], path: str, title: str) -> None:
    """Memory at its peak against the time of a step, ours as a line, each other way as a point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    first = next(iter(results.values()))

    def place(result: Result) -> tuple[float, float]:
        return result.peak / 2**30, result.milliseconds / first.milliseconds

    ours = [place(results[name]) for name in sessions]
    axes.plot(*zip(*ours, strict=True), "o-", color="tab:green", label="fp8hooks, by memory_savings")
    for name, (x, y) in zip(sessions, ours, strict=True):
        axes.annotate(name.split(", ")[1], (x, y), textcoords="offset points", xytext=(4, 5), fontsize=8)
    for name, result in results.items():
        if name not in sessions:
            axes.plot(*place(result), "s" if result is first else "x", markersize=8, label=name)
    axes.set(xlabel="peak memory of a step, GiB", ylabel="time of a step, of eager's", title=title, yscale="log")
    ticks = (0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2, 3, 5)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
