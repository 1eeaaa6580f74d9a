"""`fp8hooks bench te`: steps of TransformerEngine's layers, recipe by recipe, beside every kind of checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8hooks
from fp8hooks.bench.llama import SHAPES, Shape
from fp8hooks.bench.steps import Result, Way, measure, table
from fp8hooks.devices import find_device, name_of

#: Recipes by name, as TransformerEngine's classes are called; "" trains in bfloat16.
RECIPES = {"bf16": "", "delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
AGAIN = "plain, again (noise)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--shape", default="llama", choices=SHAPES, help="of the layers (default %(default)s)")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--repeats", type=int, default=15, help="times to measure (default %(default)s)")
    parser.add_argument("--out", metavar="JSON", help="write the figures to this file too")


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure and print, a table for each recipe."""
    if options.repeats < 1:
        raise ValueError(f"--repeats: {options.repeats} given, 1 or more allowed")
    require()
    device = find_device("cuda")
    import transformer_engine

    found: dict[str, dict[str, Any]] = {}
    for name in options.recipes:
        torch.manual_seed(0)
        model = TeLlama(SHAPES[options.shape], device)
        results, workspaces = _measure(model, recipe_context(name), options.repeats)
        title = (
            f"forward and backward, {options.shape}, TransformerEngine {transformer_engine.__version__}, {name}, "
            f"{name_of(device)}, torch {torch.__version__}"
        )
        console.print(table(title, results))
        if workspaces:
            console.print(
                f"FP8 copies of weights, {workspaces / 2**30:.2f} GiB, are not in what plain and fp8hooks hold."
            )
        found[name] = {way: dataclasses.asdict(result) for way, result in results.items()}
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1))


def require() -> None:
    """Say so if TransformerEngine is not installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError("TransformerEngine is not installed: pip install --no-build-isolation 'fp8hooks[te]'")


def recipe_context(name: str) -> Callable[[], AbstractContextManager[Any]]:
    """What forward runs in under a recipe of `RECIPES`."""
    if not RECIPES[name]:
        return contextlib.nullcontext
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    made = getattr(recipe, RECIPES[name])()
    if hasattr(te, "autocast"):
        return functools.partial(te.autocast, enabled=True, recipe=made)
    return functools.partial(te.fp8_autocast, enabled=True, fp8_recipe=made)


class TeLlama(nn.Module):
    """A stack of `TransformerLayer`s of Llama's shape, [length, batch, hidden] to the same, in bfloat16."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.shape = shape
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                shape.hidden,
                shape.ffn,
                shape.heads,
                num_gqa_groups=shape.kv_heads,
                layer_number=number + 1,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                fuse_qkv_params=True,
                self_attn_mask_type="causal",
                params_dtype=torch.bfloat16,
                device=device,
            )
            for number in range(shape.layers)
        )

    def forward(self, x: Tensor, run: Callable[..., Tensor] | None = None) -> Tensor:
        """`run(layer, x)`, if given, calls the layers."""
        for layer in self.layers:
            x = layer(x) if run is None else run(layer, x)
        return x

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Random embedded tokens, and a gradient for the output."""
        sizes = (self.shape.length, self.shape.batch, self.shape.hidden)
        device = next(self.parameters()).device
        x, gradient = (torch.randn(sizes, device=device, dtype=torch.bfloat16) for _ in range(2))
        return x.requires_grad_(), gradient


def _measure(
    model: TeLlama, context: Callable[[], AbstractContextManager[Any]], repeats: int
) -> tuple[dict[str, Result], int]:
    """Figures, or the error of what does not work, and the bytes of weights' FP8 copies in the graph."""
    session = fp8hooks.compress()
    # Whatever error it is, it is what a user would meet.
    results = measure(model, model.inputs(), ways(model, context, session), repeats, tolerated=(Exception,))
    # A graph that has not been checkpointed holds these too, whether fp8hooks is there or not.
    workspaces = session.stats.weight_bytes - sum(p.nbytes for p in model.parameters())
    for name in ("plain", AGAIN, "fp8hooks"):
        results[name] = dataclasses.replace(results[name], held=results[name].held - workspaces)
    return results, workspaces


def ways(
    model: TeLlama, context: Callable[[], AbstractContextManager[Any]], session: fp8hooks.Session
) -> dict[str, Way]:
    """As it is, twice; with us; with TransformerEngine's checkpoint and with torch's two."""
    import transformer_engine.pytorch as te

    @contextlib.contextmanager
    def compressed() -> Any:
        with context(), session:
            yield

    def recomputing(call: Callable[..., Tensor]) -> Way:
        return Way(functools.partial(model, run=call), context)

    return {
        "plain": Way(model, context),
        AGAIN: Way(model, context),
        "fp8hooks": Way(model, compressed),
        "te.checkpoint": recomputing(te.checkpoint),
        "torch checkpoint, reentrant": recomputing(functools.partial(checkpoint, use_reentrant=True)),
        "torch checkpoint, non-reentrant": recomputing(functools.partial(checkpoint, use_reentrant=False)),
    }
