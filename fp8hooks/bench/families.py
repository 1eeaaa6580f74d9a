"""Models at realistic shapes, with random weights: Llama's layers, the same with a mixture of experts, a ViT."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8hooks.bench.llama import SHAPES, Llama


@dataclass(frozen=True)
class VitShape:
    """Of a vision transformer; `size` and `patch` in pixels."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    batch: int
    size: int = 224
    patch: int = 16
    classes: int = 1000


VIT_SHAPES = {
    "vit": VitShape(layers=24, hidden=1024, ffn=4096, heads=16, batch=128),  # ViT-L/16
    "tiny-vit": VitShape(layers=2, hidden=64, ffn=128, heads=4, batch=4, size=32, patch=8, classes=10),
}

#: Names that `build` takes.
NAMES = (*SHAPES, *VIT_SHAPES)


def build(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    layers: int | None = None,
    batch: int | None = None,
    length: int | None = None,
    vocabulary: int | None = None,
) -> Llama | Vit:
    """A model of a shape, where what is given takes the place of the shape's own.

    Raises:
        ValueError: a ViT was asked for another length, or a vocabulary.
    """
    given = {"layers": layers, "batch": batch, "length": length, "vocabulary": vocabulary}
    changes = {field: value for field, value in given.items() if value is not None}
    if name in SHAPES:
        return Llama(dataclasses.replace(SHAPES[name], **changes), device, dtype)
    for field in ("length", "vocabulary"):
        if field in changes:
            raise ValueError(f"{field}: {changes[field]} given, none allowed for {name}, whose images have one size")
    return Vit(dataclasses.replace(VIT_SHAPES[name], **changes), device, dtype)


class Vit(nn.Module):
    """A vision transformer, from images [batch, 3, size, size] to logits [batch, classes]."""

    def __init__(self, shape: VitShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        patches = (shape.size // shape.patch) ** 2
        with torch.device(device):
            self.embed = nn.Conv2d(3, shape.hidden, shape.patch, shape.patch)
            self.position = nn.Parameter(torch.zeros(patches, shape.hidden))
            self.layers = nn.ModuleList(VitLayer(shape) for _ in range(shape.layers))
            self.norm, self.head = nn.LayerNorm(shape.hidden), nn.Linear(shape.hidden, shape.classes)
        self.to(dtype)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    @property
    def tokens(self) -> int:
        return self.shape.batch * len(self.position)

    def forward(self, x: Tensor, run: Callable[..., Tensor] | None = None) -> Tensor:
        """`run(layer, x)`, if given, calls the layers."""
        y = self.embed(x).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            y = layer(y) if run is None else run(layer, y)
        logits: Tensor = self.head(self.norm(y).mean(1))
        return logits

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Random images, and a gradient for the logits."""
        shape, like = self.shape, self.position
        x = torch.randn(shape.batch, 3, shape.size, shape.size, device=like.device, dtype=like.dtype)
        gradient = torch.randn(shape.batch, shape.classes, device=like.device, dtype=like.dtype)
        return x.requires_grad_(), gradient


class VitLayer(nn.Module):
    """Attention and a GELU MLP, each after a LayerNorm and beside a residual."""

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.qkv, self.out = nn.Linear(shape.hidden, 3 * shape.hidden), nn.Linear(shape.hidden, shape.hidden)
        self.up, self.down = nn.Linear(shape.hidden, shape.ffn), nn.Linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


#: What benches take. Its forward takes a `run` that calls the `layers` in another way.
Model = Llama | Vit
