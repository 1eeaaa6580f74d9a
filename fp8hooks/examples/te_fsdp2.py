"""TransformerEngine in FP8, sharded by FSDP2, with what autograd saves compressed.

    torchrun --standalone --nproc-per-node=gpu fp8hooks/examples/te_fsdp2.py

One process a GPU; one GPU will do. A language model of bytes learns from CPython's documentation.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformer_engine.common.recipe import DelayedScaling

import fp8hooks
from fp8hooks.demo import text

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """Shape of a model and of its batches."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    batch: int
    length: int


SIZES = {
    "small": Size(layers=4, hidden=512, heads=8, ffn=1536, batch=8, length=256),
    "large": Size(layers=16, hidden=2048, heads=16, ffn=5632, batch=16, length=2048),
}


class ByteModel(nn.Module):
    """Next-byte language model of TransformerEngine's layers: int64 [batch, length] to the mean loss in nats."""

    def __init__(self, size: Size, device: torch.device) -> None:
        super().__init__()
        self.rotations = te.RotaryPositionEmbedding(size.hidden // size.heads)(size.length).to(device)
        self.embedding = nn.Embedding(VOCABULARY, size.hidden, device=device)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                size.hidden,
                size.ffn,
                size.heads,
                layer_number=number + 1,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                fuse_qkv_params=True,
                self_attn_mask_type="causal",
                attn_input_format="bshd",
                params_dtype=torch.float32,
                device=device,
            )
            for number in range(size.layers)
        )
        self.norm = te.RMSNorm(size.hidden, dtype=torch.float32, device=device)
        self.head = nn.Linear(size.hidden, VOCABULARY, bias=False, device=device)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor, run: Callable[..., Tensor] | None = None) -> Tensor:
        """`run(layer, x, rotary_pos_emb=...)`, if given, calls the layers."""
        x = self.embedding(inputs)
        for layer in self.layers:
            call = (layer,) if run is None else (run, layer)
            x = call[0](*call[1:], x, rotary_pos_emb=self.rotations)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    """Train, and let the first process tell."""
    options = _options()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        train(SIZES[options.size], options.steps, device)
    finally:
        dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--size", choices=SIZES, default="small")
    return parser.parse_args()


def train(size: Size, steps: int, device: torch.device) -> None:
    """Weights are in float32, sharded; each layer is gathered in bfloat16 and multiplies in FP8."""
    torch.manual_seed(0)
    model = ByteModel(size, device)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    batches = text.Batches(text.load(None), size.batch, size.length, seed=dist.get_rank(), device=device)
    recipe = DelayedScaling()
    session = fp8hooks.compress()
    for step in range(steps):
        inputs, targets = batches.next()
        with te.autocast(enabled=True, recipe=recipe), session:  # the one line
            loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)
    if dist.get_rank() == 0:
        print(session.report())
        print(f"most memory at a time: {torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
