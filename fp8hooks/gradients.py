"""Gradients of single steps, and how far one is from another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterError:
    """The gradient of one parameter against the exact one.

    Attributes:
        name: of the parameter.
        error: ||g - g_exact|| / ||g_exact||; the norm of g itself where g_exact is zero.
        cosine: of the angle between both; 1 where both are zero.
        norm: ||g_exact||.
    """

    name: str
    error: float
    cosine: float
    norm: float


def of_step(model: nn.Module, loss: Callable[[], Tensor], context: AbstractContextManager[Any]) -> dict[str, Tensor]:
    """The gradients of one step whose forward, `loss()`, runs in `context`.

    Buffers and random number generators are left as they were, so that steps from the same state draw the same
    numbers; gradients are cleared before and after.
    """
    with _same_start(model):
        model.zero_grad(set_to_none=True)
        with context:
            result = loss()
        result.backward()
        found = collect(model)
        model.zero_grad(set_to_none=True)
    return found


@contextlib.contextmanager
def _same_start(model: nn.Module) -> Iterator[None]:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])


def collect(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients of a model's parameters, by name; those without one are left out."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> list[ParameterError]:
    """The error of each parameter of `exact`; a gradient missing from `got` counts as zero."""
    return [_compare(name, got.get(name), want) for name, want in exact.items()]


def overall(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> ParameterError:
    """The error of all parameters taken as one vector."""
    products = torch.zeros(4, dtype=torch.float64)
    for name, want in exact.items():
        products += _products(got.get(name), want)
    return _from_products("all", products)


def _compare(name: str, got: Tensor | None, want: Tensor) -> ParameterError:
    return _from_products(name, _products(got, want))


def _products(got: Tensor | None, want: Tensor) -> Tensor:
    """Squared norms of the exact gradient, the other, their difference; their scalar product."""
    a = want.double().flatten()
    b = torch.zeros_like(a) if got is None else got.double().flatten()
    difference = b - a
    return torch.stack((a @ a, b @ b, difference @ difference, a @ b)).cpu()


def _from_products(name: str, products: Tensor) -> ParameterError:
    norm, other, difference = products[:3].sqrt().tolist()
    if norm == 0:
        return ParameterError(name, other, float(other == 0), 0.0)
    return ParameterError(name, difference / norm, float(products[3]) / (norm * other) if other else 0.0, norm)
