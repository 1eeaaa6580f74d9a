"""Four kinds of small model on real data, trained for a while, to measure gradients on.

What suits random weights need not suit trained ones: attention peaks, channels grow apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8hooks.demo import text
from fp8hooks.demo.model import SIZES, VOCABULARY, ByteModel, Mlp, Size
from fp8hooks.demo.text import Batches

Batch = tuple[Tensor, Tensor]


@dataclass
class Subject:
    """A model, its data, and how to train it.

    Attributes:
        model: from a batch's inputs and targets to the loss.
        next_batch: a fresh batch of real data.
        learning_rate: for AdamW.
    """

    model: nn.Module
    next_batch: Callable[[], Batch]
    learning_rate: float = 1e-3

    def train(self, steps: int) -> None:
        """Train in float32, without compression."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate, weight_decay=0.1)
        warmup = max(1, min(20, steps // 5))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
        for _ in range(steps):
            self.model(*self.next_batch()).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()


def language_model(device: torch.device) -> Subject:
    """Llama-style: RMSNorm, rotary positions, SwiGLU."""
    size = SIZES["small"]
    return Subject(ByteModel(size).to(device), _batches(size, device).next)


class Mixture(nn.Module):
    """Two of four SwiGLU experts a token, weighted by a softmax over the two."""

    def __init__(self, size: Size, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(size.hidden, experts, bias=False)
        self.experts = nn.ModuleList(Mlp(size) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = self.router(tokens).topk(2, dim=-1)
        weights = F.softmax(scores, dim=-1)
        result = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            share = expert(tokens[token]) * weights[token, place, None]
            result = result.index_add(0, token, share.to(result.dtype))
        return result.view_as(x)


def mixture_of_experts(device: torch.device) -> Subject:
    """The language model with a mixture of experts in place of each MLP."""
    size = Size(layers=3, hidden=192, heads=6, inner=256, batch=8, length=128)
    model = ByteModel(size)
    for block in model.blocks:
        block.mlp = Mixture(size)
    return Subject(model.to(device), _batches(size, device).next)


class MaskedEncoder(nn.Module):
    """BERT-style: LayerNorm after each part, GELU, dropout; predicts bytes that were masked."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY + 1, size.hidden)
        self.position = nn.Embedding(size.length, size.hidden)
        layer = nn.TransformerEncoderLayer(size.hidden, size.heads, size.inner, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(size.hidden, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs) + self.position.weight[: inputs.shape[1]]
        return F.cross_entropy(self.head(self.layers(x)).flatten(0, 1), targets.flatten(), ignore_index=-100)


def encoder(device: torch.device) -> Subject:
    """The masked encoder on the demo's text, 15 % of its bytes masked."""
    size = Size(layers=4, hidden=192, heads=6, inner=512, batch=8, length=128)
    batches = _batches(size, device)
    generator = torch.Generator().manual_seed(1)

    def masked() -> Batch:
        tokens, _ = batches.next()
        hidden = (torch.rand(tokens.shape, generator=generator) < 0.15).to(device)
        return tokens.masked_fill(hidden, VOCABULARY), tokens.masked_fill(~hidden, -100)

    return Subject(MaskedEncoder(size).to(device), masked)


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, ReLU and max-pooling."""

    def __init__(self) -> None:
        super().__init__()

        def stage(inner: int, outer: int) -> list[nn.Module]:
            return [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]

        self.layers = nn.Sequential(
            *stage(1, 32), *stage(32, 32), nn.MaxPool2d(2), *stage(32, 64), *stage(64, 64), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(images), labels)


def conv_net(device: torch.device) -> Subject:
    """A small convolutional network on scikit-learn's handwritten digits (1797 images of 8 x 8)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("this bench trains on scikit-learn's digits: pip install 'fp8hooks[bench]'") from None

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device)[:, None] / 16
    labels = torch.tensor(digits.target, dtype=torch.int64, device=device)
    generator = torch.Generator().manual_seed(0)

    def batch() -> Batch:
        rows = torch.randint(len(images), (128,), generator=generator).to(device)
        return images[rows], labels[rows]

    return Subject(ConvNet().to(device), batch)


SUBJECTS: dict[str, Callable[[torch.device], Subject]] = {
    "language model": language_model,
    "encoder": encoder,
    "conv net": conv_net,
    "mixture of experts": mixture_of_experts,
}


def _batches(size: Size, device: torch.device) -> Batches:
    return Batches(text.load(None), size.batch, size.length, 0, device)
