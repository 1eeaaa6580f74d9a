"""Forward and backward of one model in several ways: time, memory, the gradient's error."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
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


@dataclass(frozen=True)
class Result:
    """Of one way.

    Attributes:
        milliseconds: median of a step, that is of forward and backward, until the device is done.
        held: bytes allocated after forward beyond those before; NaN for a graph, whose memory is never given back.
        peak: most bytes allocated in the step beyond those before.
        error: relative L2 error of all parameters' gradients taken as one vector, against the first way.
    """

    milliseconds: float
    held: float
    peak: float
    error: float


def measure(model: nn.Module, inputs: tuple[Tensor, Tensor], ways: dict[str, Way], repeats: int) -> dict[str, Result]:
    """Each way's figures; times are taken by turns, so that a slow moment does not fall on one of them.

    Args:
        inputs: what forward takes, and a gradient for what it gives.
        repeats: times to measure.
    """
    memory, errors = {}, {}
    exact: dict[str, Tensor] = {}
    steps = {}
    for name, way in ways.items():
        step = _Step(model, way, *inputs)
        for _ in range(3):  # kernels are compiled, caches filled, plans made
            step.run()
        memory[name] = step.memory()
        found = gradients.collect(model)
        exact = exact or found
        errors[name] = gradients.overall(found, exact).error
        del found
        if way.graphed:
            step.capture()
        steps[name] = step
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, step in steps.items():
            step.run()  # once alone: what another way left behind is not this one's
            times[name].append(step.time())
    return {name: Result(statistics.median(times[name]) * 1e3, *memory[name], errors[name]) for name in ways}


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
    for column in ("", "step ms", "of plain", "held GiB", "of plain ", "peak GiB", "gradient error"):
        found.add_column(column, justify="right" if column else "left")
    for name, result in results.items():
        plain = results[plain_of[name]] if name in plain_of else first
        found.add_row(
            name,
            f"{result.milliseconds:.2f}",
            f"{result.milliseconds / plain.milliseconds:.3f}",
            f"{result.held / 2**30:.2f}",
            f"{result.held / first.held:.3f}",
            f"{result.peak / 2**30:.2f}",
            f"{result.error:.4f}",
        )
    return found
