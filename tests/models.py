"""Small models, and gradients of them, for the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

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


class Keep(torch.autograd.Function):
    """What a stranger saves stays exact: x**2 by a function of its own."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def captured(model: nn.Module, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a step, after some of it outside on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            run()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


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
