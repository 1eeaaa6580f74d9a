"""Layers of Llama 3's shape, with random weights and inputs, written as most users run them.

That is, with RMSNorm composed of operations in float32 and keys and values repeated for their groups of queries:
autograd saves 213 KiB a token and layer, where fused ones save 165. With a vocabulary the model ends in logits and
their cross-entropy, else in what its last norm gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Of a stack of layers and of what goes into it.

    Attributes:
        hidden, ffn: widths.
        heads, kv_heads: of queries; of keys and values.
        batch, length: sequences, and tokens in each.
        vocabulary: of the logits; 0 for none.
        experts: in place of the one MLP of a layer, each token going to two of them; 0 for none.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    batch: int
    length: int
    vocabulary: int = 0
    experts: int = 0


SHAPES = {
    # Llama-3-8B's layers, as in the README's tables.
    "llama": Shape(layers=6, hidden=4096, ffn=14336, heads=32, kv_heads=8, batch=4, length=4096),
    # So small that a GPU waits for its host.
    "launch": Shape(layers=8, hidden=512, ffn=1536, heads=8, kv_heads=8, batch=4, length=128),
    # Mixtral's layers, a half as wide.
    "moe": Shape(layers=4, hidden=2048, ffn=7168, heads=16, kv_heads=8, batch=4, length=4096, experts=8),
    "tiny": Shape(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, batch=2, length=32),
    "tiny-moe": Shape(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, batch=2, length=32, experts=4),
}


class Llama(nn.Module):
    """A stack of layers, from embedded tokens [batch, length, hidden] to the same shape, or to a loss."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        with torch.device(device):
            self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
            self.norm = RmsNorm(shape.hidden)
            self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False) if shape.vocabulary else None
            self.targets = torch.randint(max(1, shape.vocabulary), (shape.batch * shape.length,))
        self.to(dtype)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    @property
    def tokens(self) -> int:
        return self.shape.batch * self.shape.length

    def forward(self, x: Tensor, run: Callable[..., Tensor] | None = None) -> Tensor:
        """`run(layer, x, angles)`, if given, calls the layers."""
        angles = _angles(self.shape, x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, angles) if run is None else run(layer, x, angles)
        x = self.norm(x)
        if self.head is None:
            return x
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), self.targets)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Random embedded tokens, and a gradient for the output."""
        parameter = next(self.parameters())
        sizes = (self.shape.batch, self.shape.length, self.shape.hidden)
        x, gradient = (torch.randn(sizes, device=parameter.device, dtype=parameter.dtype) for _ in range(2))
        if self.head is not None:
            gradient = torch.ones((), device=parameter.device)
        return x.requires_grad_(), gradient


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(x.dtype)


class Layer(nn.Module):
    """Attention and SwiGLU, each after an RMSNorm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        width = shape.hidden // shape.heads
        self.attention_norm, self.mlp_norm = RmsNorm(shape.hidden), RmsNorm(shape.hidden)
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * width, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * width, bias=False)
        self.o = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.mlp = Experts(shape) if shape.experts else Mlp(shape)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))

    def attention(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in ((self.q(x), self.heads), (self.k(x), self.kv_heads), (self.v(x), self.kv_heads))
        )
        groups = self.heads // self.kv_heads
        q, k, v = _rotate(q, angles), _repeat(_rotate(k, angles), groups), _repeat(v, groups)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Experts(nn.Module):
    """As many MLPs as there are experts, each token going to the two that its router gives most."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = nn.ModuleList(Mlp(shape) for _ in range(shape.experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        shares, chosen = F.softmax(self.router(flat).float(), -1).topk(2)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == number)
            y = y.index_add(0, tokens, expert(flat[tokens]) * shares[tokens, place, None])
        return y.view(x.shape)


def _angles(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, [length, width]."""
    width = shape.hidden // shape.heads
    frequencies = 500_000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(shape.length, device=device), frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = angles
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _repeat(x: Tensor, times: int) -> Tensor:
    """Each head as often as there are queries for it."""
    return x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
