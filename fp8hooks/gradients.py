"""How far one gradient is from another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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


def collect(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients of a model's parameters, by name; those without one are left out."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> list[ParameterError]:
    """The error of each parameter of `exact`; a gradient missing from `got` counts as zero."""
    return [_compare(name, got.get(name), want) for name, want in exact.items()]


def _compare(name: str, got: Tensor | None, want: Tensor) -> ParameterError:
    a = want.double().flatten()
    b = torch.zeros_like(a) if got is None else got.double().flatten()
    norm, other, difference = float(a.norm()), float(b.norm()), float((b - a).norm())
    if norm == 0:
        return ParameterError(name, other, float(other == 0), 0.0)
    cosine = float(a @ b) / (norm * other) if other else 0.0
    return ParameterError(name, difference / norm, cosine, norm)


def overall(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> ParameterError:
    """The error of all parameters taken as one vector."""
    names = list(exact)
    missing = {name: torch.zeros_like(exact[name]) for name in names if name not in got}
    merged = {**got, **missing}
    return _compare("all", _flat(merged[name] for name in names), _flat(exact[name] for name in names))


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])
