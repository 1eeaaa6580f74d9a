"""`fp8hooks bench eager`: a whole step of models at realistic shapes, with us and by every other way to save memory."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import fp8hooks
from fp8hooks.bench import families, peers
from fp8hooks.bench.steps import Result, Way, measure, pareto, table, true_gradients
from fp8hooks.devices import find_device, name_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument(
        "--models", nargs="+", default=["llama"], choices=families.NAMES, metavar="MODEL",
        help=f"of {', '.join(families.NAMES)} (default llama)",
    )  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help="tokens of a sequence, each in turn")
    parser.add_argument("--layers", nargs="+", type=int, metavar="N", help="each in turn")
    parser.add_argument("--batches", nargs="+", type=int, metavar="N", help="sequences or images, each in turn")
    parser.add_argument(
        "--only", nargs="+", metavar="WAY", help="besides the first, ways whose names have one of these"
    )
    parser.add_argument("--no-truth", action="store_true", help="leave out the gradients in float32")
    parser.add_argument("--repeats", type=int, default=15, help="times to measure (default %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, ... (default %(default)s)")
    parser.add_argument("--out", metavar="JSON", help="write the figures to this file too")
    parser.add_argument("--plot", metavar="PNG", help="draw memory against time of the first model")


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure and print, a table for each model, length, number of layers and batch."""
    if options.repeats < 1:
        raise ValueError(f"--repeats: {options.repeats} given, 1 or more allowed")
    device = find_device(options.device)
    found: list[dict[str, Any]] = []
    shapes = itertools.product(
        options.models, options.layers or [None], options.batches or [None], options.lengths or [None]
    )
    for name, layers, batch, length in shapes:
        torch.manual_seed(0)
        model = families.build(name, device, torch.bfloat16, layers, batch, length)
        title = f"forward and backward, {describe(name, model)}, bfloat16, {name_of(device)}, torch {torch.__version__}"
        results = _measure(model, options, console)
        console.print(table(title, results, {"fp8hooks, CUDA graph": "plain, CUDA graph"}))
        found.append({**settings_of(name, model), "ways": {way: dataclasses.asdict(r) for way, r in results.items()}})
        if options.plot and len(found) == 1:
            pareto(results, [way for way in results if way.startswith("fp8hooks")], options.plot, title)
        del model
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1))


def _measure(model: families.Model, options: argparse.Namespace, console: Console) -> dict[str, Result]:
    inputs = model.inputs()
    truth = None if options.no_truth else true_gradients(model, inputs)
    if truth is None and not options.no_truth:
        console.print("The gradients in float32 do not fit: errors are against bfloat16's alone.")
    found = peers.chosen(ways(model, console), options.only)
    with console.status("") as status:
        return measure(model, inputs, found, options.repeats, truth, progress=lambda way: status.update(way))


def ways(model: families.Model, console: Console) -> dict[str, Way]:
    """Without us, with us, and by others; in eager, and in a CUDA graph where the host does not decide what runs."""
    session = fp8hooks.compress()
    found = {"plain": Way(model), "fp8hooks": Way(model, lambda: session)}
    found |= peers.eager(model, console.print)
    if next(model.parameters()).is_cuda and not getattr(model.shape, "experts", 0):
        found["plain, CUDA graph"] = Way(model, graphed=True)
        found["fp8hooks, CUDA graph"] = Way(model, lambda: session, graphed=True)
    return found


def describe(name: str, model: families.Model) -> str:
    """The model's shape in words."""
    shape = model.shape
    length = f" x {shape.length} tokens" if hasattr(shape, "length") else f" images of {shape.size} x {shape.size}"
    return f"{name}, {shape.layers} layers, {shape.batch}{length}"


def settings_of(name: str, model: families.Model) -> dict[str, Any]:
    """What makes a figure repeatable: for JSON."""
    device = next(model.parameters()).device
    return {
        "model": name,
        "shape": dataclasses.asdict(model.shape),
        "tokens": model.tokens,
        "dtype": "bfloat16",
        "device": name_of(device),
        "torch": torch.__version__,
        "fp8hooks": fp8hooks.__version__,
    }
