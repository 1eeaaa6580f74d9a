"""Payloads in host memory: the same results, nothing lost, nothing kept. (On a GPU: tests/test_gpu.py.)"""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from torch import nn

import fp8hooks
from fp8hooks import host_memory, offload
from fp8hooks.host_memory import Pool
from tests import models


def both(model, x, **settings):
    """Gradients with the host and without."""
    return [models.step(model, x, fp8hooks.compress(offload=where, **settings))[1] for where in (True, False)]


@pytest.mark.parametrize("make", [models.mlp, models.encoder])
@pytest.mark.parametrize("settings", [{}, {"format": "int4"}, {"stochastic_rounding": True}])
def test_results_are_the_same_bit_for_bit(make, settings) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(32, 32, 64)
    moved, kept = both(model, x, **settings)
    assert all(torch.equal(a, b) for a, b in zip(moved, kept, strict=True))


def test_the_device_is_freed_and_the_host_after_backward() -> None:
    model, x = models.encoder(), torch.randn(32, 32, 64)
    session = fp8hooks.compress(offload=True)
    with session:
        loss = model(x).sum()
    stats = session.stats
    assert stats.stored_bytes < 0.1 * stats.original_bytes
    assert stats.host_bytes > 0.2 * stats.original_bytes
    assert stats.host_bytes <= session.host_bytes < stats.host_bytes + 512 * stats.tensors
    assert session.held_bytes < 0.1 * stats.original_bytes
    loss.backward()
    assert (session.host_bytes, session.held_bytes) == (0, 0)


def test_what_stays_exact_moves_whole_and_its_edits_are_found() -> None:
    x = torch.randn(512, 64, requires_grad=True)
    session = fp8hooks.compress(offload=True)
    with session:
        h = x * 1
        loss = models.Keep.apply(h).sum()
    assert session.stats.host_bytes == h.nbytes
    loss.backward(retain_graph=True)
    assert torch.equal(x.grad, 2 * x)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*512, 64.*Function.Keep"):
        loss.backward()


def test_retained_graphs_and_several_at_once() -> None:
    model, x = models.mlp(), torch.randn(512, 64)
    session = fp8hooks.compress(offload=True)
    losses = []
    for scale in (1, 2):
        with session:
            losses.append(model(x * scale).square().mean())
    for loss in losses:
        model.zero_grad()
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        loss.backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(once, model.parameters(), strict=True))
    assert session.host_bytes == 0


def test_a_dropped_graph_gives_its_memory_back() -> None:
    model, x = models.mlp(), torch.randn(512, 64)
    session = fp8hooks.compress(offload=True)
    with session:
        loss = model(x).sum()
    assert session.host_bytes > 0
    del loss
    assert session.host_bytes == 0


def test_after_an_error_nothing_is_kept() -> None:
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    model, x = nn.Sequential(models.mlp(), Fails()), torch.randn(512, 64)
    session = fp8hooks.compress(offload=True)
    with pytest.raises(ValueError, match="no"), session:
        model(x)
    gc.collect()
    assert session.host_bytes == 0


def test_past_the_budget_tensors_stay_and_the_report_says_so() -> None:
    model, x = models.encoder(), torch.randn(32, 32, 64)
    session = fp8hooks.compress(offload=True, host_budget="512 KiB")
    moved = models.step(model, x, session)[1]
    assert 0 < session.stats.host_bytes <= 512 << 10
    assert session._offloader.pool.reserved <= 512 << 10
    assert "host_budget" in str(session.report())
    kept = models.step(model, x, fp8hooks.compress())[1]
    assert all(torch.equal(a, b) for a, b in zip(moved, kept, strict=True))


def test_memory_does_not_grow_from_step_to_step() -> None:
    model, x = models.encoder(), torch.randn(32, 32, 64)
    session = fp8hooks.compress(offload=True)
    models.step(model, x, session)
    reserved = session._offloader.pool.reserved
    for _ in range(20):
        models.step(model, x, session)
    assert session._offloader.pool.reserved == reserved > 0


