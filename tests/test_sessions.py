"""Sessions among themselves, among threads, among other hooks, and with checkpoint."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fp8hooks
from tests import models

X = torch.randn(4, 32, 64)


def top_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@pytest.fixture(autouse=True)
def _nothing_left_installed():
    yield
    assert not top_hooks()
    assert not torch.overrides._get_current_function_mode_stack()


def test_nested_sessions_the_inner_wins_and_the_report_says_so() -> None:
    outer, inner = fp8hooks.compress(), fp8hooks.compress(format="int8")
    x = torch.randn(64, 64, requires_grad=True) * 1
    with outer:
        keep = [x.sin()]
        with inner:
            keep.append(x.cos())
        keep.append(x.exp())
    assert len(keep) == 3
    assert set(outer.stats.by_op) == {"sin", "exp"}
    assert set(inner.stats.by_op) == {"cos"}
    assert "under other hooks" in str(outer.report())
    assert "another session of fp8hooks" in str(outer.report())
    assert "under other hooks" not in str(inner.report())


def test_a_session_inside_itself() -> None:
    session = fp8hooks.compress()
    model = models.mlp()
    with session:
        a = model(X).sum()
        with session:
            b = model(X).sum()
    (a + b).backward()
    assert session.stats.by_op["linear"].tensors == 4


def test_one_session_in_many_threads_at_once() -> None:
    session = fp8hooks.compress()
    batches = [torch.randn(32, 64) for _ in range(4)]
    model = models.mlp()
    want = [models.step(model, x, fp8hooks.compress())[1] for x in batches]
    got: dict[int, list[torch.Tensor]] = {}
    failures = []
    barrier = threading.Barrier(4)

    def work(i: int) -> None:
        try:
            barrier.wait()
            for _ in range(20):
                with session:
                    loss = model(batches[i]).float().square().mean()
                got[i] = list(torch.autograd.grad(loss, list(model.parameters())))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for i in range(4):
        assert all(torch.equal(a, b) for a, b in zip(got[i], want[i], strict=True))
    got.clear()
    assert session.held_bytes == 0


def test_hooks_are_of_one_thread() -> None:
    seen = []
    with fp8hooks.compress():
        thread = threading.Thread(target=lambda: seen.append(top_hooks()))
        thread.start()
        thread.join()
    assert not seen[0]


def test_other_hooks_inside_are_reported_once_by_name() -> None:
    session = fp8hooks.compress()
    x = torch.randn(64, 64, requires_grad=True) * 1
    for _ in range(2):
        with session, torch.autograd.graph.save_on_cpu():
            keep = [x.sin(), x.cos(), x.exp()]
        assert len(keep) == 3
    text = " ".join(str(session.report()).split())
    assert text.count("under other hooks") == 1
    assert "torch.autograd.graph.save_on_cpu" in text
    with session:
        keep.append(x.sin())
    assert "under other hooks" not in str(session.report())


def test_a_session_inside_other_hooks_wins() -> None:
    session = fp8hooks.compress()
    x = torch.randn(64, 64, requires_grad=True) * 1
    with torch.autograd.graph.save_on_cpu(), session:
        x.sin()
    assert session.stats.tensors == 1


def test_exceptions_of_user_code_pass_through() -> None:
    for error in (KeyError("user"), KeyboardInterrupt(), StopIteration()):
        with pytest.raises(type(error)) as caught, fp8hooks.compress():
            raise error
        assert caught.value is error


def test_a_session_survives_an_exception() -> None:
    session = fp8hooks.compress()
    model = models.mlp().append(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="shapes"), session:
        model(X)
    _, grads = models.step(models.mlp(), X, session)
    assert grads
    assert session.stats.savings > 0.5


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_functional_transforms_over_a_session_are_a_clear_error(transform) -> None:
    def loss(x):
        with fp8hooks.compress():
            return x.sin().sum()

    with pytest.raises(RuntimeError, match=r"fp8hooks\.compress\(\) can't be entered here"):
        transform(loss)(torch.randn(64, 64))
    with pytest.raises(RuntimeError, match="hooks"), fp8hooks.compress():
        transform(lambda x: x.sin().sum())(torch.randn(64, 64))


def policy(ctx, op, *args, **kwargs):
    save = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, policy)},
    "no early stop": {"use_reentrant": False, "early_stop": False},
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("inside", [True, False])
def test_checkpoint_inside_and_outside_a_session(kind, inside) -> None:
    model = nn.ModuleList([models.mlp() for _ in range(3)])

    class Inside(nn.Module):
        def forward(self, x):
            for block in model:
                x = checkpoint(block, x, **CHECKPOINTS[kind])
            return x.sin()

    class Outside(nn.Module):
        def forward(self, x):
            def block_in_session(x, block):
                with fp8hooks.compress():
                    return block(x)

            for block in model:
                x = checkpoint(block_in_session, x, block, **CHECKPOINTS[kind])
            return x.sin()

    def grads(module, session):
        x = X.clone().requires_grad_()
        model.zero_grad()
        if session is None:
            loss = module(x).square().mean()
        else:
            with session:
                loss = module(x).square().mean()
        loss.backward()
        return [x.grad, *[p.grad.clone() for p in model.parameters()]]

    exact = grads(Inside(), None)
    session = fp8hooks.compress()
    got = grads(Inside(), session) if inside else grads(Outside(), None)
    assert models.relative_error(got, exact) < 0.08
    if inside:
        assert session.held_bytes == 0
        assert session.stats.tensors > 0


def test_saved_tensors_hooks_of_a_graph_are_those_at_its_making() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with fp8hooks.compress():
        y = (x * 1).exp()
    z = y.sin().sum()
    with torch.autograd.graph.save_on_cpu():
        z.backward()
    want = y.detach().cos() * y.detach()
    assert (x.grad - want).norm() / want.norm() < 0.05


@pytest.mark.gpu
def test_backward_on_another_stream_and_several_devices() -> None:
    model = models.mlp().cuda()
    x = X.cuda()
    _, want = models.step(model, x, fp8hooks.compress())
    torch.cuda.synchronize()
    session = fp8hooks.compress()
    for _ in range(20):
        model.zero_grad(set_to_none=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with session, torch.cuda.stream(side):
            loss = model(x).float().square().mean()
        torch.cuda.current_stream().wait_stream(side)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        for p, g in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(p.grad, g)


@pytest.mark.gpu
def test_a_graph_across_cpu_and_gpu() -> None:
    first, second = models.mlp(), models.mlp().cuda()
    session = fp8hooks.compress()
    with session:
        loss = second(first(X).cuda()).square().mean()
    loss.backward()
    got = [p.grad.cpu().clone() for m in (first, second) for p in m.parameters()]
    first.zero_grad()
    second.zero_grad()
    second(first(X).cuda()).square().mean().backward()
    want = [p.grad.cpu() for m in (first, second) for p in m.parameters()]
    assert models.relative_error(got, want) < 0.05
