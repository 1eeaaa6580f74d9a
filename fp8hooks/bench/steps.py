"""Forward and backward of one model in several ways: time, memory, the gradient's error."""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from fp8hooks import gradients


@dataclass
class Way:
    """One way to run a step.

    Attributes:
        forward: from the inputs to the output; a model, mostly.
        context: what forward runs in.
        graphed: the whole step is captured in a CUDA graph.
    """

    forward: Callable[[Tensor], Tensor]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    graphed: bool = False


_UNKNOWN = float("nan")


@dataclass(frozen=True)
class Result:
    """Of one way.

    Attributes:
        milliseconds: median of a step, that is of forward and backward, until the device is done.
        held: bytes allocated after forward beyond those before; NaN for a graph, whose memory is never given back.
        peak: most bytes allocated in the step beyond those before.
        error: relative L2 error of all parameters' gradients taken as one vector, against the first way.
        truth: the same against float32; NaN if that was not taken.
        failure: the error that the way ended in; all else is NaN then. None: it did not.
    """

    milliseconds: float = _UNKNOWN
    held: float = _UNKNOWN
    peak: float = _UNKNOWN
    error: float = _UNKNOWN
    truth: float = _UNKNOWN
    failure: str | None = None


def measure(
    model: nn.Module,
    inputs: tuple[Tensor, Tensor],
    ways: Mapping[str, Way],
    repeats: int,
    truth: Mapping[str, Tensor] | None = None,
    tolerated: tuple[type[Exception], ...] = (torch.OutOfMemoryError,),
    progress: Callable[[str], object] = lambda name: None,
) -> dict[str, Result]:
    """Each way's figures; times are taken by turns, so that a slow moment does not fall on one of them.

    Args:
        inputs: what forward takes, and a gradient for what it gives.
        repeats: times to measure.
        truth: the gradients in float32, see `true_gradients`.
        tolerated: errors that are recorded, the other ways going on. The first way's are raised.
        progress: called with the name of a way before it is warmed up.
    """
    results: dict[str, Result] = {}
    exact: dict[str, Tensor] = {}
    steps: dict[str, _Step] = {}
    for name, way in ways.items():
        progress(name)
        step = _Step(model, way, *inputs)
        try:
            for _ in range(3):  # kernels are compiled, caches filled, plans made
                step.run()
            held, peak = step.memory()
            found = gradients.collect(model)
            exact = exact or found
            error = gradients.overall(found, exact).error
            true_error = _UNKNOWN if truth is None else gradients.overall(found, truth).error
            del found
            if way.graphed:
                step.capture()
        except tolerated as problem:
            if not results:
                raise
            lines = str(problem).splitlines() or [""]
            results[name] = Result(failure=f"{type(problem).__name__}: {lines[0]}")
            del problem
            _clean(model)
            continue
        steps[name] = step
        results[name] = Result(held=held, peak=peak, error=error, truth=true_error)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            step.run()  # once alone: what another way left behind is not this one's
            times[name].append(step.time())
    for name, taken in times.items():
        results[name] = replace(results[name], milliseconds=statistics.median(taken) * 1e3)
    return results


def _clean(model: nn.Module) -> None:
    """Let go of what a way that failed has left."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def true_gradients(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> dict[str, Tensor] | None:
    """The gradients of a copy of the model in float32, products without TF32; None if that does not fit."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = copy.deepcopy(model)
    try:
        exact.float()
        x, gradient = (tensor.detach().float() for tensor in inputs)
        exact(x.requires_grad_()).backward(gradient)
        return gradients.collect(exact)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.set_float32_matmul_precision(precision)
        del exact
        _clean(model)


class _Step:
    """A step that can be run again and again."""

    def __init__(self, model: nn.Module, way: Way, x: Tensor, gradient: Tensor) -> None:
        self._model, self._way, self._x, self._gradient = model, way, x, gradient
        self._graph: torch.cuda.CUDAGraph | None = None

    def _forget_gradients(self) -> None:
        for parameter in (*self._model.parameters(), self._x):
            parameter.grad = None

    def _forward(self) -> Tensor:
        with self._way.context():
            return self._way.forward(self._x)

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._forget_gradients()
            self._forward().backward(self._gradient)

    def capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self._forget_gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward().backward(self._gradient)
        self._graph = graph

    def time(self) -> float:
        _synchronize(self._x.device)
        start = time.perf_counter()
        self.run()
        _synchronize(self._x.device)
        return time.perf_counter() - start

    def memory(self) -> tuple[float, float]:
        if not self._x.is_cuda:
            return float("nan"), float("nan")
        self._forget_gradients()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = self._forward()
        held = torch.cuda.memory_allocated() - before
        output.backward(self._gradient)
        return float(held), float(torch.cuda.max_memory_allocated() - before)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(title: str, results: dict[str, Result], plain_of: Mapping[str, str] = MappingProxyType({})) -> Table:
    """A row for each way, ratios to the first; those of time to another where `plain_of` names one."""
    first = next(iter(results.values()))
    found = Table(title=title)
    with_truth = any(result.truth == result.truth for result in results.values())
    columns = ["", "step ms", "of plain", "held GiB", "of plain ", "peak GiB", "gradient error"]
    for column in columns + (["from float32"] if with_truth else []):
        found.add_column(column, justify="right" if column else "left")
    for name, result in results.items():
        if result.failure is not None:
            found.add_row(name, f"[red]{escape(result.failure)}[/red]")
            continue
        plain = results[plain_of[name]] if name in plain_of else first
        cells = (
            f"{result.milliseconds:.2f}",
            f"{result.milliseconds / plain.milliseconds:.3f}",
            f"{result.held / 2**30:.2f}",
            f"{result.held / first.held:.3f}",
            f"{result.peak / 2**30:.2f}",
            f"{result.error:.4f}",
            *([f"{result.truth:.4f}"] if with_truth else []),
        )
        found.add_row(name, *("-" if cell == "nan" else cell for cell in cells))
    return found


def pareto(results: Mapping[str, Result], ours: Sequence[str], path: str, title: str) -> None:
    """Draw memory at its peak against the time of a step: ours as a line, each other way as a point.

    Where memory is not known (on a CPU) only times are drawn.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    worked = {name: result for name, result in results.items() if result.failure is None}
    first = next(iter(worked.values()))
    known = {name: r for name, r in worked.items() if r.peak == r.peak}

    def place(name: str) -> tuple[float, float]:
        result = worked[name]
        return (result.peak / 2**30 if known else 0.0), result.milliseconds / first.milliseconds

    line = [name for name in ours if name in worked and (name in known or not known)]
    if line:
        axes.plot(*zip(*map(place, line), strict=True), "o-", color="tab:green", label="fp8hooks")
    for name in line:
        label = name.removeprefix("fp8hooks").strip(", ") or "all"
        axes.annotate(label, place(name), textcoords="offset points", xytext=(4, 5), fontsize=8)
    for name, result in worked.items():
        if name not in line and (name in known or not known):
            axes.plot(*place(name), "s" if result is first else "x", markersize=8, label=name)
    memory = "peak memory of a step, GiB" if known else "(memory is not known on this device)"
    axes.set(xlabel=memory, ylabel="time of a step, of plain", title=title, yscale="log")
    ticks = (0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2, 3, 5)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
