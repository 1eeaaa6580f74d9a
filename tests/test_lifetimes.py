"""Payloads belong to the graph: they die with it, wherever and however often backward runs."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fp8hooks
from tests import models


@pytest.fixture(autouse=True)
def _without_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def forward(session, model, x):
    with session:
        return model(x).square().mean()


def test_freed_with_the_graph_without_gc() -> None:
    session, model = fp8hooks.compress(), models.encoder()
    loss = forward(session, model, torch.randn(2, 32, 64))
    assert session.held_bytes > 0
    del loss
    assert session.held_bytes == 0


def test_outputs_that_are_saved_make_no_cycle() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    for settings in ({}, {"format": "exact"}, {"min_numel": 10**6}):
        with fp8hooks.compress(**settings):
            y = (x * 1).exp().tanh().softmax(-1)
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert storage.expired()


def test_unused_branches() -> None:
    session = fp8hooks.compress()
    x = torch.randn(64, 64, requires_grad=True)
    with session:
        used, unused = (x * 1).exp().sum(), (x * 2).exp().sum()
    used.backward()
    assert session.held_bytes > 0
    del used, unused
    assert session.held_bytes == 0


def test_after_an_exception_in_forward() -> None:
    session = fp8hooks.compress()
    x = torch.randn(64, 64, requires_grad=True)

    def broken():
        y = (x * 1).exp()
        raise KeyError(y.shape)

    with pytest.raises(KeyError), session:
        broken()
    assert session.held_bytes == 0


def test_after_an_exception_in_backward() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("broken")

    session = fp8hooks.compress()
    x = torch.randn(64, 64, requires_grad=True)
    with session:
        loss = Broken.apply((x * 1).exp()).sum()
    with pytest.raises(KeyError):
        loss.backward()
    del loss
    assert session.held_bytes == 0


def test_retain_graph_gives_equal_results() -> None:
    session, model = fp8hooks.compress(), models.encoder()
    loss = forward(session, model, torch.randn(2, 32, 64))
    grads = []
    for last in (False, False, True):
        model.zero_grad()
        loss.backward(retain_graph=not last)
        grads.append([p.grad.clone() for p in model.parameters()])
    for later in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], later, strict=True))
    assert session.held_bytes == 0
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with fp8hooks.compress(format="int8"):
        y = (x * 1).sin().pow(3).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        penalty = first.square().sum()
    penalty.backward()
    got, x.grad = x.grad, None
    (first,) = torch.autograd.grad(x.sin().pow(3).sum(), x, create_graph=True)
    first.square().sum().backward()
    assert (got - x.grad).norm() / x.grad.norm() < 0.05


def test_a_gradient_through_what_was_saved_reaches_the_input() -> None:
    """Double backward outside the session: unpacked tensors keep their place in the graph."""
    x = torch.randn(64, 64, requires_grad=True)
    with fp8hooks.compress():
        y = (x * 1).pow(3).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert (second - 6 * x).norm() / (6 * x).norm() < 0.06


def test_backward_in_another_thread_and_in_any_order() -> None:
    session, model = fp8hooks.compress(), models.mlp()
    batches = [torch.randn(32, 64) for _ in range(4)]
    want = [models.step(model, x, session)[1] for x in batches]
    losses = [forward(session, model, x) for x in batches]
    for i in (2, 0, 3, 1):
        model.zero_grad()
        thread = threading.Thread(target=losses[i].backward)
        thread.start()
        thread.join()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want[i], strict=True))
    assert session.held_bytes == 0


@pytest.mark.parametrize("codec", ["fp8_e4m3", "int8"])
def test_a_consumer_that_writes_into_what_it_got_harms_nobody(codec) -> None:
    seen = []

    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            seen.append(x.clone())
            x.zero_()
            (again,) = ctx.saved_tensors
            seen.append(again.clone())
            return grad

    x = torch.randn(64, 64, requires_grad=True)
    with fp8hooks.compress(rules=[fp8hooks.Rule(codec, op="Function.Greedy")]):
        h = x * 1
        loss = Greedy.apply(h).sum() + h.square().sum()
    loss.backward(retain_graph=True)
    x.grad = None
    loss.backward()
    assert len(seen) == 4
    assert all(torch.equal(seen[0], other) and other.any() for other in seen)
    want = 1 + 2 * x.detach()
    assert (x.grad - want).norm() / want.norm() < 0.04


def test_a_graph_that_outlives_its_session() -> None:
    model = models.mlp()
    loss = forward(fp8hooks.compress(), model, torch.randn(32, 64))
    gc.collect()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_detached_and_frozen_parts() -> None:
    session = fp8hooks.compress()
    frozen, trained = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)
    with session:
        loss = trained(frozen(torch.randn(32, 64)).exp().detach()).square().mean()
    loss.backward()
    assert trained.weight.grad is not None
    assert session.held_bytes == 0


def test_a_soak_returns_to_the_byte() -> None:
    """2,000 steps of forwards that end in every way there is."""
    session = fp8hooks.compress()
    model = models.mlp(16)
    generator = torch.Generator().manual_seed(0)
    pending = []
    for _ in range(2000):
        x = torch.randn(64, 16, generator=generator)
        kind = int(torch.randint(6, (), generator=generator))
        try:
            with session:
                loss = model(x).square().mean()
                if kind == 0:
                    raise ArithmeticError
                if kind == 1:
                    with session:
                        loss = loss + model(x).mean()
        except ArithmeticError:
            pass
        if kind == 2:
            loss.backward(retain_graph=True)
        if kind in (1, 2, 3):
            loss.backward()
        if kind == 4:
            pending.append(loss)
        if kind == 5 and pending:
            pending.pop(int(torch.randint(len(pending), (), generator=generator))).backward()
        if pending:
            assert session.held_bytes > 0
        del loss
    pending.clear()
    model.zero_grad()
    assert session.held_bytes == 0
    assert not session._ledger._live
    assert not session._stack
