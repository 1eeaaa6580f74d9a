"""`fp8hooks bench te-training`: a language model of TransformerEngine's layers, trained in FP8 on text three ways."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import fp8hooks
from fp8hooks import gradients
from fp8hooks.bench.convergence import EXACT, Curve, plot, table
from fp8hooks.bench.te import RECIPES, recipe_context, require
from fp8hooks.demo import text
from fp8hooks.demo.train import rate
from fp8hooks.devices import find_device

CHECKPOINT, COMPRESSED = "te.checkpoint", "fp8hooks"
SETTINGS = (EXACT, CHECKPOINT, COMPRESSED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--steps", type=int, default=500, help="training steps (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each setting (default %(default)s)")
    parser.add_argument("--recipe", choices=RECIPES, default="delayed", help="(default %(default)s)")
    parser.add_argument("--out", metavar="JSON", help="write the curves to this file too")
    parser.add_argument("--plot", metavar="PNG", help="draw the curves")


def run(options: argparse.Namespace, console: Console) -> None:
    """Train, print a table, write what was asked for."""
    if min(options.steps, options.seeds) < 1:
        raise ValueError(f"--steps, --seeds: {options.steps}, {options.seeds} given, 1 or more allowed")
    require()
    device = find_device("cuda")
    jobs = [(setting, seed) for setting in SETTINGS for seed in range(options.seeds)]
    curves = [
        _train(setting, seed, options.steps, options.recipe, device)
        for setting, seed in track(jobs, "training", console=console, transient=True)
    ]
    console.print(table(curves))
    if options.out:
        Path(options.out).write_text(json.dumps([vars(curve) for curve in curves]))
    if options.plot:
        title = f"TransformerEngine, {RECIPES[options.recipe] or 'bfloat16'}, {torch.cuda.get_device_name(device)}"
        plot(curves, options.plot, title)


def _train(setting: str, seed: int, steps: int, recipe: str, device: torch.device) -> Curve:
    from fp8hooks.examples.te_fsdp2 import SIZES, ByteModel

    torch.manual_seed(seed)
    size = SIZES["small"]
    model = ByteModel(size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(rate, steps=steps))
    batches = text.Batches(text.load(None), size.batch, size.length, seed, device)
    session = fp8hooks.compress() if setting == COMPRESSED else None
    loss_of = functools.partial(_loss, model, setting, recipe_context(recipe))
    losses: list[Tensor] = []
    error = None
    for step in range(steps):
        inputs, targets = batches.next()
        if session is not None and step == steps - 1:
            error = _gradient_error(model, functools.partial(loss_of, inputs, targets), session)
        with session or contextlib.nullcontext():
            loss = loss_of(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.detach())
    with torch.no_grad():
        held_out = torch.stack([loss_of(*batch) for batch in batches.evaluation()]).mean()
    return Curve(setting, seed, torch.stack(losses).tolist(), float(held_out), error)


def _loss(
    model: nn.Module,
    setting: str,
    context: Callable[[], AbstractContextManager[Any]],
    inputs: Tensor,
    targets: Tensor,
) -> Tensor:
    import transformer_engine.pytorch as te

    run = te.checkpoint if setting == CHECKPOINT and torch.is_grad_enabled() else None
    with torch.autocast("cuda", torch.bfloat16), context():
        loss: Tensor = model(inputs, targets, run=run)
    return loss


def _gradient_error(model: nn.Module, loss: Callable[[], Tensor], session: fp8hooks.Session) -> float:
    exact = gradients.of_step(model, loss, contextlib.nullcontext())
    return gradients.overall(gradients.of_step(model, loss, session), exact).error
