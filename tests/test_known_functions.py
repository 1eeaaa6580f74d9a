"""Custom Functions of well-known libraries, told by name; stand-ins that save what those save."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fp8hooks


def function(name: str, forward, backward) -> type[Function]:
    return type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def attention_forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / q.shape[-1] ** 0.5
    logsumexp = scores.logsumexp(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", (scores - logsumexp[..., None]).exp(), v.float()).to(q.dtype)
    ctx.save_for_backward(q, k, v, out, logsumexp, torch.zeros(2, dtype=torch.int64))
    return out


def attention_backward(ctx, grad: Tensor):
    q, k, v, out, logsumexp, _ = (t.float() for t in ctx.saved_tensors)
    p = (torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5 - logsumexp[..., None]).exp()
    grad = grad.float()
    dp = torch.einsum("bqhd,bkhd->bhqk", grad, v) - torch.einsum("bqhd,bqhd->bhq", grad, out)[..., None]
    ds = p * dp / q.shape[-1] ** 0.5
    dq, dk = torch.einsum("bhqk,bkhd->bqhd", ds, k), torch.einsum("bhqk,bqhd->bkhd", ds, q)
    return dq.bfloat16(), dk.bfloat16(), torch.einsum("bhqk,bqhd->bkhd", p, grad).bfloat16()


def codecs_by_role(fn) -> set[tuple[str, str]]:
    session = fp8hooks.compress()
    with session:
        keep = fn()
    assert keep is not None
    return {(site.role, codec) for site, codec in session.stats.sites if site.op.startswith("Function.")}


@pytest.mark.parametrize("name", ["FlashAttnFunc", "FlashAttnQKVPackedFunc", "_fMHA"])
def test_attention(name: str) -> None:
    attention = function(name, attention_forward, attention_backward)

    def grads(session) -> list[Tensor]:
        torch.manual_seed(0)
        leaves = [torch.randn(2, 64, 4, 32, requires_grad=True) for _ in range(3)]
        with session:
            out = attention.apply(*((leaf * 1).bfloat16() for leaf in leaves))
        out.backward(torch.randn(out.shape).bfloat16())
        return [leaf.grad for leaf in leaves]

    session = fp8hooks.compress()
    got, want = grads(session), grads(fp8hooks.compress(rules=[fp8hooks.Rule("exact")]))
    sites = {(site.role, codec) for site, codec in session.stats.sites if site.op == f"Function.{name}"}
    assert sites == {
        ("attention_qk", "int10"),
        ("attention_vo", "int8"),
        ("statistic", "exact"),
        ("index", "exact"),
    }
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("LigerRMSNormFunction", "square8"),
        ("LigerLayerNormFunction", "int8"),
        ("FusedRMSNormAffineFunction", "square8"),
        ("FusedLayerNormAffineFunction", "int8"),
        ("SyncBatchNorm", "int8"),
    ],
)
def test_norms(name: str, codec: str) -> None:
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        rstd = rows.float().square().mean(-1).rsqrt()
        ctx.save_for_backward(rows, weight, rstd)
        return (rows * rstd[:, None] * weight).view_as(x)

    norm = function(name, forward, None)
    weight = torch.nn.Parameter(torch.ones(64))
    found = codecs_by_role(lambda: norm.apply(torch.randn(64, 32, 64, requires_grad=True) * 1, weight))
    assert found == {("activation", codec), ("statistic", "exact")}


def test_products() -> None:
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a.view(-1, a.shape[-1]), b)
        return torch.nn.functional.silu(a) * b

    product = function("LigerSiLUMulFunction", forward, None)
    x = torch.randn(64, 64, requires_grad=True)
    assert codecs_by_role(lambda: product.apply(x * 1, x * 2)) == {("activation", "square8")}


@pytest.mark.parametrize("name", ["Mine", "LigerCrossEntropyFunction", "LigerRopeFunction"])
def test_others_stay_exact_and_are_counted(name: str) -> None:
    def forward(ctx, a: Tensor) -> Tensor:
        ctx.save_for_backward(a.view(-1))
        return a * 2

    stranger = function(name, forward, None)
    assert codecs_by_role(lambda: stranger.apply(torch.randn(64, 64).requires_grad_() * 1)) == {("activation", "exact")}
