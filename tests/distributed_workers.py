"""What each process of tests/test_distributed.py runs: an engine of torch's own, beside one process that sees all data.

A worker gets its rank, the number of processes and a folder that they share.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp import fully_shard as shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8hooks
from tests import models

WIDTH, ROWS = 64, 128


def start(rank: int, worker: Callable[[int, int, Path], None], world: int, folder: str) -> None:
    """Join the others, work, and leave."""
    torch.set_num_threads(1)
    store = Path(folder) / "store"
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    try:
        worker(rank, world, Path(folder))
        dist.barrier()  # who leaves while others still talk to it may be aborted
    finally:
        dist.destroy_process_group()
    # Interpreters that exit after gloo has served a mesh abort now and then ("terminate called without an active
    # exception"; 3 of 100, without us too).
    os._exit(0)


def network(blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[models.Block(WIDTH) for _ in range(blocks)])


def batch(rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def alone(world: int, loss_inside: bool) -> dict[str, Tensor]:
    """Mean gradients of one process that takes every rank's batch in turn, compressed, with the loss or without."""
    model = network()
    session = fp8hooks.compress() if loss_inside else fp8hooks.enable(model)
    for rank in range(world):
        with session if loss_inside else contextlib.nullcontext():
            loss = loss_of(model, batch(rank)) / world
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(model: nn.Module, want: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Gradients of every parameter are those wanted."""
    found = {name.replace("_fsdp_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    assert found.keys() == want.keys()
    for name, grad in found.items():
        got = whole(grad).float()
        error = (got - want[name]).norm() / want[name].norm()
        assert error <= tolerance, (name, float(error))


def ddp(rank: int, world: int, folder: Path) -> None:
    want = alone(world, loss_inside=True)
    model = DistributedDataParallel(network())
    session = fp8hooks.compress()
    for _ in range(3):
        model.zero_grad()
        with session:
            loss = loss_of(model, batch(rank))
        loss.backward()
        check(model.module, want)
    assert session.stats.savings > 0.6
    # Accumulated over two halves, the second of which is reduced.
    model.zero_grad()
    with model.no_sync(), session:
        loss = loss_of(model, batch(rank)) / 2
    with model.no_sync():
        loss.backward()
    with session:
        loss = loss_of(model, batch(rank)) / 2
    loss.backward()
    check(model.module, want)


def same_plan(rank: int, world: int, folder: Path) -> None:
    """Ranks that see equal shapes make the same plan; others follow the plan of the first."""
    model = DistributedDataParallel(network())
    session = fp8hooks.compress(memory_savings=0.5)
    for _ in range(2):
        with session:
            loss = loss_of(model, batch(rank))
        loss.backward()
    plans = [None] * world
    dist.all_gather_object(plans, session.plan.to_dict())
    assert plans[0] == plans[1]
    other = fp8hooks.compress(memory_savings=0.5)
    path = folder / "plan.json"
    if rank == 0:
        session.plan.save(path)
    dist.barrier()
    other.plan = fp8hooks.Plan.load(path)
    with other:
        loss_of(model, batch(rank)[: ROWS // (rank + 1)]).backward()
    assert 0.48 <= other.stats.savings <= 0.55


def fsdp1(rank: int, world: int, folder: Path) -> None:
    want = alone(world, loss_inside=False)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model = network()
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=fp8hooks.compress_wrapper,
            check_fn=lambda module: isinstance(module, models.Block),
        )
        model = FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({models.Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        for _ in range(2):
            model.zero_grad()
            loss_of(model, batch(rank)).backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            check(model, want)
        assert len(fp8hooks.sessions(model)) == 3


def fsdp2(rank: int, world: int, folder: Path) -> None:
    want = alone(world, loss_inside=False)
    mesh = init_device_mesh("cpu", (world,))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for settings, tolerance in (
        ({"reshard_after_forward": True}, 1e-5),
        ({"reshard_after_forward": False}, 1e-5),
        ({"mp_policy": half}, 0.1),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, 1e-5),
    ):
        model = network()
        for block in model:
            shard(block, mesh=mesh, **settings)
        shard(model, mesh=mesh, **settings)
        session = fp8hooks.enable(model)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, batch(rank)).backward()
        check(model, want, tolerance)
        assert session.stats.savings > 0.4
        assert session.held_bytes == 0


def sharded_checkpoint(rank: int, world: int, folder: Path) -> None:
    """Saved from a sharded model that is enabled, loaded into one that is not, and the other way round."""
    mesh = init_device_mesh("cpu", (world,))
    trained, fresh = network(), network()
    fp8hooks.enable(trained)
    for model in (trained, fresh):
        for block in model:
            shard(block, mesh=mesh)
        shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    loss_of(trained, batch(rank)).backward()
    optimizer.step()
    for source, target in ((trained, fresh), (fresh, trained)):
        path = folder / f"checkpoint-{source is trained}"
        dcp.save({"model": source.state_dict()}, checkpoint_id=path)
        if source is fresh:
            with torch.no_grad():
                for parameter in target.parameters():
                    parameter.zero_()
        state = {"model": target.state_dict()}
        dcp.load(state, checkpoint_id=path)
        target.load_state_dict(state["model"])
        for (name, a), (other, b) in zip(source.state_dict().items(), target.state_dict().items(), strict=True):
            assert name == other
            assert torch.equal(whole(a), whole(b))


def tensor_parallel(rank: int, world: int, folder: Path) -> None:
    """Each rank has a part of every layer, and all see the same batch."""
    model = network()
    with fp8hooks.compress():
        loss = loss_of(model, batch(0))
    loss.backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    mesh = init_device_mesh("cpu", (world,))
    split = network()
    # Between the two products of a block each rank has a part of the columns, LayerNorm wants them all.
    for block in split:
        parts = nn.Sequential(block.mlp[0], block.mlp[1])
        block.mlp = nn.Sequential(parts[0], parts[1], block.mlp[3])
        parallelize_module(block.mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    single = network()
    for block in single:
        block.mlp = nn.Sequential(block.mlp[0], block.mlp[1], block.mlp[3])
    plain = copy.deepcopy(single)
    loss_of(plain, batch(0)).backward()
    want = {name: parameter.grad for name, parameter in plain.named_parameters()}
    session = fp8hooks.compress()
    for _ in range(2):
        split.zero_grad()
        with session:
            loss = loss_of(split, batch(0))
        loss.backward()
        # Blocks of scales end elsewhere in a part of the columns, so errors are of a size and not the same.
        check(split, want, 0.02)
    assert session.stats.savings > 0.5


def pipeline(rank: int, world: int, folder: Path) -> None:
    """Two stages, several microbatches in flight: each has its own saves, and backward comes much later."""
    microbatches = 4
    x = torch.cat([batch(i) for i in range(microbatches)])
    model = network(4)
    for part in x.chunk(microbatches):
        with fp8hooks.compress():
            loss = loss_of(model, part) / microbatches
        loss.backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return output.float().square().mean()

    for schedule in (ScheduleGPipe, Schedule1F1B):
        whole_model = network(4)
        part = nn.Sequential(*list(whole_model)[2 * rank : 2 * rank + 2])
        session = fp8hooks.enable(part)
        stage = PipelineStage(part, rank, world, torch.device("cpu"))
        run = schedule(stage, microbatches, loss_fn=loss_fn)
        run.step(*(() if rank else (x,)), **({"target": x} if rank == world - 1 else {}))
        own = {
            f"{int(name.split('.')[0]) + 2 * rank}.{name.split('.', 1)[1]}": parameter.grad
            for name, parameter in part.named_parameters()
        }
        for name, grad in own.items():
            # The loss was outside, and its own save exact.
            assert (grad - want[name]).norm() <= 0.01 * want[name].norm(), name
        assert session.held_bytes == 0
        assert session.stats.savings > 0.5


def fsdp2_with_tensor_parallel(rank: int, world: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    plain = network()
    for block in plain:
        block.mlp = nn.Sequential(block.mlp[0], block.mlp[1], block.mlp[3])
    split = copy.deepcopy(plain)
    for i in range(world // 2):
        (loss_of(plain, batch(i)) / (world // 2)).backward()
    want = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for block in split:
        parallelize_module(block.mlp, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fp8hooks.compress_wrapper(block)
        shard(block, mesh=mesh["data"])
    shard(split, mesh=mesh["data"])
    for _ in range(2):
        split.zero_grad()
        loss_of(split, batch(mesh.get_local_rank("data"))).backward()
    check(split, want, 0.02)


WORKERS = {
    worker.__name__: (worker, 2)
    for worker in (ddp, same_plan, fsdp1, fsdp2, sharded_checkpoint, tensor_parallel, pipeline)
}
WORKERS["fsdp2_with_tensor_parallel"] = (fsdp2_with_tensor_parallel, 4)


def run(name: str, folder: Path) -> None:
    """All processes of a worker; raises what the first of them raised."""
    worker, world = WORKERS[name]
    torch.multiprocessing.spawn(functools.partial(start), args=(worker, world, str(folder)), nprocs=world)
