"""Other ways to have less memory taken by what autograd saves, to measure beside ours."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fp8hooks.bench.families import Model
from fp8hooks.bench.steps import Way

Backend = Callable[[torch.fx.GraphModule, list[Any]], Any]

#: Inductor's own pass: every saved tensor of 1 MiB or more as E4M3 with a scale a row.
QUANTIZE = {
    "post_grad_fusion_options": {
        "activation_quantization_aten_pass": {
            "quant_type": "torch.float8_e4m3fn",
            "size_in_mb": 1,
            "use_scaling": True,
            "exclude_primals": False,
            "allowed_dtypes": "torch.bfloat16;torch.float32",
        }
    }
}

# Selective checkpointing keeps what is dear to compute.
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]

#: Other libraries' offloading, by the module that has their `OffloadActivations`.
_OFFLOADERS = {"TRL": "trl.models.activation_offloading", "torchtune": "torchtune.training"}

#: Not measured, and why.
NOT_MEASURED = {
    "GACT": "its last release needs CUDA extensions for torch 1.x",
    "COAT": "it replaces the model's layers, and has no hook to put around these",
}


def eager(model: Model, say: Callable[[str], object] = lambda line: None) -> dict[str, Way]:
    """What eager models can use; what is not installed is said."""
    found = {
        "checkpoint each layer": Way(functools.partial(recompute, model)),
        "selective checkpoint": Way(functools.partial(_recompute_selectively, model)),
    }
    if _on_gpu(model):
        pinned = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=True)
        found["save_on_cpu, pinned"] = Way(model, pinned)
        for name, module in _OFFLOADERS.items():
            make = _find(module, "OffloadActivations")
            if make is None:
                say(f"{name} is not installed, and its OffloadActivations not measured.")
            else:
                found[f"{name} OffloadActivations"] = Way(model, make)
    else:
        say("No GPU: save_on_cpu and other libraries' offloading are not measured, nor is memory.")
    for name, why in NOT_MEASURED.items():
        say(f"{name} is not measured: {why}.")
    return found


def compiled(model: Model) -> dict[str, Way]:
    """What compilers do, each layer compiled."""
    return {
        name: Way(forward_through(model, compiled_layers(model, made)))
        for name, made in {
            "compiled": backend(),
            "compiled, budget 0.5": backend(activation_memory_budget=0.5),
            "compiled, budget 0.25": backend(activation_memory_budget=0.25),
            "compiled, Inductor's E4M3": backend(QUANTIZE),
        }.items()
    }


def recompute(model: Model, x: Tensor) -> Tensor:
    """The model's forward with each layer checkpointed."""
    return model(x, run=functools.partial(checkpoint, use_reentrant=False))


def _recompute_selectively(model: Model, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, _KEPT)
    return model(x, run=functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))


def _find(module: str, name: str) -> Callable[[], Any] | None:
    try:
        found: Callable[[], Any] | None = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found


def _on_gpu(model: Model) -> bool:
    return next(model.parameters()).is_cuda


# Compiled


def backend(inductor: dict[str, Any] | None = None, **functorch: Any) -> Backend:
    """Inductor under other settings. Dynamo tells what it compiled for one backend from what it did for another."""

    def compile_graph(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._inductor import config as inductor_config
        from torch._inductor.compile_fx import compile_fx

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._functorch.config.patch(**functorch) if functorch else contextlib.nullcontext())
            stack.enter_context(inductor_config.patch(inductor) if inductor else contextlib.nullcontext())
            return compile_fx(module, inputs)

    return compile_graph


def compiled_layers(model: Model, backend: Backend) -> dict[nn.Module, Callable[..., Tensor]]:
    """Each layer with what runs in its place."""
    return {layer: torch.compile(layer, backend=backend) for layer in model.layers}


def forward_through(
    model: Model, layers: dict[nn.Module, Callable[..., Tensor]], recompute: bool = False
) -> Callable[[Tensor], Tensor]:
    """The model's forward, with its layers replaced, and each checkpointed on request."""

    def run(layer: nn.Module, *arguments: Any) -> Tensor:
        if recompute:
            found: Tensor = checkpoint(layers[layer], *arguments, use_reentrant=False)
            return found
        return layers[layer](*arguments)

    return functools.partial(model, run=run)


def chosen(found: dict[str, Way], parts: list[str] | None) -> dict[str, Way]:
    """The first way, and those whose names have one of the parts in them; all without any.

    Raises:
        ValueError: a part is in no name.
    """
    if not parts:
        return found
    first = next(iter(found))
    some = {name: way for name, way in found.items() if name == first or any(part in name for part in parts)}
    for part in parts:
        if not any(part in name for name in some):
            raise ValueError(f"--only: {part!r} given, parts of {', '.join(map(repr, found))} allowed")
    return some
