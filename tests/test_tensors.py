"""Everything that is not a plain dense tensor passes exactly, or is handled inside."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8hooks
from tests.test_session import nothing, saved_as


def dense(tensor: Tensor) -> Tensor:
    return (
        tensor.dequantize()
        if tensor.is_quantized
        else tensor.to_dense()
        if tensor.layout is not torch.strided
        else tensor
    )


def _quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.randn(64, 64), 0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(64, 64).to_sparse(),
        lambda: torch.randn(64, 64).relu().to_sparse_csr(),
        lambda: torch.randn(64, 64, dtype=torch.complex64),
        lambda: torch.randn(64, 64, dtype=torch.complex64).conj(),
        lambda: torch.randn(64, 64, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(0, 5),
        lambda: torch.tensor(3.0),
        lambda: torch.randn(64, 64, dtype=torch.float64),
        _quantized,
    ],
    ids=["sparse", "csr", "complex", "conjugate", "negative view", "empty", "scalar", "float64", "quantized"],
)
def test_it_comes_back_as_it_was(make) -> None:
    tensor = make()
    (back,) = saved_as(nothing, tensor)
    assert type(back) is type(tensor)
    assert back.layout == tensor.layout
    assert back.dtype == tensor.dtype
    assert torch.equal(dense(back), dense(tensor)) or tensor.dim() == 0


def test_nested_tensors() -> None:
    parts = [torch.randn(n, 64, requires_grad=True) for n in (3, 40, 17)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    with fp8hooks.compress():
        loss = (nested * 1).sin().values().sum()
    loss.backward()
    for part in parts:
        torch.testing.assert_close(part.grad, part.detach().cos())


def test_inference_tensors() -> None:
    with torch.inference_mode():
        inference = torch.randn(64, 64)
    x = torch.randn(64, 64, requires_grad=True)
    with fp8hooks.compress() as session, torch.inference_mode():
        x * inference
    assert session.stats.tensors == 0
    (back,) = saved_as(nothing, torch.randn(64, 64), inference.clone())[1:]
    assert torch.isfinite(back).all()


class Tagged(Tensor):
    """A user's subclass, with a tag that operations keep."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_user_subclasses_pass_exactly() -> None:
    x = torch.randn(64, 64).as_subclass(Tagged).requires_grad_()
    with fp8hooks.compress():
        y = (x * 1).sin()
    y.sum().backward()
    torch.testing.assert_close(x.grad.as_subclass(Tensor), x.detach().as_subclass(Tensor).cos())


def test_meta_and_fake_tensors() -> None:
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode, fp8hooks.compress() as session:
            x = torch.randn(64, 64, requires_grad=True)
            loss = (x * 1).sin().sum()
            loss.backward()
        assert x.grad.shape == (64, 64)
        assert session.stats.stored_bytes == 0


def test_quantization_aware_fake_quantize() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with fp8hooks.compress():
        y = torch.fake_quantize_per_tensor_affine(x * 1, 0.05, 0, -128, 127)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.fixture
def mesh(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensors_are_compressed_inside(mesh) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    full = torch.randn(64, 64)
    weight = torch.nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]))
    x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    session = fp8hooks.compress()
    with session:
        loss = torch.nn.functional.linear((x * 1).sin(), weight).sum()
    codecs = session.stats.by_codec
    assert codecs["square8"].stored_bytes == 2 * (64 * 64 + 64)
    loss.backward()
    assert isinstance(x.grad, DTensor)
    want = full.cos() * weight.full_tensor().detach().sum(0)
    got = x.grad.full_tensor()
    assert (got - want).norm() / want.norm() < 0.05
    assert session.held_bytes == 0
