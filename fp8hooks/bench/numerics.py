"""`fp8hooks bench numerics`: the gradient's error by storage format, on four kinds of trained model."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import fp8hooks
from fp8hooks import Rule, gradients
from fp8hooks.bench.models import SUBJECTS, Batch
from fp8hooks.codecs import LOSSY
from fp8hooks.devices import find_device

#: What is compared, by name: settings of `compress`.
SETTINGS: dict[str, dict[str, object]] = {
    "policy": {},
    **{f"policy, {name} activations": {"format": name} for name in ("fp8_e4m3", "fp8_e3m4", "int8", "int4")},
    "uniform fp8_e4m3": {"rules": [Rule("fp8_e4m3")], "min_numel": 0},
    "uniform int8": {"rules": [Rule("int8")], "min_numel": 0},
}
NOISE = "bfloat16 autocast, uncompressed"


@dataclass(frozen=True)
class Result:
    """One setting on one model: relative errors of the gradient against float32, means over the batches.

    Attributes:
        error: over all parameters.
        median, worst: over the parameters' own (those with a gradient over 1e-5 of the whole).
        channel: of the worst channels: 99 of 100 columns of a weight's gradient, all weights taken together, are off
            by less. What AdamW makes of small channels depends on these.
        bytes_per_element: of what is compressed (None for the noise of bfloat16, which compresses nothing).
    """

    model: str
    setting: str
    error: float
    median: float
    worst: float
    channel: float
    bytes_per_element: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--steps", type=int, default=300, help="training steps before measuring (default %(default)s)")
    parser.add_argument("--batches", type=int, default=3, help="batches to measure on (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--by-op", choices=LOSSY, metavar="FORMAT", help="besides, a format for one operation at a time"
    )
    parser.add_argument("--out", metavar="JSON", help="write the figures to this file too")


def run(options: argparse.Namespace, console: Console) -> None:
    """Train, measure, print a table."""
    if options.steps < 1 or options.batches < 1:
        raise ValueError(f"--steps, --batches: {options.steps}, {options.batches} given, 1 or more allowed")
    device = find_device(options.device)
    results = []
    with Progress(console=console) as progress:
        task = progress.add_task("models", total=len(SUBJECTS))
        for name in SUBJECTS:
            results += measure(name, device, options.steps, options.batches, options.seed, options.by_op)
            progress.advance(task)
    for name in SUBJECTS:
        console.print(table(name, [result for result in results if result.model == name]))
    if options.out:
        Path(options.out).write_text(json.dumps([asdict(result) for result in results], indent=1))


def measure(
    name: str, device: torch.device, steps: int, batches: int, seed: int, by_op: str | None = None
) -> list[Result]:
    """All settings on one model, after `steps` of training, on the same fresh batches.

    Args:
        by_op: a format that each operation's saves get in turn, the rest being stored by the policy.
    """
    torch.manual_seed(seed)
    subject = SUBJECTS[name](device)
    subject.train(steps)
    fresh = [subject.next_batch() for _ in range(batches)]
    exact = [_gradient(subject.model, batch, contextlib.nullcontext()) for batch in fresh]
    results = []
    for setting, session in (*_sessions(), *_sessions_by_op(subject.model, fresh[0], by_op)):
        with_setting = [_gradient(subject.model, batch, session) for batch in fresh]
        results.append(_result(name, setting, with_setting, exact, _bytes_per_element(session)))
    noisy = [_gradient(subject.model, batch, torch.autocast(device.type, torch.bfloat16)) for batch in fresh]
    results.append(_result(name, NOISE, noisy, exact, None))
    return results


def _sessions() -> Iterator[tuple[str, fp8hooks.Session]]:
    for setting, options in SETTINGS.items():
        yield setting, fp8hooks.compress(**options)  # type: ignore[arg-type]


def _sessions_by_op(model: nn.Module, batch: Batch, name: str | None) -> Iterator[tuple[str, fp8hooks.Session]]:
    if name is None:
        return
    session = fp8hooks.compress()
    _gradient(model, batch, session)
    stored = {(site.op, site.role) for site, codec in session.stats.sites if codec in LOSSY}
    for op, role in sorted(stored):
        yield f"{op} ({role}) in {name}", fp8hooks.compress(rules=[Rule(name, op=op, role=role)])


def _gradient(
    model: nn.Module, batch: Batch, context: contextlib.AbstractContextManager[object]
) -> dict[str, torch.Tensor]:
    """Gradients of one step, always with the same random numbers."""

    def loss() -> torch.Tensor:
        torch.manual_seed(1)
        value: torch.Tensor = model(*batch)
        return value

    return gradients.of_step(model, loss, context)


def _result(
    model: str,
    setting: str,
    got: list[dict[str, torch.Tensor]],
    exact: list[dict[str, torch.Tensor]],
    bytes_per_element: float | None,
) -> Result:
    pairs = list(zip(got, exact, strict=True))
    overall = [gradients.overall(a, b).error for a, b in pairs]
    by_parameter = [_errors(a, b) for a, b in pairs]
    return Result(
        model,
        setting,
        statistics.mean(overall),
        statistics.mean(statistics.median(errors) for errors in by_parameter),
        statistics.mean(max(errors) for errors in by_parameter),
        statistics.mean(_channel_error(a, b) for a, b in pairs),
        bytes_per_element,
    )


def _errors(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> list[float]:
    """Errors of the parameters, but for those whose gradient is zero in exact arithmetic (a bias before BatchNorm)."""
    least = 1e-5 * sum(float(g.norm()) ** 2 for g in exact.values()) ** 0.5
    return [item.error for item in gradients.compare(got, exact) if item.norm > least]


def _channel_error(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The 99th percentile of the error by input channel, but for those next to zero (embeddings' unused rows)."""
    errors = []
    for name, gradient in exact.items():
        if gradient.dim() < 2:
            continue
        want = gradient.transpose(0, 1).flatten(1)
        norms = want.norm(dim=1)
        off = (got[name].transpose(0, 1).flatten(1) - want).norm(dim=1)
        some = norms > 1e-3 * norms.median()
        errors.append(off[some] / norms[some])
    return float(torch.cat(errors).quantile(0.99))


def _bytes_per_element(session: fp8hooks.Session) -> float:
    """Stored bytes of what lossy codecs hold, by element."""
    buckets = [bucket for name, bucket in session.stats.by_codec.items() if name in LOSSY]
    elements = sum(bucket.elements for bucket in buckets)
    return sum(bucket.stored_bytes for bucket in buckets) / elements if elements else 0.0


def table(model: str, results: list[Result]) -> Table:
    """The results of one model."""
    made = Table(title=f"{model}: relative error of the gradient")
    made.add_column("stored as")
    for column in ("all parameters", "median", "worst", "worst channels", "bytes an element"):
        made.add_column(column, justify="right")
    for result in results:
        size = "" if result.bytes_per_element is None else f"{result.bytes_per_element:.3f}"
        made.add_row(
            result.setting, *(f"{x:.4f}" for x in (result.error, result.median, result.worst, result.channel)), size
        )
    return made
