"""Compiled models: the codec is inside the graphs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8hooks
from fp8hooks import compiled
from tests import models

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    # Graphs from the cache on disk, that is from the tests' last run, are not traced and so not in `session.compiled`.
    with torch._functorch.config.patch(enable_autograd_cache=False):
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_methods_of_tensors_that_are_written_in_python(backend: str) -> None:
    """Dynamo knows them, but not under a mode; ours is hidden from it, a user's is not."""
    weight = (0.1 * torch.randn(64, 64)).requires_grad_()

    def f(x: Tensor) -> Tensor:
        a, b = (x @ weight).unflatten(-1, (2, 32)).flatten(1).split(32, -1)
        return (a.sin() * b.cos()).norm(dim=-1)

    fast = torch.compile(f, backend=backend, fullgraph=True)
    x = torch.randn(128, 64)
    session = fp8hooks.compress()
    for _ in range(2):
        with session:
            y = fast(x)
        torch.testing.assert_close(y, f(x))
        (got,) = torch.autograd.grad(y.sum(), weight)
    (want,) = torch.autograd.grad(f(x).sum(), weight)
    assert 0 < models.relative_error([got], [want]) < 0.02
    assert session.compiled


def test_modes_of_users_are_traced_as_ever() -> None:
    class Twice(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.sin else result

    fast = torch.compile(lambda x: torch.sin(x), backend="aot_eager", fullgraph=True)
    x = torch.randn(2048, requires_grad=True)
    with Twice():
        want = fast(x)
    for outer, inner in ((Twice(), fp8hooks.compress()), (fp8hooks.compress(), Twice())):
        with outer, inner:
            got = fast(x)
        assert torch.equal(got, want)
    assert not torch.equal(want, x.sin())


def test_hooks_called_between_graphs_are_not_compiled() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        return y.sin()

    counter = torch._dynamo.testing.CompileCounter()
    x = (0.1 * torch.randn(64, 64)).requires_grad_()
    fast = torch.compile(f, backend=counter)
    with fp8hooks.compress() as session:
        fast(x).sum().backward()
    assert counter.frame_count == 2
    assert session.stats.by_op["sin"].tensors == 1
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (x.exp() * x.exp().cos()).detach(), rtol=0.05, atol=0.01)


def test_graphs_that_change_the_stack_of_modes_leave_ours_on_it() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.device("cpu"):
            y = x * torch.ones(64)
        torch._dynamo.graph_break()
        return y.sin()

    session = fp8hooks.compress()
    x = torch.randn(64, 64, requires_grad=True)
    for _ in range(2):
        with session:
            y = torch.compile(f, backend="aot_eager")(x)
            z = y.exp()
        assert session.stats.by_op["exp"].tensors == 1
    torch.testing.assert_close(z, (x * 1).sin().exp())


def test_blocks_alone_with_eager_around_them() -> None:
    """Layers compiled one by one, the rest eager: one session serves both."""
    torch.manual_seed(0)
    model = nn.Sequential(models.mlp(64), nn.Linear(64, 64), nn.GELU(), models.mlp(64))
    x = torch.randn(256, 64)
    want = models.step(model, x)[1]
    for i in (0, 3):
        model[i] = torch.compile(model[i], backend="aot_eager", fullgraph=True)
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


def eager_between_graphs(x: Tensor) -> Tensor:
    for _ in range(2):  # a break in a loop: Dynamo leaves the whole function to Python, and looks on
        x = x.exp()
        torch._dynamo.graph_break()
        x = x.sin()
    return x


def test_operations_that_dynamo_looks_on_to_are_ours() -> None:
    counter = torch._dynamo.testing.CompileCounter()
    x = (0.1 * torch.randn(64, 64)).requires_grad_()
    session = fp8hooks.compress()
    with session:
        torch.compile(eager_between_graphs, backend=counter)(x).sum().backward()
    assert counter.frame_count == 0
    assert session.stats.savings > 0.7


