"""`fp8hooks bench host`: what a save costs the host, in microseconds, beside a hook that does nothing."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fp8hooks
from fp8hooks.devices import find_device

_Context = Callable[[], AbstractContextManager[Any]]


def _identity() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


CONTEXTS: dict[str, _Context] = {
    "no hook": contextlib.nullcontext,
    "identity hook": _identity,
    "session, kept exact: too small": lambda: fp8hooks.compress(min_numel=1 << 30),
    "session, kept exact: by a rule": lambda: fp8hooks.compress(rules=[fp8hooks.Rule("exact")]),
    "session, square8": fp8hooks.compress,
    "session, int8": lambda: fp8hooks.compress(format="int8"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--numel", type=int, default=4096, help="elements of a saved tensor (default %(default)s)")
    parser.add_argument("--calls", type=int, default=1000, help="operations in a run (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default %(default)s)")
    parser.add_argument("--out", metavar="JSON", help="write the figures to this file too")


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    if options.numel < 1 or options.calls < 1:
        raise ValueError(f"--numel, --calls: {options.numel}, {options.calls} given, 1 or more allowed")
    results = measure(options.numel, options.calls, find_device(options.device))
    table = Table(title=f"host time a save, {options.numel} float32 elements, {options.device} (median)")
    for column in ("", "us", "us over the identity hook"):
        table.add_column(column, justify="right" if column else "left")
    for name, cost in results.items():
        table.add_row(name, f"{cost:.1f}", f"{cost - results['identity hook']:+.1f}")
    console.print(table)
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1))


def measure(numel: int, calls: int, device: torch.device) -> dict[str, float]:
    """Microseconds a save, above the same operation where nothing is recorded. The operation saves two tensors."""
    leaf = torch.randn(numel, device=device, requires_grad=True)
    operands = [leaf * (1 + i) for i in range(2 * calls)]
    for context in CONTEXTS.values():
        _time(context, operands[: min(len(operands), 200)])  # kernels are compiled, caches filled
    unrecorded = statistics.median(_time(torch.no_grad, operands) for _ in range(7))
    # Contexts by turns, so that a slow moment of the machine does not fall on one of them.
    rounds: dict[str, list[float]] = {name: [] for name in CONTEXTS}
    for _ in range(7):
        for name, context in CONTEXTS.items():
            rounds[name].append((_time(context, operands) - unrecorded) / 2)
    return {name: statistics.median(times) for name, times in rounds.items()}


def _time(context: _Context, operands: list[Tensor]) -> float:
    kept = []
    with context():
        if operands[0].is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(0, len(operands), 2):
            kept.append(torch.mul(operands[i], operands[i + 1]))
        spent = time.perf_counter() - start
    return spent / len(kept) * 1e6
