"""Small models, and gradients of them, for the tests."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

import fp8hooks


def mlp(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.LayerNorm(4 * width), nn.Linear(4 * width, width))


class Block(nn.Module):
    """An `mlp` with a residual: a module of our own, since torch's are not compiled by their `compile` method."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.mlp = mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def encoder(width: int = 64) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def step(model: nn.Module, x: Tensor, session: fp8hooks.Session | None = None) -> tuple[Tensor, list[Tensor]]:
    """The loss of one forward (in the session, if given) and the gradients of its backward."""
    model.zero_grad(set_to_none=True)
    with session or contextlib.nullcontext():
        loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def relative_error(got: list[Tensor], want: list[Tensor]) -> float:
    flat_got, flat_want = (torch.cat([t.double().flatten() for t in tensors]) for tensors in (got, want))
    return float((flat_got - flat_want).norm() / flat_want.norm())
