"""What holds on a GPU alone: CUDA graphs, no waiting for the GPU, no copies on the way, tensors past 2**31 elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fp8hooks
from fp8hooks import codecs
from fp8hooks.identity import core_of, geometry
from fp8hooks.saved import Packed
from tests import models

pytestmark = pytest.mark.gpu


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(models.mlp(256), nn.ReLU(), models.mlp(256)).cuda().bfloat16()


def eager_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return models.step(model, x, fp8hooks.compress())[1]


def test_a_whole_step_can_be_captured() -> None:
    model, session = network(), fp8hooks.compress()
    static = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        with session:
            loss = model(static).float().square().mean()
        loss.backward()

    graph = models.captured(model, step)
    for _ in range(2):
        x = torch.randn_like(static)
        static.copy_(x)
        graph.replay()
        got = [p.grad.clone() for p in model.parameters()]
        fresh = network()
        want = eager_gradients(fresh, x)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert session.stats.savings > 0.3


def test_graphed_callables_hold_payloads() -> None:
    model = network()
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    session = fp8hooks.compress()
    with session:
        graphed = torch.cuda.make_graphed_callables(model, (x.clone().requires_grad_(),))
    assert session.stats.savings > 0.3
    fresh = torch.randn_like(x)
    graphed(fresh.clone().requires_grad_()).float().square().mean().backward()
    got = [p.grad.clone() for p in model.parameters()]
    want = eager_gradients(network(), fresh.clone().requires_grad_())
    assert models.relative_error(got, want) < 1e-2


def test_nothing_waits_for_the_gpu() -> None:
    model, x = network(), torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    mask = torch.rand(512, 256, device="cuda") > 0.5
    session = fp8hooks.compress(stochastic_rounding=True)
    for mode in ("default", "error"):  # the first compiles kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with session:
                h = model(x).where(mask, 0).softmax(-1).log_softmax(-1)
                loss = torch.nn.functional.max_pool1d(h, 2).float().square().mean()
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert session.stats.savings > 0.3


@pytest.mark.parametrize("name", ["square8", "int10", "fp8_e4m3"])
def test_strided_tensors_are_read_and_written_in_place(name: str) -> None:
    fused = torch.randn(4096, 3 * 1024, device="cuda", dtype=torch.bfloat16)
    part = fused.chunk(3, -1)[1]
    codec = codecs.get(name, 128)
    shape = geometry(part.shape, part.stride())
    core = part.as_strided(*zip(*shape.core, strict=True))
    codec.encode(core)  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    payload = codec.encode(core)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * payload.nbytes + 4096
    back = Packed(payload, shape, shares=False).unpack()
    assert back.stride() == part.stride()
    assert (back.float() - part.float()).norm() < 0.03 * part.float().norm()


@pytest.mark.parametrize("name", ["square8", "int10"])
def test_more_elements_than_32_bits_count(name: str) -> None:
    numel = 2**31 + 1000
    tensor = torch.zeros(numel, device="cuda", dtype=torch.bfloat16)
    tail = torch.randn(5000, device="cuda").bfloat16()
    tensor[-5000:] = tail
    tensor[:5000] = tail
    decoded = codecs.get(name, 128).encode(tensor).decode()
    for part in (decoded[-5000:], decoded[:5000]):
        assert (part.float() - tail.float()).norm() < 0.02 * tail.float().norm()
    assert not decoded[5000:-5000].any()


def test_kernels_run_on_the_stream_that_is_current() -> None:
    x = torch.randn(1 << 20, device="cuda")
    codec = codecs.get("square8", 128)
    want = codec.encode(x).buffer.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        y = x * 1
        got = codec.encode(y).buffer
    stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", codecs.LOSSY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["dense", "chunk", "transposed", "odd"])
def test_repeated_launches_give_the_same_bytes(name: str, dtype: torch.dtype, layout: str) -> None:
    codec = codecs.get(name, 128)

    def tensor() -> Tensor:
        fused = torch.randn(4, 24, 3 * 256, device="cuda", dtype=dtype)
        if layout == "chunk":
            return fused.chunk(3, -1)[1]
        if layout == "transposed":
            return fused.unflatten(-1, (3, 2, 128))[:, :, 0].transpose(1, 2)
        return fused if layout == "dense" else torch.randn(4, 77, device="cuda", dtype=dtype).t()

    first = tensor()
    shape = geometry(first.shape, first.stride())
    assert shape is not None
    coder = codec.encode(core_of(first, shape)).coder
    assert coder is not None
    for turn in range(3):
        x = tensor()
        payload = coder.encode(x.data_ptr())
        assert payload is not None
        want = codec.encode_reference(core_of(x, shape).reshape(-1))
        assert torch.equal(payload.buffer, want.buffer)
        back = Packed(payload, shape, shares=False).unpack()  # the first time by the long way
        assert back.stride() == x.stride()
        assert back.equal(Packed(want, shape, shares=False).unpack()), turn
    # Memory that is not aligned is read otherwise.
    assert coder.encode(first.data_ptr() + dtype.itemsize) is None


def test_from_step_to_step_gradients_stay_the_same() -> None:
    model, session = network(), fp8hooks.compress()
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    steps = [models.step(model, x, session)[1] for _ in range(4)]
    assert all(torch.equal(a, b) for step in steps[1:] for a, b in zip(steps[0], step, strict=True))


def captured(step: Callable[[], None], warm_up: int = 3) -> torch.cuda.CUDAGraph:
    """A graph of one step, after some that run as usual."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_in_a_graph_memory_is_not_used_again_too_early() -> None:
    """The allocator gives the same blocks again and again, while the second stream still reads and writes them."""
    session, weight = fp8hooks.compress(), torch.randn(1024, 1024, device="cuda", requires_grad=True)
    start = torch.randn(8192, 1024, device="cuda")

    def step() -> None:
        weight.grad = None
        with session:
            y = start * 1
            for _ in range(6):
                y = torch.tanh(y @ weight * 0.05)
            loss = y.square().mean()
        del y
        loss.backward()

    step()
    assert weight.grad is not None
    want = weight.grad.clone()
    graph = captured(step)
    for _ in range(20):
        weight.grad.zero_()
        graph.replay()
        assert torch.equal(weight.grad, want)


def test_an_edit_while_a_graph_encodes_is_an_error() -> None:
    session = fp8hooks.compress()
    x = torch.randn(4096, 1024, device="cuda", requires_grad=True)

    def step(edit: bool = False) -> None:
        with session:
            y = x * 2
            z = torch.sin(y)
            if edit:
                with torch.no_grad():
                    y.zero_()
        z.sum().backward()

    step()
    step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*op 'sin'"):
        captured(lambda: step(torch.cuda.is_current_stream_capturing()), warm_up=1)
    torch.cuda.synchronize()
    step()


def test_a_captured_backward_may_go_another_way() -> None:
    """What was decoded in vain is given back, and the graph still ends well."""
    session = fp8hooks.compress()
    leaf = torch.randn(1024, 1024, device="cuda", requires_grad=True)

    def step() -> None:
        leaf.grad = None
        with session:
            ys = [torch.sin(leaf * (1 + i)).sum() for i in range(8)]
        order = ys[::2] if torch.cuda.is_current_stream_capturing() else ys
        torch.stack(order).sum().backward()

    graph = captured(step)
    graph.replay()
    assert leaf.grad is not None
    want = sum((1 + i) * torch.cos(leaf.detach() * (1 + i)) for i in range(0, 8, 2))
    assert float((leaf.grad - want).norm() / want.norm()) < 0.1
    assert session.held_bytes == 0
