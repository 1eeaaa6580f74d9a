"""The same memory is stored once; other memory never is taken for it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import fp8hooks
from fp8hooks import CompressConfig, codecs
from fp8hooks.identity import core_of, geometry, view_as
from tests import models

BLOCK = 128


def packed_bytes(numel: int) -> int:
    return codecs.get(CompressConfig().format, BLOCK).nbytes(numel)


def active(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True) * 1


def stored(fn) -> int:
    session = fp8hooks.compress()
    with session:
        keep = fn()
    assert keep is not None
    return session.stats.by_codec["square8"].stored_bytes


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.view(-1, 64),
        lambda x: x.view(-1),
        lambda x: x.transpose(0, 1),
        lambda x: x.mT,
        lambda x: x.unsqueeze(0),
        lambda x: x.permute(2, 0, 1),
        lambda x: x.view(4, 2, 16, 64),
    ],
)
def test_views_of_the_same_memory_share_a_payload(view) -> None:
    x = active(8, 16, 64)
    session = fp8hooks.compress()
    with session:
        keep = [x.square(), view(x).square(), view(x).exp() * 0 + view(x).pow(3)]
    assert len(keep) == 3
    squares, cubes = session.stats.by_op["square"], session.stats.by_op["pow"]
    assert (squares.tensors, squares.stored_bytes) == (2, packed_bytes(x.numel()))
    assert (cubes.tensors, cubes.stored_bytes) == (1, 0)


@pytest.mark.parametrize("make", [lambda x: x.t(), lambda x: x.view(32, 128), lambda x: x[:32], lambda x: x[:, :32]])
def test_each_view_comes_back_as_itself(make) -> None:
    """Square matrices and their transposes have equal sizes: only strides tell them apart."""
    x = torch.randn(64, 64, requires_grad=True)
    with fp8hooks.compress(min_numel=0):
        h = x * 1
        a, b = h.square(), make(h).pow(3)
        loss = a.sum() + b.sum()
    loss.backward()
    h = x.detach().clone().requires_grad_()
    (h.square().sum() + make(h).pow(3).sum()).backward()
    assert (x.grad - h.grad).norm() / h.grad.norm() < 0.06


def test_chunks_are_stored_without_their_base() -> None:
    qkv = active(8, 16, 3 * 64)
    q, k, v = qkv.chunk(3, dim=-1)
    numel = 8 * 16 * 64
    assert stored(lambda: [q.square(), k.square()]) == 2 * packed_bytes(numel)
    assert stored(lambda: [q.square(), q.exp() * 0 + q.pow(2)]) >= packed_bytes(numel)
    session = fp8hooks.compress()
    with session:
        keep = [v.square(), v.view(8, 16, 4, 16).square(), v.unsqueeze(0).square()]
    assert len(keep) == 3
    assert session.stats.stored_bytes == packed_bytes(numel)
    # Autograd would have held the whole fused buffer.
    assert session.stats.original_bytes == qkv.numel() * 4


def test_memory_that_is_exact_already_is_not_stored_again() -> None:
    x = active(64, 64)
    session = fp8hooks.compress(rules=[fp8hooks.Rule("exact", op="square")])
    with session:
        keep = [x.square(), x.pow(3), x.sin()]
    assert len(keep) == 3
    assert session.stats.stored_bytes == x.numel() * 4


def test_no_stale_hit_after_memory_was_freed_and_used_again() -> None:
    """Tensors of one size, each freed before the next is made, get the same address from the allocator."""
    x = torch.randn(64, 64, requires_grad=True)
    pointers = set()
    total = torch.zeros(())
    with fp8hooks.compress() as session:
        for factor in range(1, 9):
            h = x * factor
            pointers.add(h.data_ptr())
            total = total + h.square().sum()
            del h
            gc.collect()
    if len(pointers) == 8:
        pytest.skip("the allocator never gave an address twice")
    assert session.stats.by_op["square"].stored_bytes == 8 * packed_bytes(64 * 64)
    total.backward()
    want = 2 * x.detach() * sum(factor**2 for factor in range(1, 9))
    assert (x.grad - want).norm() < 0.02 * want.norm()


def test_the_table_is_empty_outside_a_session() -> None:
    session = fp8hooks.compress()
    with session:
        context = session._stack[-1]
        loss = models.mlp()(torch.randn(32, 64)).sum()
        assert context.packer._payloads
        assert len(context.packer._storages)
    assert not context.packer._payloads
    assert not len(context.packer._storages)
    assert not session._stack
    loss.backward()


def test_expanded_tensors_are_stored_compactly() -> None:
    x = active(64, 1, 64)
    session = fp8hooks.compress()
    with session:
        keep = x.expand(64, 100, 64).square()
    assert keep.shape == (64, 100, 64)
    assert session.stats.by_op["square"].stored_bytes == packed_bytes(64 * 64)


def test_buffers_are_left_to_their_module() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cos", torch.randn(64, 64))

        def forward(self, x):
            return x * self.cos

    session = fp8hooks.compress()
    with session:
        keep = Rotary()(active(64, 64))
    assert keep is not None
    assert "mul" not in session.stats.by_op  # its other operand, x, needs no saving: cos requires no grad
    assert session.stats.weight_bytes == 64 * 64 * 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5, 7),
        torch.randn(3, 5, 7).permute(2, 0, 1),
        torch.randn(4, 30)[:, 3:17],
        torch.randn(4, 30)[::2, ::3],
        torch.randn(4, 1, 6).expand(4, 9, 6),
        torch.randn(()).expand(2, 3),
        torch.randn(5, 4, 3, 2).to(memory_format=torch.channels_last)[:, 1:3],
        torch.randn(1, 1, 5).as_strided((1, 1, 5), (17, 99, 1)),
    ],
)
def test_geometry_goes_there_and_back(tensor) -> None:
    shape = geometry(tensor.shape, tensor.stride())
    core = core_of(tensor, shape)
    assert core.numel() == shape.numel
    assert core.is_contiguous() == shape.dense
    memory = torch.empty_strided(*shape.memory, dtype=tensor.dtype)
    back, target = view_as(memory, shape), core_of(memory, shape)
    target.copy_(core.reshape(target.shape))
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()


def test_overlapping_and_empty_tensors_have_no_geometry() -> None:
    overlapping = torch.randn(32).unfold(0, 8, 2)
    assert geometry(overlapping.shape, overlapping.stride()) is None
    assert geometry((0, 3), (3, 1)) is None


def test_a_finer_format_serves_where_a_coarser_one_is_asked_for() -> None:
    """tanh's result is INT10, and the input of batch_norm INT8: both together are more than bfloat16."""
    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    session = fp8hooks.compress()
    with session:
        y = torch.nn.functional.batch_norm(torch.tanh(x), None, None, training=True)
    assert y is not None
    assert session.stats.stored_bytes < 1.4 * x.numel()