def test_threads_share_a_session() -> None:
    model, x = models.mlp(), torch.randn(512, 64)
    session, want = fp8hooks.compress(offload=True), models.step(models.mlp(), x)[1]
    wants, results = [], {}

    def work(i: int) -> None:
        own = torch.nn.Linear(64, 64)
        with session:
            loss = model(own(x * i)).sum()
        results[i] = torch.autograd.grad(loss, list(own.parameters()))
        with fp8hooks.compress():
            loss = model(own(x * i)).sum()
        wants.append((i, torch.autograd.grad(loss, list(own.parameters()))))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert want
    assert len(wants) == 4
    for i, grads in wants:
        assert all(torch.equal(a, b) for a, b in zip(grads, results[i], strict=True))
    assert session.host_bytes == 0


def grad(function, x, **settings):
    """The gradient of a function's sum, in three steps of one session, and the session."""
    session = fp8hooks.compress(**settings)
    for _ in range(3):
        x.grad = None
        with session:
            loss = function(x * 1)
        loss.backward()
    return x.grad, session


@pytest.mark.parametrize("savings", [None, 0.9, "max"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.conj() @ x).abs().sum(),
        lambda x: (x @ x.conj()).abs().sum(),
        lambda x: (x.conj() * x.conj().imag).abs().sum(),
        lambda x: (torch.view_as_real(x)[..., 0] * x.imag).sum() + (x.real @ x.imag).sum(),
    ],
)
def test_conjugates_and_negatives_come_back_as_they_were(function, savings) -> None:
    x = torch.randn(300, 300, dtype=torch.complex64, requires_grad=True)
    want, _ = grad(function, x, offload=False)
    got, _ = grad(function, x, offload=True, memory_savings=savings)
    assert torch.equal(got, want)


def test_memory_that_relu_shares_can_move() -> None:
    layers = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)]
    model = nn.Sequential(*layers)
    _, session = grad(lambda x: model(x).square().sum(), torch.randn(1024, 512, requires_grad=True),
                      memory_savings=0.9, offload=None)  # fmt: skip
    assert 0.9 <= session.stats.savings <= 0.95


def test_signs_stay_and_are_counted() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.LeakyReLU())
    _, session = grad(lambda x: model(x).sum(), torch.randn(2048, 1024, requires_grad=True),
                      memory_savings="max", offload=True)  # fmt: skip
    assert session.stats.savings == pytest.approx(session.plan.reached)
    assert session.stats.host_bytes == session.plan.totals.host


@pytest.mark.parametrize(
    "function", [lambda x: (x * x).sum(), lambda x: (models.Keep.apply(x) + models.Keep.apply(x)).sum()]
)
def test_what_is_saved_exactly_twice_moves_once(function) -> None:
    x = torch.randn(300, 300, dtype=torch.float64, requires_grad=True)
    got, session = grad(function, x, memory_savings=0.9, offload=True)
    assert torch.equal(got, grad(function, x, offload=False)[0])
    assert session.stats.savings > 0.9
    assert session.stats.host_bytes == x.nbytes


@pytest.mark.parametrize("budget", [None, 0, "300 KiB"])
def test_what_is_exact_is_exact_for_later_saves_too(budget) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(256, 256), torch.randn(512, 256, requires_grad=True)
    function = lambda x: models.Keep.apply(x).sum() + linear(x).square().sum() + linear(x[:256]).sum()  # noqa: E731
    want, _ = grad(function, x, offload=False)
    weights = linear.weight.grad.clone()
    linear.weight.grad = None
    got, _ = grad(function, x, offload=True, host_budget=budget)
    assert torch.equal(got, want)
    assert torch.equal(linear.weight.grad, weights)


def test_what_somebody_else_holds_is_told_of_moved_tensors_too() -> None:
    x = torch.randn(512, 256, requires_grad=True)
    session, kept = fp8hooks.compress(offload=True), []
    with session:
        kept.append(x * 1)
        loss = kept[0].square().sum() + models.Keep.apply(kept[0]).sum()
    loss.backward()
    assert session.stats.not_freed == {"square": x.nbytes}


# The pool


