"""What only ReLU needs takes a bit an element, until somebody else needs the same tensor whole."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8hooks
from fp8hooks import Rule

N = 64 * 64


def gradients(fn, *leaves: Tensor, session=None) -> list[Tensor]:
    session = session or fp8hooks.compress(rules=[Rule("exact")])
    for leaf in leaves:
        leaf.grad = None
    with session:
        loss = fn(*leaves)
    loss.backward()
    return [leaf.grad.clone() for leaf in leaves]


def codecs_of(session: fp8hooks.Session, op: str) -> dict[str, int]:
    return {
        codec: bucket.stored_bytes
        for (site, codec), bucket in session.stats.sites.items()
        if site.op == op and site.role == "activation"
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "op", [F.relu, torch.relu_, F.leaky_relu, lambda x: F.leaky_relu(x, 0.3, inplace=True), nn.ReLU(inplace=True)]
)
def test_a_bit_an_element_and_an_exact_gradient(op, dtype) -> None:
    x = torch.randn(64, 64, dtype=dtype, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return (op(x + 0.0).sum() * 3).float()

    session = fp8hooks.compress()
    assert torch.equal(gradients(loss, x, session=session)[0], gradients(loss, x)[0])
    assert session.stats.by_codec["signs"].stored_bytes == N // 8
    assert session.held_bytes == 0


def test_who_needs_the_tensor_whole_stores_it_once() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    layer = nn.Linear(64, 64)
    session = fp8hooks.compress()
    with session:
        h = F.relu(x * 1)
        assert session.held_bytes == N // 8
        y = layer(h)
        whole = session.stats.by_codec["square8"].stored_bytes
        # The bits are gone, and backward of both reads the one payload.
        assert session.held_bytes == whole == session.stats.stored_bytes
        assert session.stats.by_codec["signs"].stored_bytes == 0
    y.sum().backward()
    assert session.held_bytes == 0
    got = x.grad.clone()
    x.grad = None
    layer(F.relu(x * 1)).sum().backward()
    assert torch.equal(got, x.grad)


def test_a_view_of_the_tensor_is_the_same_memory() -> None:
    session = fp8hooks.compress()
    with session:
        h = F.relu(torch.randn(4, 16, 8, 8, requires_grad=True) * 1)
        keep = nn.Linear(1024, 8)(h.flatten(1))
    assert session.held_bytes == session.stats.by_codec["square8"].stored_bytes
    del h, keep
    gc.collect()
    assert session.held_bytes == 0


def test_a_payload_that_is_there_already_serves() -> None:
    session = fp8hooks.compress()
    with session:
        x = torch.randn(64, 64, requires_grad=True) * 1
        keep = [x.sin(), F.leaky_relu(x)]
    assert len(keep) == 2
    assert codecs_of(session, "leaky_relu") == {"square8": 0}


def test_a_dead_graph_leaves_nothing_to_replace() -> None:
    session = fp8hooks.compress()
    with session:
        x = torch.randn(64, 64, requires_grad=True) * 1
        F.leaky_relu(x)
        keep = x.sin()
    assert codecs_of(session, "sin")["square8"] > N
    keep.sum().backward()
    assert session.held_bytes == 0


def test_a_rule_of_the_users_has_its_way() -> None:
    for rules, codec in (([Rule("int8", op="relu")], "int8"), ([Rule("exact")], "exact")):
        session = fp8hooks.compress(rules=rules)
        with session:
            keep = F.relu(torch.randn(64, 64, requires_grad=True) * 1)
        assert set(codecs_of(session, "relu")) == {codec}
        del keep
    session = fp8hooks.compress(format="exact")
    with session:
        F.relu(torch.randn(64, 64, requires_grad=True) * 1)
    assert set(codecs_of(session, "relu")) == {"exact"}


def test_infinities_and_nan() -> None:
    x = torch.randn(64, 64)
    x[0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0])
    x.requires_grad_()
    got, want = (
        gradients(lambda x: F.relu(x * 1).nansum(), x, session=fp8hooks.compress()),
        gradients(lambda x: F.relu(x * 1).nansum(), x),
    )
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("asked", [0.0, 0.2, 0.5, 0.7])
def test_the_knob_counts_whole_tensors_and_signs_alike(asked: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1)
    )
    session = fp8hooks.compress(memory_savings=asked)
    for _ in range(3):
        with session:
            loss = model(torch.randn(512, 64) * 1).square().mean()
        savings = session.stats.savings
        loss.backward()
    assert asked <= savings < asked + 0.15
    assert session.held_bytes == 0


def test_a_strangers_relu_is_not_taken_at_its_word() -> None:
    """What is not a call of torch's own, only named like one in the source, may need more than signs."""
    stranger = SimpleNamespace(relu=torch.exp)
    x = torch.randn(64, 64, requires_grad=True)
    with fp8hooks.compress() as session, torch._C.DisableTorchFunction():
        loss = stranger.relu(x * 1).sum()
    loss.backward()
    assert {(site.op, codec) for site, codec in session.stats.sites} == {("unknown", "exact")}
    assert torch.equal(x.grad, x.exp())


def test_second_derivatives_and_retained_graphs() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    layer = nn.Linear(64, 64)
    with fp8hooks.compress():
        h = F.relu(x * 1)
        loss = (h * h).sum() + layer(h).sum() * 0
    first = torch.autograd.grad(loss, x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x, retain_graph=True)[0]
    again = torch.autograd.grad(first.sum(), x)[0]
    assert torch.equal(second, again)
    assert torch.equal(second, 2.0 * (x > 0))


def test_two_who_need_signs_share_them_and_both_give_way() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    layer = nn.Linear(64, 64)
    session = fp8hooks.compress()
    with session:
        h = F.relu(x * 1)
        y = F.leaky_relu(h)
        assert session.held_bytes == N // 8
        z = layer(h)
        assert session.held_bytes == session.stats.by_codec["square8"].stored_bytes == session.stats.stored_bytes
    (y.sum() + z.sum()).backward()
    got = x.grad.clone()
    x.grad = None
    h = F.relu(x * 1)
    (F.leaky_relu(h).sum() + layer(h).sum()).backward()
    assert torch.equal(got, x.grad)
    assert session.held_bytes == 0
    assert session.stats.original_bytes == N * 4


def test_the_second_who_needs_signs_keeps_them_when_the_first_is_gone() -> None:
    session = fp8hooks.compress()
    with session:
        h = torch.relu_(torch.randn(64, 64, requires_grad=True) * 1)
        y = F.leaky_relu(h.detach().requires_grad_() * 1)
        keep = [F.leaky_relu(h), y]
        del h
        keep.append(keep[0].sin())
    assert len(keep) == 3
    for result in keep:
        result.sum().backward(retain_graph=True)
