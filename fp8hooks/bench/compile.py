"""`fp8hooks bench compile`: steps of a Llama whose layers are compiled, beside what compilers do against memory."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch
import torch._functorch.config
from rich.console import Console

import fp8hooks
from fp8hooks.bench.llama import SHAPES, Llama
from fp8hooks.bench.peers import QUANTIZE, backend, chosen, compiled_layers, forward_through
from fp8hooks.bench.steps import Way, measure, table
from fp8hooks.devices import find_device, name_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--shape", default="llama", choices=SHAPES, help="of the layers (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=128256, help="of the logits; 0 for none (default %(default)s)")
    parser.add_argument(
        "--only", nargs="+", metavar="WAY", help="besides the first, ways whose names have one of these"
    )
    parser.add_argument("--repeats", type=int, default=15, help="times to measure (default %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, ... (default %(default)s)")
    parser.add_argument("--out", metavar="JSON", help="write the figures to this file too")


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    if options.repeats < 1:
        raise ValueError(f"--repeats: {options.repeats} given, 1 or more allowed")
    if options.vocab < 0:
        raise ValueError(f"--vocab: {options.vocab} given, 0 or more allowed")
    device = find_device(options.device)
    torch.manual_seed(0)
    shape = dataclasses.replace(SHAPES[options.shape], vocabulary=options.vocab)
    model = Llama(shape, device, torch.bfloat16)
    torch._dynamo.reset()
    # A layer's code is compiled once a way; Dynamo keeps eight versions of it otherwise.
    with torch._dynamo.config.patch(recompile_limit=32):
        results = measure(model, model.inputs(), chosen(ways(model), options.only), options.repeats)
    vocabulary = f", {options.vocab} logits" if options.vocab else ""
    title = (
        f"forward and backward, {options.shape}{vocabulary}, each layer compiled, bfloat16, "
        f"{name_of(device)}, torch {torch.__version__}"
    )
    console.print(table(title, results))
    if options.out:
        found = {name: dataclasses.asdict(result) for name, result in results.items()}
        Path(options.out).write_text(json.dumps(found, indent=1))


def ways(model: Llama) -> dict[str, Way]:
    """As it is, with us, and what else gives memory back. The first is what the others are compared with."""
    session = fp8hooks.compress()
    half = compiled_layers(model, backend(activation_memory_budget=0.5))
    quarter = compiled_layers(model, backend(activation_memory_budget=0.25))
    plain, quantized = compiled_layers(model, backend()), compiled_layers(model, backend(QUANTIZE))
    return {
        "compiled": Way(forward_through(model, plain)),
        "eager": Way(model),
        "compiled, checkpoint each layer": Way(forward_through(model, plain, recompute=True)),
        "compiled, activation_memory_budget=0.5": Way(forward_through(model, half)),
        "the same, 0.25": Way(forward_through(model, quarter)),
        "compiled, Inductor's quantization (E4M3)": Way(forward_through(model, quantized)),
        "compiled, fp8hooks": Way(forward_through(model, plain), lambda: session),
        "activation_memory_budget=0.5 and fp8hooks": Way(forward_through(model, half), lambda: session),
    }