def test_regions_never_overlap_and_come_together_again(monkeypatch) -> None:
    monkeypatch.setattr(host_memory, "_SLAB", 1 << 16)
    pool = Pool(1 << 18)
    generator = torch.Generator().manual_seed(0)
    out: list = []
    for i in range(600):
        if out and torch.rand((), generator=generator) < 0.5:
            pool.give_back(out.pop(int(torch.randint(len(out), (), generator=generator)))[1])
        region = pool.take(int(torch.randint(1, 20_000, (), generator=generator)))
        if region is not None:
            region.memory.fill_(i % 251)
            out.append((i % 251, region))
        assert all(bool((region.memory == value).all()) for value, region in out)
    assert pool.reserved <= 1 << 18
    for _, region in out:
        pool.give_back(region)
    assert pool.collect() == 0
    assert all(slab.free == [(0, slab.memory.numel())] for slab in pool._slabs)


def test_what_is_larger_than_a_slab_gets_its_own(monkeypatch) -> None:
    monkeypatch.setattr(host_memory, "_SLAB", 1 << 12)
    pool = Pool(1 << 20)
    region = pool.take(100_000)
    assert region is not None
    assert region.memory.numel() == 100_000
    assert pool.take(1 << 20) is None
    assert pool.refused == 1 << 20


def test_the_default_budget_is_shared_by_local_ranks(monkeypatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = host_memory.default_budget()
    assert 0 < alone <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_memory.default_budget() == alone // 4


# Fetching ahead, with homes that say what was fetched


class FakeHome:
    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.fetched, self.fetches, self.drops = nbytes, False, 0, 0

    def fetch(self) -> bool:
        if self.fetched:
            return False
        self.fetched, self.fetches = True, self.fetches + 1
        return True

    def drop(self) -> None:
        self.fetched, self.drops = False, self.drops + 1


class FakePayload:
    def __init__(self, home) -> None:
        self.home, self.nbytes = home, 0 if home else 100


class FakePacked:
    def __init__(self, home) -> None:
        self.payload = FakePayload(home)


@pytest.fixture
def saves(monkeypatch):
    monkeypatch.setattr(offload, "IN_FLIGHT", 250)
    return [FakePacked(FakeHome(100)) for _ in range(8)]


def backwards(number: int) -> int | None:
    return number - 1 if number else None


def ask(fetcher, saves, number, following=backwards) -> None:
    import weakref

    saves[number].payload.home.fetched = False  # it is taken
    fetcher.ask(number, [weakref.ref(save) for save in saves], following)


def test_fetches_run_ahead_within_the_window(saves) -> None:
    fetcher = offload.Fetcher(lambda: None)
    for number in range(7, -1, -1):
        ask(fetcher, saves, number)
        ahead = [i for i, save in enumerate(saves) if save.payload.home.fetched]
        assert ahead == [i for i in (number - 2, number - 1) if i >= 0]
    assert [save.payload.home.fetches for save in saves] == [1] * 7 + [0]


def test_an_order_that_was_not_expected_fetches_nothing_twice(saves) -> None:
    fetcher = offload.Fetcher(lambda: None)
    for number in (7, 5, 6, 4, 3, 0, 1, 2):
        ask(fetcher, saves, number)
    assert all(save.payload.home.fetches <= 1 for save in saves)
    assert not any(save.payload.home.fetched for save in saves)


def test_what_nobody_asks_for_is_dropped(saves, monkeypatch) -> None:
    monkeypatch.setattr(offload, "_PATIENCE", 3)
    fetcher = offload.Fetcher(lambda: None)
    ask(fetcher, saves, 7)
    forward = lambda number: number + 1 if number < 5 else None  # noqa: E731
    for number in range(5):
        ask(fetcher, saves, number, forward)
    assert saves[6].payload.home.drops == 1


def test_a_second_backward_fetches_again(saves) -> None:
    fetcher = offload.Fetcher(lambda: None)
    for _ in range(2):
        for number in range(7, -1, -1):
            ask(fetcher, saves, number)
    assert [save.payload.home.fetches for save in saves] == [2] * 7 + [0]


def test_what_dies_on_the_device_makes_room(saves) -> None:
    for number in (6, 7):
        saves[number].payload.home = None
        saves[number].payload.nbytes = 100
    fetcher = offload.Fetcher(lambda: None)
    import weakref

    refs = [weakref.ref(save) for save in saves]
    fetcher.ask(7, refs, backwards)
    saves.pop()
    fetcher.ask(6, refs, backwards)
    assert [save.payload.home.fetched for save in saves[:6]] == [False] * 3 + [True] * 3
