"""Consumers of one payload share one decoded tensor, for no longer than they need it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import fp8hooks
from fp8hooks.codecs import BlockCodec

Decoded = list["weakref.ref[torch.UntypedStorage]"]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decoded:
    """What was decoded, weakly."""
    found: Decoded = []
    plain = BlockCodec.decode

    def decode(self, payload):
        out = plain(self, payload)
        found.append(weakref.ref(out.untyped_storage()))
        return out

    monkeypatch.setattr(BlockCodec, "decode", decode)
    return found


class Heads(nn.Module):
    """One tensor goes into three products, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.parts = nn.ModuleList(nn.Linear(64, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return torch.stack([part(x) for part in self.parts]).sum()


def test_one_decode_serves_all_products_of_one_tensor(decoded: Decoded) -> None:
    model, x = Heads(), torch.randn(128, 64, requires_grad=True)
    with fp8hooks.compress():
        loss = model(x)
    loss.backward(retain_graph=True)
    assert len(decoded) == 1
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert len(decoded) == 2
    assert all(torch.equal(p.grad, want) for p, want in zip(model.parameters(), first, strict=True))


def test_views_share_too(decoded: Decoded) -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(4, 32, 64, requires_grad=True) * 1
    with fp8hooks.compress():
        loss = (x @ weight).sum() + (x.flatten(0, 1) @ weight).sum()
    loss.backward()
    assert len(decoded) == 1


def test_nothing_stays_after_the_last_use(decoded: Decoded) -> None:
    model, x = Heads(), torch.randn(128, 64, requires_grad=True)
    with fp8hooks.compress():
        loss = model(x)
    loss.backward(retain_graph=True)
    gc.collect()
    assert [storage() for storage in decoded] == [None]


def test_at_most_one_stays_where_consumers_do_not_come(decoded: Decoded) -> None:
    """Each tensor has a consumer whose gradient nobody asks for."""
    weight = torch.randn(64, 64, requires_grad=True)
    losses = []
    session = fp8hooks.compress()
    with session:
        for _ in range(4):
            x = torch.randn(128, 64, requires_grad=True) * 1
            losses.append(((x @ weight).sum(), (x @ weight).sum()))
    for loss, _ in losses:
        loss.backward()
        gc.collect()
        assert sum(storage() is not None for storage in decoded) <= 1
    assert len(decoded) == 4


def test_who_writes_into_what_was_decoded_does_not_harm_the_next() -> None:
    x = torch.randn(128, 64, requires_grad=True) * 1
    with fp8hooks.compress():
        a, b, c = x * x.detach(), torch.sin(x), torch.cos(x)
    first = a.grad_fn._saved_other
    second = b.grad_fn._saved_self
    kept = second.clone()
    second.zero_()
    assert torch.equal(c.grad_fn._saved_self, kept)
    assert first is not None


def test_custom_functions_do_not_share(decoded: Decoded) -> None:
    """They may write where no version counter sees it."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            x.data.zero_()
            return 2 * gradient

    x = torch.randn(128, 64, requires_grad=True) * 1
    x.retain_grad()
    with fp8hooks.compress(rules=[fp8hooks.Rule("int8", op="Function.Double")], format="int8"):
        loss = (torch.sin(x) + Double.apply(x) + torch.cos(x)).sum()
    loss.backward()
    torch.testing.assert_close(x.grad, x.detach().cos() - x.detach().sin() + 2, atol=0.1, rtol=0)