def test_a_session_entered_in_a_compiled_function_breaks_its_graph() -> None:
    session = fp8hooks.compress()

    def f(x: Tensor) -> Tensor:
        with session:
            y = (x.exp() * 2).sin()
        return y.sum()

    x = (0.1 * torch.randn(64, 64)).requires_grad_()
    (want,) = torch.autograd.grad((x.exp() * 2).sin().sum(), x)
    for _ in range(2):
        (got,) = torch.autograd.grad(torch.compile(f, backend="aot_eager")(x), x)
        assert 0 < models.relative_error([got], [want]) < 0.05
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"context manager|disable"):
        torch.compile(f, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_memory_budget_beside_us(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(models.mlp(64) for _ in range(2)))
    x = torch.randn(256, 64)
    want = models.step(model, x)[1]
    held = {}
    for budget in (1.0, 0.3):
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            fast = torch.compile(model, backend=backend, fullgraph=True)
            for session in (None, fp8hooks.compress()):
                assert models.relative_error(models.step(fast, x, session)[1], want) < 0.02
                with session or contextlib.nullcontext():
                    held[budget, session is not None] = held_by_graph(fast(x).square().mean())
    assert held[0.3, True] < 0.5 * held[0.3, False]
    assert held[0.3, True] < held[1.0, True] < held[1.0, False]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outside", [True, False])
def test_checkpoint(backend: str, outside: bool) -> None:
    """Around a compiled block, and inside a compiled model, where the compiler recomputes."""
    torch.manual_seed(0)
    x = torch.randn(256, 64, requires_grad=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = models.mlp(64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    model = Model()
    want = models.step(model, x)[1]
    if outside:
        model.block = torch.compile(model.block, backend=backend, fullgraph=True)
    fast = model if outside else torch.compile(model, backend=backend, fullgraph=True)
    session = fp8hooks.compress()
    got = models.step(fast, x, session)[1]
    assert models.relative_error(got, want) < 0.02
    # The block's inner tensors are not saved; what reaches across it is, in 8 bits.
    assert session.stats.savings > 0.5 if outside else {e.codec for e in session.compiled} & {"square8"}


def test_compiled_autograd() -> None:
    torch.manual_seed(0)
    model = models.Block(64)
    x = torch.randn(256, 64)
    want = models.step(model, x)[1]
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for compiled_model in (fast, model):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            for _ in range(2):
                got = models.step(compiled_model, x, fp8hooks.compress())[1]
                assert 0 < models.relative_error(got, want) < 0.02


def test_a_graph_without_the_hooks_is_exact_and_in_the_report() -> None:
    """As what torch makes of it where hooks can't be inlined: a Function that saves at the boundary."""

    class CompiledFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            return y * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    x = torch.randn(64, 64, requires_grad=True)
    session = fp8hooks.compress()
    with session:
        y = CompiledFunction.apply(x)
    (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got, x.exp())
    assert "could not take the hooks in: 16.0 KiB" in str(session.report())


def run_in_a_process(script: str, cache: Path) -> dict[str, int]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_a_second_process_finds_the_graphs_in_the_cache(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import json, torch, fp8hooks
        from torch._dynamo.utils import counters
        from tests import models
        torch.manual_seed(0)
        model, x = models.mlp(64), torch.randn(256, 64)
        fast = torch.compile(model, fullgraph=True)
        session = fp8hooks.compress()
        gradients = models.step(fast, x, session)[1]
        found = {key: value for key, value in counters["aot_autograd"].items() if "cache" in key}
        found["noted"] = "from torch.compile's cache: 1" in str(session.report())
        print(json.dumps({**found, "sum": float(sum(g.double().abs().sum() for g in gradients))}))
        """
    )
    first, second = (run_in_a_process(script, tmp_path) for _ in range(2))
    assert first.get("autograd_cache_miss") == 1
    assert second.get("autograd_cache_hit") == 1
    assert not second.get("autograd_cache_miss")
    assert not second.get("autograd_cache_bypass")
    assert first["sum"] == second["sum"]
    assert (first["noted"], second["noted"]) == (False, True)


def test_sharded_parameters(tmp_path: Path) -> None:
    """FSDP2 with each block compiled: parameters that are gathered for it are nothing to compress."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("torch is built without torch.distributed")
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        mesh = distributed.init_device_mesh("cpu", (1,))
        model = nn.Sequential(*(models.Block(64) for _ in range(2)))
        for block in model:
            block.compile(backend="aot_eager")
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        x = torch.randn(256, 64)
        want = [gradient.full_tensor() for gradient in models.step(model, x)[1]]
        session = fp8hooks.compress()
        for _ in range(3):
            got = [gradient.full_tensor() for gradient in models.step(model, x, session)[1]]
        assert 0 < models.relative_error(got, want) < 0.02
        assert not any(entry.site.role == "weight" for entry in session.compiled)
        assert any(entry.codec == "square8" for entry in session.compiled)
    finally:
        distributed.destroy_process_group()
