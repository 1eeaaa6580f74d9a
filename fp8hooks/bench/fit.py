"""`fp8hooks bench fit`: the largest batch, and the longest sequence, that train in a given memory, and how fast."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import fp8hooks
from fp8hooks.bench import families, peers
from fp8hooks.bench.llama import SHAPES
from fp8hooks.bench.steps import Way
from fp8hooks.config import parse_bytes
from fp8hooks.devices import find_device, name_of

# Steps that a size has to survive; a plan is made in the first, and holds from the second.
_STEPS = 4


@dataclass(frozen=True)
class Fit:
    """The largest that fits.

    Attributes:
        what: `batch` or `length`.
        memory: bytes that the process might take.
        largest: sequences, or tokens of one; 0 if not even the smallest fits.
        tokens_per_second: at that size, forward and backward.
    """

    way: str
    what: str
    memory: int
    largest: int
    tokens_per_second: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--model", default="llama", choices=SHAPES, help="(default %(default)s)")
    parser.add_argument("--layers", type=int, help="(default: the model's)")
    parser.add_argument("--memory", nargs="+", default=["24GB", "80GB", "141GB"], metavar="BYTES", help="as 24GB")
    parser.add_argument("--length", type=int, default=4096, help="of sequences, for batches (default %(default)s)")
    parser.add_argument("--what", nargs="+", choices=("batch", "length"), default=["batch", "length"])
    parser.add_argument("--most", type=int, default=1 << 20, help="tokens to try at most (default %(default)s)")
    parser.add_argument("--out", metavar="JSON", help="write the figures to this file too")


def run(options: argparse.Namespace, console: Console) -> None:
    """Search and print.

    Raises:
        ValueError: an option's value is not allowed, or there is no GPU.
    """
    budgets = [parse_bytes("--memory", text) for text in options.memory]
    if not torch.cuda.is_available():
        raise ValueError("bench fit needs a GPU: on a CPU there is no memory to fill that torch could tell")
    device = find_device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    found = []
    with console.status("") as status:
        for nbytes in budgets:
            torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))
            for what in options.what:
                for name in WAYS:
                    status.update(f"{name}, {what}, {nbytes / 1e9:g} GB")
                    found.append(_search(name, what, nbytes, options, device))
        torch.cuda.set_per_process_memory_fraction(1.0)
    title = f"largest that trains, {options.model}, bfloat16, {name_of(device)}, torch {torch.__version__}"
    console.print(table(title, found))
    if options.out:
        Path(options.out).write_text(json.dumps([dataclasses.asdict(fit) for fit in found], indent=1))


def _plain(model: families.Model) -> Way:
    return Way(model)


def _checkpoint(model: families.Model) -> Way:
    return Way(functools.partial(peers.recompute, model))


def _ours(savings: float) -> Callable[[families.Model], Way]:
    def make(model: families.Model) -> Way:
        session = fp8hooks.compress(memory_savings=savings, offload=None)
        return Way(model, lambda: session)

    return make


WAYS: dict[str, Callable[[families.Model], Way]] = {
    "exact": _plain,
    "checkpoint each layer": _checkpoint,
    "fp8hooks, 0.5": _ours(0.5),
    "fp8hooks, 0.75": _ours(0.75),
}


def _search(name: str, what: str, nbytes: int, options: argparse.Namespace, device: torch.device) -> Fit:
    """Doubling, then halving the gap, to an eighth of the largest."""
    smallest = 1 if what == "batch" else 1024
    per_item = options.length if what == "batch" else 1

    def speed(size: int) -> float:
        batch, length = (size, options.length) if what == "batch" else (1, size)
        return tokens_per_second(name, options.model, options.layers, batch, length, device)

    largest, best = largest_that(lambda size: size * per_item <= options.most and speed(size), smallest)
    return Fit(name, what, nbytes, largest, best)


def largest_that(works: Callable[[int], float], smallest: int) -> tuple[int, float]:
    """The largest multiple of `smallest` that works, to within an eighth, and what `works` gave for it; else (0, 0).

    Args:
        works: 0 if a size does not; if one does not, no larger one does.
    """
    good, value = 0, 0.0
    bad: int | None = None
    size = smallest
    while bad is None or (bad - good > smallest and bad - good > good // 8):
        found = works(size)
        if found:
            good, value = size, found
        else:
            bad = size
        if bad is not None and good == 0:
            break
        size = good * 2 if bad is None else (good + bad) // 2 // smallest * smallest
    return good, value


def tokens_per_second(
    name: str, family: str, layers: int | None, batch: int, length: int, device: torch.device
) -> float:
    """Of the last of some steps; 0 if they run out of memory."""
    model = way = output = None
    try:
        torch.manual_seed(0)
        model = families.build(family, device, torch.bfloat16, layers, batch, length)
        way, (x, gradient) = WAYS[name](model), model.inputs()
        taken = 0.0
        for _ in range(_STEPS):
            for parameter in model.parameters():
                parameter.grad = None
            _wait(device)
            start = time.perf_counter()
            with way.context():
                output = way.forward(x)
            output.backward(gradient)
            _wait(device)
            taken = time.perf_counter() - start
        return model.tokens / taken
    except torch.OutOfMemoryError:
        return 0.0
    finally:
        del model, way, output
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(title: str, fits: list[Fit]) -> Table:
    """A row for each way, columns by memory."""
    found = Table(title=title)
    columns = list(dict.fromkeys((fit.what, fit.memory) for fit in fits))
    found.add_column("")
    for what, memory in columns:
        found.add_column(f"{what}, {memory / 1e9:g} GB", justify="right")
        found.add_column("tokens/s", justify="right")
    for name in dict.fromkeys(fit.way for fit in fits):
        own = {(fit.what, fit.memory): fit for fit in fits if fit.way == name}
        cells = [
            text
            for column in columns
            for text in (str(own[column].largest or "none"), f"{own[column].tokens_per_second:,.0f}")
        ]
        found.add_row(name, *cells)
    return found
