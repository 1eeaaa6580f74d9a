"""The two runs, and what is measured in them."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fp8hooks
from fp8hooks import gradients
from fp8hooks.demo.model import ByteModel, Size
from fp8hooks.demo.text import Batches
from fp8hooks.stats import Stats

#: Called after each step with the step's number and its loss.
Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Setup:
    """All that both runs share."""

    size: Size
    text: Tensor
    steps: int
    device: torch.device
    dtype: torch.dtype
    seed: int
    learning_rate: float = 1e-3

    def batches(self) -> Batches:
        return Batches(self.text, self.size.batch, self.size.length, self.seed, self.device)


@dataclass
class Run:
    """What came of one run. Losses in nats a byte, times in seconds.

    Attributes:
        losses: training loss of each step.
        held_out: loss on text that was not trained on, after the last step.
        step_time: median over the steps.
        stats: of a step's saved tensors (`stored_bytes` is what was held for backward).
        peak_bytes: most memory allocated on the GPU at one time; None on a CPU.
        gradient_errors: relative error of the whole gradient in the first and the last step.
    """

    losses: list[float] = field(default_factory=list)
    held_out: float = 0.0
    step_time: float = 0.0
    stats: Stats = field(default_factory=Stats)
    peak_bytes: int | None = None
    gradient_errors: tuple[float, float] | None = None


def train(setup: Setup, session: fp8hooks.Session | None, progress: Progress) -> Run:
    """Train from the setup's seed, with forward in `session` if there is one."""
    torch.manual_seed(setup.seed)
    model = ByteModel(setup.size).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(rate, steps=setup.steps))
    batches = setup.batches()
    run, times, errors = Run(), [], []
    for step in range(setup.steps):
        inputs, targets = batches.next()
        if session is not None and step in (0, setup.steps - 1):
            errors.append(gradient_error(model, setup, session, inputs, targets))
        if setup.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(setup.device)  # the error above was taken with an exact backward
        start = _now(setup.device)
        loss = backward(model, setup, session, inputs, targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(_now(setup.device) - start)
        if setup.device.type == "cuda":
            run.peak_bytes = max(run.peak_bytes or 0, torch.cuda.max_memory_allocated(setup.device))
        schedule.step()
        run.losses.append(loss)
        progress(step, loss)
    run.step_time = statistics.median(times)
    run.stats = _exact_stats(model, setup, batches) if session is None else session.stats
    run.gradient_errors = (errors[0], errors[-1]) if errors else None
    run.held_out = held_out_loss(model, setup, batches)
    return run


def rate(step: int, steps: int) -> float:
    """Learning rate as a share of its peak: a linear warm-up, a plateau, and over the last 40 % down to zero.

    The decay takes the noise of single batches out of the final weights, and so out of the comparison.
    """
    warmup = max(1, min(20, steps // 5))
    return min(1.0, (step + 1) / warmup, (steps - step) / (0.4 * steps))


def backward(
    model: ByteModel, setup: Setup, session: fp8hooks.Session | None, inputs: Tensor, targets: Tensor
) -> float:
    """One forward, in `session` if there is one, and its backward; the loss."""
    with session or contextlib.nullcontext():
        loss = _loss(model, setup, inputs, targets)
    loss.backward()
    return loss.item()


def gradient_error(model: ByteModel, setup: Setup, session: fp8hooks.Session, inputs: Tensor, targets: Tensor) -> float:
    """||g - g_exact|| / ||g_exact|| over all parameters, for one batch; gradients are cleared after."""

    def loss() -> Tensor:
        return _loss(model, setup, inputs, targets)

    exact = gradients.of_step(model, loss, contextlib.nullcontext())
    return gradients.overall(gradients.of_step(model, loss, session), exact).error


@torch.no_grad()
def held_out_loss(model: ByteModel, setup: Setup, batches: Batches) -> float:
    """Mean loss over the held-out text, a window counting as much as another."""
    total, windows = 0.0, 0
    for inputs, targets in batches.evaluation():
        total += _loss(model, setup, inputs, targets).item() * len(inputs)
        windows += len(inputs)
    return total / windows


def _exact_stats(model: ByteModel, setup: Setup, batches: Batches) -> Stats:
    """What autograd holds in a step that is not compressed, counted by a session that keeps all as it is."""
    session = fp8hooks.compress(rules=[fp8hooks.Rule("exact")])
    with session:
        _loss(model, setup, *batches.next())
    return session.stats


def _loss(model: ByteModel, setup: Setup, inputs: Tensor, targets: Tensor) -> Tensor:
    mixed = setup.dtype is not torch.float32
    with torch.autocast(setup.device.type, setup.dtype, enabled=mixed):
        loss: Tensor = model(inputs, targets)
    return loss


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
