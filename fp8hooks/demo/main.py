"""Runs the demo, from its options to its table."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

import fp8hooks
from fp8hooks.demo import text, train
from fp8hooks.demo.model import SIZES, ByteModel
from fp8hooks.demo.train import Run, Setup
from fp8hooks.devices import find_device
from fp8hooks.report import format_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options."""
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run (default %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="small", help="model and batch size (default %(default)s)")
    parser.add_argument("--text", metavar="FILE", help="train on this text (default: CPython's documentation topics)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="bfloat16 trains under autocast")
    parser.add_argument("--memory-savings", type=float, metavar="SHARE", help="0 to 1 (default: all that can be)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default %(default)s)")
    parser.add_argument("--out", metavar="PNG", default="fp8hooks-demo.png", help="the picture (default %(default)s)")


def run(options: argparse.Namespace, console: Console) -> None:
    """Train twice, print the table, write the picture.

    Raises:
        ValueError: an option that can't be; the message names it.
    """
    if options.steps < 1:
        raise ValueError(f"--steps: {options.steps} given, 1 or more allowed")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed: {options.seed} given, a whole number from 0 up allowed")
    _check_plotting()
    # The session's own check, under the option's name.
    with _named("--memory-savings"):
        session = fp8hooks.compress(memory_savings=options.memory_savings)
    setup = Setup(
        size=SIZES[options.size],
        text=text.load(options.text),
        steps=options.steps,
        device=find_device(options.device),
        dtype=DTYPES[options.dtype],
        seed=options.seed,
    )
    setup.batches()  # before anything is trained: is the text long enough?
    exact, compressed = _train_both(setup, session, console)
    console.print(session.report())
    console.print(table(exact, compressed))
    from fp8hooks.demo import plot

    path = Path(options.out)
    plot.save(exact, compressed, _title(setup, options), path)
    console.print(f"Picture: {path}")


def _train_both(setup: Setup, session: fp8hooks.Session, console: Console) -> tuple[Run, Run]:
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    runs = []
    with Progress(*columns, console=console) as progress:
        for name, context in (("exact", None), ("fp8hooks", session)):
            task = progress.add_task(name, total=setup.steps, loss=float("nan"))

            def show(_: int, loss: float, task: TaskID = task) -> None:
                progress.update(task, advance=1, loss=loss)

            runs.append(train.train(setup, context, show))
    return runs[0], runs[1]


def table(exact: Run, compressed: Run) -> Table:
    """Both runs side by side."""
    result = Table(title="the same training, exact and compressed")
    for column in ("", "exact", "fp8hooks", "ratio"):
        result.add_column(column, justify="left" if not column else "right")

    def row(name: str, values: tuple[float, float], form: str = "{:.4f}") -> None:
        result.add_row(name, *(form.format(value) for value in values), f"{values[1] / values[0]:.3f}")

    row("final training loss (mean of the last 10 steps)", (_last(exact), _last(compressed)))
    row("held-out loss", (exact.held_out, compressed.held_out))
    saved = exact.stats.stored_bytes, compressed.stats.stored_bytes
    result.add_row("held for backward", *map(format_bytes, saved), f"{saved[1] / saved[0]:.3f}")
    if exact.peak_bytes and compressed.peak_bytes:
        peaks = exact.peak_bytes, compressed.peak_bytes
        result.add_row("peak GPU memory", *map(format_bytes, peaks), f"{peaks[1] / peaks[0]:.3f}")
    row("time a step (ms, median)", (exact.step_time * 1e3, compressed.step_time * 1e3), "{:.1f}")
    if compressed.gradient_errors:
        first, last = compressed.gradient_errors
        result.add_row("gradient error, first and last step", "", f"{first:.3f}, {last:.3f}", "")
    return result


def _last(run: Run) -> float:
    tail = run.losses[-10:]
    return sum(tail) / len(tail)


def _title(setup: Setup, options: argparse.Namespace) -> str:
    parameters = sum(p.numel() for p in ByteModel(setup.size).parameters())
    device = torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "CPU"
    return f"{parameters / 1e6:.1f} M parameters, {options.dtype}, {device}, torch {torch.__version__}"


def _check_plotting() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("the demo draws with matplotlib, which is missing: pip install 'fp8hooks[demo]'") from None


@contextlib.contextmanager
def _named(option: str):  # type: ignore[no-untyped-def]
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{option}{str(error)[str(error).find(':') :]}") from None
