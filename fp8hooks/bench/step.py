"""`fp8hooks bench step`: a whole step of Llama's layers, and of layers so small that the GPU waits for its host."""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fp8hooks
from fp8hooks.bench.llama import SHAPES, Llama
from fp8hooks.bench.steps import Way, measure, table
from fp8hooks.devices import find_device, name_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--shape", default="llama", choices=SHAPES, help="of the layers (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="times to measure (default %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, ... (default %(default)s)")
    parser.add_argument("--out", metavar="JSON", help="write the figures to this file too")


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    if options.repeats < 1:
        raise ValueError(f"--repeats: {options.repeats} given, 1 or more allowed")
    device = find_device(options.device)
    torch.manual_seed(0)
    model = Llama(SHAPES[options.shape], device, torch.bfloat16)
    results = measure(model, model.inputs(), ways(model), options.repeats)
    title = f"forward and backward, {options.shape}, bfloat16, {name_of(device)}, torch {torch.__version__}"
    console.print(table(title, results, {"fp8hooks, CUDA graph": "plain, CUDA graph"}))
    if options.out:
        Path(options.out).write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1))


def ways(model: Llama) -> dict[str, Way]:
    """Without us, with us, and by recomputing; in eager, and in a CUDA graph."""
    session = fp8hooks.compress()
    recomputed = functools.partial(forward_recomputing, model)
    found = {
        "plain": Way(model),
        "checkpoint each layer": Way(recomputed),
        "fp8hooks": Way(model, lambda: session),
    }
    if next(model.parameters()).is_cuda:
        found["plain, CUDA graph"] = Way(model, graphed=True)
        found["fp8hooks, CUDA graph"] = Way(model, lambda: session, graphed=True)
    return found


def forward_recomputing(model: Llama, x: Tensor) -> Tensor:
    """The model's forward with each layer checkpointed."""
    return model(x, run=functools.partial(checkpoint, use_reentrant=False))
