"""A byte-level decoder in the style of Llama: RMSNorm, rotary positions, SwiGLU, no biases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """Shape of a model and of its batches."""

    layers: int
    hidden: int
    heads: int
    inner: int
    batch: int
    length: int


SIZES = {
    "small": Size(layers=4, hidden=192, heads=6, inner=512, batch=8, length=128),
    "medium": Size(layers=8, hidden=512, heads=8, inner=1408, batch=32, length=512),
    "large": Size(layers=12, hidden=1024, heads=16, inner=2816, batch=64, length=1024),
}


class Attention(nn.Module):
    """Causal self-attention on [batch, length, hidden]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(_rotate(q, *rotation), _rotate(k, *rotation), v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, hidden))
        return result


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.hidden, size.inner, bias=False)
        self.up = nn.Linear(size.hidden, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(size.hidden), Attention(size)
        self.norm2, self.mlp = nn.RMSNorm(size.hidden), Mlp(size)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class ByteModel(nn.Module):
    """Next-byte language model: int64 [batch, length] to the mean cross-entropy in nats."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, VOCABULARY, bias=False)
        cos, sin = _rotations(size)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY).float(), targets.view(-1))


def _rotations(size: Size) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head width] of rotary position embedding, base 10000."""
    width = size.hidden // size.heads
    frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(size.length), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
