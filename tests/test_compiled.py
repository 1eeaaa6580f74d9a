"""Compiled models: the codec is inside the graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import fp8hooks
from fp8hooks import compiled
from tests import models

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def held_by_graph(loss: Tensor) -> int:
    """Bytes of what the compiled functions behind a loss hold, parameters excepted."""
    seen, found, waiting = set(), {}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [edge for edge, _ in node.next_functions]
        if "CompiledFunction" in node.name():
            for tensor in node.saved_tensors:
                base = tensor if tensor._base is None else tensor._base
                if not isinstance(base, nn.Parameter):
                    found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_hold_eight_bits_an_element(backend: str) -> None:
    torch.manual_seed(0)
    model = models.mlp(256)
    x = torch.randn(512, 256)
    fast = torch.compile(model, backend=backend, fullgraph=True)
    want_loss, want = models.step(fast, x)
    plain = held_by_graph(fast(x).square().mean())
    session = fp8hooks.compress()
    got_loss, got = models.step(fast, x, session)
    with session:
        loss = fast(x).square().mean()
    assert torch.equal(got_loss, want_loss)
    assert 0 < held_by_graph(loss) < 0.4 * plain
    assert models.relative_error(got, want) < 0.02


def test_what_is_decoded_is_what_eager_decodes() -> None:
    """One square8, in both: the same numbers come back."""
    x = torch.randn(64, 256)
    weight = torch.randn(256, 256, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return (x * 2) @ weight

    grads = []
    for function in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        with fp8hooks.compress():
            y = function(x.requires_grad_(False))
        grads += torch.autograd.grad(y.sum(), weight)
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_by_role(backend: str) -> None:
    torch.manual_seed(0)
    model = models.encoder(64)
    x = torch.randn(8, 64, 64)
    fast = torch.compile(model, backend=backend)
    _, want = models.step(fast, x)
    session = fp8hooks.compress()
    _, got = models.step(fast, x, session)
    assert models.relative_error(got, want) < 0.03
    codecs = {entry.site.role: entry.codec for entry in session.compiled}
    assert codecs["attention_qk"] == "int10"
    assert codecs["attention_vo"] == "int8"
    assert all(entry.codec == "exact" for entry in session.compiled if entry.site.role in ("statistic", "log_prob"))
    assert not any(entry.site.role == "weight" for entry in session.compiled)


def test_nothing_is_compiled_again_from_step_to_step_or_session_to_session() -> None:
    model = models.mlp(64)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast = torch.compile(model, backend=counter, fullgraph=True)
    session = fp8hooks.compress()
    for _ in range(10):
        models.step(fast, torch.randn(64, 64), session)
    for seed in range(3):
        models.step(fast, torch.randn(64, 64), fp8hooks.compress(seed=seed))
    assert counter.frame_count == 1


def test_outside_a_session_the_graph_is_another() -> None:
    model = models.mlp(64)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(128, 64)
    exact = models.step(fast, x)[1]
    compressed = models.step(fast, x, fp8hooks.compress())[1]
    again = models.step(fast, x)[1]
    assert all(torch.equal(a, b) for a, b in zip(exact, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(exact, compressed, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_shapes(backend: str) -> None:
    model = models.mlp(64)
    counts = []
    for session in (None, fp8hooks.compress()):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        fast = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
        for rows in (80, 96, 33, 200):
            x = torch.randn(rows, 64)
            got, want = models.step(fast, x, session), models.step(model, x)
            torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
            assert models.relative_error(got[1], want[1]) < 0.03
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]
    assert any(entry.codec == "square8" for entry in session.compiled)


def test_blocks_alone_with_eager_around_them() -> None:
    """Layers compiled one by one, the rest eager: one session serves both."""
    torch.manual_seed(0)
    model = nn.Sequential(models.mlp(64), nn.Linear(64, 64), nn.GELU(), models.mlp(64))
    x = torch.randn(256, 64)
    want = models.step(model, x)[1]
    model[0].compile(backend="aot_eager", fullgraph=True)
    model[3].compile(backend="aot_eager", fullgraph=True)
    session = fp8hooks.compress()
    got = models.step(model, x, session)[1]
    assert models.relative_error(got, want) < 0.02
    assert {"linear", "gelu"} <= set(session.stats.by_op)
    assert {entry.graph for entry in session.compiled} == {0, 1} or len({e.graph for e in session.compiled}) >= 2


def test_masks_are_bits() -> None:
    x = torch.randn(64, 256, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return torch.where(x.sin() > 0, x * 3, x * 2)

    fast = torch.compile(f, backend="aot_eager", fullgraph=True)
    session = fp8hooks.compress()
    with session:
        y = fast(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.where(x.sin() > 0, 3.0, 2.0))
    masks = [entry for entry in session.compiled if entry.site.role == "mask"]
    assert all(entry.codec == "bits" and entry.stored_bytes * 8 == entry.original_bytes for entry in masks)


def test_infinities_and_nan_come_through() -> None:
    x = torch.randn(4, 128, requires_grad=True)
    scale = torch.randn(4, 128, requires_grad=True)
    with torch.no_grad():
        x[0, 0], x[1, 1], x[2, 2] = torch.inf, -torch.inf, torch.nan

    def f(x: Tensor, scale: Tensor) -> Tensor:
        return (x * 2) * scale

    with fp8hooks.compress(min_numel=0):
        y = torch.compile(f, backend="aot_eager", fullgraph=True)(x, scale)
    (grad,) = torch.autograd.grad(y.sum(), scale)
    assert torch.equal(grad.isinf(), x.isinf())
    assert torch.equal(grad.isnan(), x.isnan())


def test_rules_hold_in_graphs() -> None:
    model = models.mlp(64)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    session = fp8hooks.compress(rules=[fp8hooks.Rule("exact")])
    x = torch.randn(128, 64)
    want = models.step(fast, x)[1]
    got = models.step(fast, x, session)[1]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e3m4", "cubic8"])
def test_other_formats_run_as_operators(name: str) -> None:
    torch.manual_seed(0)
    model = models.mlp(128)
    fast = torch.compile(model, backend="inductor", fullgraph=True)
    x = torch.randn(256, 128)
    want = models.step(fast, x)[1]
    session = fp8hooks.compress(format=name)
    got = models.step(fast, x, session)[1]
    assert 0 < models.relative_error(got, want) < 0.08
    assert name in {entry.codec for entry in session.compiled}


def test_the_report_shows_what_graphs_hold() -> None:
    model = models.mlp(64)
    session = fp8hooks.compress()
    models.step(torch.compile(model, backend="aot_eager"), torch.randn(128, 64), session)
    text = str(session.report(by_module=True))
    assert "compiled graphs" in text
    assert any(entry.node in text for entry in session.compiled)


def test_caches_know_the_hooks() -> None:
    """Nodes are marked as cacheable, by a name that is the same in every process."""
    pair = compiled.hooks(fp8hooks.CompressConfig())
    again = compiled.hooks(fp8hooks.CompressConfig(seed=3))
    assert pair is again
    assert compiled.hooks(fp8hooks.CompressConfig(format="int8")) is not pair
    for hook in (pair.pack, pair.unpack):
        (node,) = hook.graph.find_nodes(op="call_function", target=hook.graph.output_node().args[0].target)
        assert node.meta["is_wrapped"]
        assert pair.key in node.meta["user_cache_hash"]
