"""`fp8hooks bench convergence`: the demo's language model trained exactly and compressed, from several seeds."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fp8hooks
from fp8hooks.codecs import LOSSY
from fp8hooks.demo import text, train
from fp8hooks.demo.main import DTYPES
from fp8hooks.demo.model import SIZES
from fp8hooks.demo.train import Run, Setup
from fp8hooks.devices import find_device

EXACT = "exact"


@dataclass(frozen=True)
class Curve:
    """One training.

    Attributes:
        setting: `exact`, the format of activations, or `savings` and the share asked for.
        losses: training loss of each step, in nats a byte.
        held_out: loss on text that was not trained on, after the last step.
        gradient_error: of the last step; None for `exact`.
    """

    setting: str
    seed: int
    losses: list[float]
    held_out: float
    gradient_error: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--steps", type=int, default=2000, help="training steps (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each setting (default %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="small", help="model and batch size (default %(default)s)")
    parser.add_argument("--formats", nargs="*", choices=LOSSY, metavar="FORMAT", default=["square8"])
    parser.add_argument("--savings", nargs="+", type=float, default=[], metavar="S", help="shares to ask for besides")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="bfloat16 trains under autocast")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default %(default)s)")
    parser.add_argument("--out", metavar="JSON", help="write the curves to this file too")
    parser.add_argument("--plot", metavar="PNG", help="draw the curves")


def run(options: argparse.Namespace, console: Console) -> None:
    """Train, print a table, write what was asked for."""
    if min(options.steps, options.seeds, options.jobs) < 1:
        given = f"{options.steps}, {options.seeds}, {options.jobs}"
        raise ValueError(f"--steps, --seeds, --jobs: {given} given, 1 or more allowed")
    find_device(options.device)
    for share in options.savings:
        _session(f"{_SAVINGS}{share:g}")
    settings = (EXACT, *options.formats, *(f"{_SAVINGS}{share:g}" for share in options.savings))
    jobs = [
        (setting, seed, options.steps, options.size, options.device, options.dtype)
        for setting in settings
        for seed in range(options.seeds)
    ]
    curves = list(track(_train_all(jobs, options.jobs), "training", total=len(jobs), console=console, transient=True))
    console.print(table(curves))
    if options.out:
        Path(options.out).write_text(json.dumps([vars(curve) for curve in curves]))
    if options.plot:
        plot(curves, options.plot, f"{options.size}, {options.dtype}, {options.device}, torch {torch.__version__}")


_SAVINGS = "savings "


def _session(setting: str) -> fp8hooks.Session | None:
    if setting == EXACT:
        return None
    if setting.startswith(_SAVINGS):
        return fp8hooks.compress(memory_savings=float(setting.removeprefix(_SAVINGS)), offload=None)
    return fp8hooks.compress(format=setting)


_Job = tuple[str, int, int, str, str, str]


def _train_all(jobs: list[_Job], at_a_time: int) -> Iterable[Curve]:
    if at_a_time == 1:
        yield from map(_train, jobs)
        return
    # A fresh interpreter each: a forked one can't use a GPU that its parent has used.
    with ProcessPoolExecutor(at_a_time, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_train, jobs)


def _train(job: _Job) -> Curve:
    setting, seed, steps, size, device, dtype = job
    setup = Setup(SIZES[size], text.load(None), steps, find_device(device), DTYPES[dtype], seed)
    session = _session(setting)
    done: Run = train.train(setup, session, lambda step, loss: None)
    error = done.gradient_errors[1] if done.gradient_errors else None
    return Curve(setting, seed, done.losses, done.held_out, error)


def table(curves: list[Curve]) -> Table:
    """Held-out losses by setting, and their difference from exact beside the seeds' own spread."""
    seeds = sorted({curve.seed for curve in curves})
    made = Table(title="held-out loss after training (nats a byte)")
    for column in ("", *(f"seed {seed}" for seed in seeds), "mean", "minus exact", "gradient error at the end"):
        made.add_column(column, justify="right" if column else "left")
    exact = [curve.held_out for curve in curves if curve.setting == EXACT]
    for setting in dict.fromkeys(curve.setting for curve in curves):
        of_setting = [curve for curve in curves if curve.setting == setting]
        losses = [curve.held_out for curve in of_setting]
        mean = statistics.mean(losses)
        difference, error = "", ""
        if setting != EXACT:
            difference = f"{mean - statistics.mean(exact):+.4f}"
            error = f"{statistics.mean(curve.gradient_error or 0.0 for curve in of_setting):.3f}"
        made.add_row(setting, *(f"{loss:.4f}" for loss in losses), f"{mean:.4f}", difference, error)
    if len(exact) > 1:
        spread = f"{statistics.stdev(exact):.4f}"
        made.add_row("spread of exact (standard deviation)", *[""] * len(seeds), "", spread, "")
    return made


def plot(curves: list[Curve], path: str, title: str) -> None:
    """Draw the training losses, smoothed over 50 steps, all seeds of a setting in one colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2))
    axes = figure.subplots()
    settings = list(dict.fromkeys(curve.setting for curve in curves))
    colours = dict(zip(settings, ("#4c566a", "#d08770", "#5e81ac", "#a3be8c", "#b48ead"), strict=False))
    for curve in curves:
        losses = torch.tensor(curve.losses)
        width = min(50, len(losses))
        smooth = losses.unfold(0, width, 1).mean(1)
        label = f"{curve.setting}" if curve.seed == 0 else None
        wide = 2.0 if curve.setting == EXACT else 0.8
        colour = colours.get(curve.setting)
        axes.plot(range(width - 1, len(losses)), smooth, color=colour, linewidth=wide, label=label, alpha=0.8)
    axes.set(xlabel="step", ylabel="training loss (nats per byte)", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
