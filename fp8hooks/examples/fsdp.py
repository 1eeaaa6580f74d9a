"""A language model of bytes, sharded by FSDP2, DDP or not at all, with what autograd saves compressed.

    torchrun --standalone --nproc-per-node=gpu -m fp8hooks.examples.fsdp
    torchrun --standalone --nproc-per-node=2 -m fp8hooks.examples.fsdp --device cpu --size tiny --steps 20

It learns from CPython's documentation. At the end the first process tells the loss, what was saved, the most memory
that was taken, and whether the ranks agree on the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fp8hooks
from fp8hooks.demo import model as demo
from fp8hooks.demo import text
from fp8hooks.demo.model import ByteModel

SIZES = {"tiny": demo.Size(layers=2, hidden=64, heads=4, inner=128, batch=4, length=64), **demo.SIZES}
ENGINES = ("fsdp2", "ddp")


def main() -> None:
    """Train, and let the first process tell."""
    options = _options()
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="fsdp2")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--exact", action="store_true", help="compress nothing, to compare with")
    parser.add_argument("--memory-savings", type=float, help="share of saved bytes to give back")
    parser.add_argument("--offload", action="store_true", help="allow host memory for that")
    parser.add_argument("--checkpoint", metavar="DIR", help="save a sharded checkpoint here, and load it again")
    return parser.parse_args()


def train(options: argparse.Namespace, device: torch.device) -> None:
    """All steps, on windows of the text that differ from rank to rank."""
    torch.manual_seed(0)
    size = SIZES[options.size]
    model = _distributed(ByteModel(size).to(device), options.engine, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    batches = text.Batches(text.load(None), size.batch, size.length, seed=dist.get_rank(), device=device)
    session = None
    if not options.exact:
        offload = None if options.offload else False
        session = fp8hooks.compress(memory_savings=options.memory_savings, offload=offload)
    times = []
    for step in range(options.steps):
        inputs, targets = batches.next()
        start = time.perf_counter()
        with session or contextlib.nullcontext():  # the one line
            loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _tell(f"step {step:4}  loss {loss.item():.3f}", step % 10 == 0)
        times.append(time.perf_counter() - start)
    if session is not None:
        _tell(str(session.report()))
    if device.type == "cuda":
        _tell(f"most memory at a time: {torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB")
    _tell(f"a step took {statistics.median(times) * 1e3:.1f} ms, and the last loss was {loss.item():.4f}")
    _tell(f"all ranks hold the same weights: {_agree(model)}")
    if options.checkpoint:
        _tell(f"the checkpoint is what it was saved from: {_reload(model, Path(options.checkpoint))}")


def _distributed(model: ByteModel, engine: str, device: torch.device) -> nn.Module:
    if engine == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    precision = half if device.type == "cuda" else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def _tell(line: str, now: bool = True) -> None:
    if now and dist.get_rank() == 0:
        print(line, flush=True)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _agree(model: nn.Module) -> bool:
    """Whether every rank sees the same weights, gathered where they are sharded."""
    own = torch.stack([_whole(parameter.detach()).double().sum() for parameter in model.parameters()])
    first = own.clone()
    dist.broadcast(first, 0)
    same = torch.tensor(int(torch.equal(own, first)), device=own.device)
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def _reload(model: nn.Module, folder: Path) -> bool:
    """Save, wipe, load: whether all is as before."""
    before = [_whole(parameter.detach()).clone() for parameter in model.parameters()]
    save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    after = [_whole(parameter.detach()) for parameter in model.parameters()]
    return all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


if __name__ == "__main__":
    main()
