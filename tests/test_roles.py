"""Who saves a tensor, and as what."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8hooks
from fp8hooks.callsite import Call, Op
from fp8hooks.roles import role_of
from fp8hooks.saved import Site
from tests import models


def sites(fn, **settings) -> set[Site]:
    session = fp8hooks.compress(**settings)
    with session:
        fn()
    return {site for site, _ in session.stats.sites}


def roles(fn) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for site in sites(fn):
        found.setdefault(site.op, set()).add(site.role)
    return found


X = torch.randn(4, 32, 64)


def active(*shape: int) -> Tensor:
    """A tensor that comes from a recorded operation, as activations do."""
    return torch.randn(*shape, requires_grad=True) * 1


@pytest.mark.parametrize(
    ("fn", "op", "want"),
    [
        (lambda: nn.Linear(64, 64)(X), "linear", {"activation"}),
        (lambda: active(4, 64).exp(), "exp", {"activation"}),
        (lambda: active(4, 64) * active(4, 64), "mul", {"activation"}),
        (lambda: 2.5 * active(4, 64) ** 3, "pow", {"activation"}),
        (lambda: active(4, 64, 64) @ active(4, 64, 64), "matmul", {"activation"}),
        (lambda: active(4, 64).relu_(), "relu", {"activation"}),
        (lambda: F.silu(active(4, 64)), "silu", {"activation"}),
        (lambda: F.gelu(active(4, 64)), "gelu", {"activation"}),
        (lambda: F.softmax(active(4, 64), -1), "softmax", {"probability"}),
        (lambda: active(4, 64).softmax(-1), "softmax", {"probability"}),
        (lambda: F.log_softmax(active(4, 64), -1), "log_softmax", {"log_prob"}),
        (
            lambda: F.cross_entropy(active(4, 64), torch.zeros(4).long()),
            "cross_entropy_loss",
            {"log_prob", "index", "statistic"},
        ),
        (lambda: F.layer_norm(active(4, 64), (64,)), "layer_norm", {"activation", "statistic"}),
        (lambda: nn.BatchNorm1d(64)(active(4, 64)), "batch_norm", {"activation", "statistic"}),
        (lambda: nn.Embedding(9, 8)(torch.zeros(4).long()), "embedding", {"index"}),
        (lambda: torch.where(active(4, 64) > 0, active(4, 64), 0), "where", {"mask"}),
        (lambda: active(4, 64) * active(4, 64).square().mean(-1, keepdim=True).rsqrt(), "rsqrt", {"statistic"}),
        (lambda: F.conv2d(active(1, 3, 16, 16), nn.Parameter(torch.randn(8, 3, 3, 3))), "conv2d", {"activation"}),
        (lambda: nn.LSTM(64, 64)(X), "lstm", None),
    ],
)
def test_ops_and_roles(fn, op, want) -> None:
    found = roles(fn)
    assert op in found
    assert want is None or found[op] == want


def test_a_mean_over_features_is_a_statistic_where_it_is_multiplied() -> None:
    x = active(4, 32, 64)
    found = sites(lambda: x * x.square().mean(-1, keepdim=True))
    assert {site.role for site in found if site.op == "mul"} == {"activation", "statistic"}


def test_attention_in_all_its_parts() -> None:
    q, k, v = (active(2, 4, 32, 16) for _ in range(3))
    assert roles(lambda: F.scaled_dot_product_attention(q, k, v)) == {
        "scaled_dot_product_attention": {"attention_qk", "attention_vo", "statistic"}
    }
    assert roles(lambda: F.scaled_dot_product_attention(query=q, key=k, value=v)) == {
        "scaled_dot_product_attention": {"attention_qk", "attention_vo", "statistic"}
    }
    found = roles(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1))
    assert found == {"scaled_dot_product_attention": {"probability", "activation", "mask", "attention_vo"}}


@pytest.mark.parametrize("shape", [(2, 4, 32), (2, 4, 32, 1), (8, 32, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logsumexp_is_a_statistic_in_every_shape_that_a_backend_gives_it(shape, dtype) -> None:
    q, k, v = (torch.randn(2, 4, 32, 16, dtype=dtype) for _ in range(3))
    call = Call(F.scaled_dot_product_attention, (q, k, v), {})
    assert role_of(torch.randn(shape), Op("scaled_dot_product_attention", False), call) == "statistic"


def test_attention_inside_torchs_own_functions() -> None:
    mha = nn.MultiheadAttention(64, 4, batch_first=True)
    found = roles(lambda: mha(X, X, X, need_weights=False))
    assert found["scaled_dot_product_attention"] == {"attention_qk", "statistic"}
    assert found["linear"] == {"activation"}


def test_dropout_inside_attention_is_stored_as_bits_and_the_probabilities_as_cubes() -> None:
    """Dropped-out probabilities in INT8, most of them far below the largest, made an encoder's gradient 0.16 off."""
    mha = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)
    session = fp8hooks.compress()
    x = torch.randn(8, 64, 64)
    with session:
        keep = mha(x, x, x, need_weights=False)
    assert keep is not None
    stored = {(site.role, codec) for site, codec in session.stats.sites if site.op == "scaled_dot_product_attention"}
    assert stored == {("probability", "cubic8"), ("mask", "bits"), ("activation", "square8")}


def test_custom_functions_are_named_by_their_class() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    found = sites(lambda: Twice.apply(active(64, 64)))
    assert {site.op for site in found} - {"mul"} == {"Function.Twice"}


def test_operators_of_other_libraries_are_left_alone() -> None:
    library = torch.library.Library("fp8hooks_tests", "FRAGMENT")
    library.define("twice_sine(Tensor x) -> Tensor")
    library.impl("twice_sine", lambda x: 2 * x.sin(), "CompositeImplicitAutograd")
    x = active(64, 64)
    session = fp8hooks.compress()
    with session:
        keep = [torch.ops.fp8hooks_tests.twice_sine(x), torch.ops.aten.cos(x * 2)]
    assert len(keep) == 2
    found = {site.op: codec for site, codec in session.stats.sites}
    assert found["ops.fp8hooks_tests.twice_sine"] == "exact"
    assert found["cos"] == "square8"


def test_where_to_read_stays_exact() -> None:
    """A grid in FP8 reads other pixels: the gradient was 2.3 off."""
    images, grid = active(2, 4, 32, 32), torch.tanh(active(2, 32, 32, 2))
    for call in (
        lambda: F.grid_sample(images, grid, align_corners=False),
        lambda: F.grid_sample(images, grid=grid, align_corners=False),
    ):
        found = {(site.role, site.op) for site in sites(call)}
        assert found == {("activation", "grid_sampler"), ("statistic", "grid_sampler")}


def test_modules_are_named_by_their_path() -> None:
    model = models.encoder()
    found = {site.module for site in sites(lambda: model(X))}
    assert {"layers.0.self_attn", "layers.1.linear1", "layers.1.norm2"} <= found
    assert {site.module for site in sites(lambda: active(64, 64).exp())} == {""}


def test_a_new_module_at_an_old_address_gets_its_own_name() -> None:
    for width in range(3):
        names = [f"first{width}", f"second{width}"]
        model = nn.Sequential()
        for name in names:
            model.add_module(name, nn.Linear(64, 64))
        assert {site.module for site in sites(lambda model=model: model(X))} == set(names)
        del model


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_are_never_activations(frozen) -> None:
    lin, conv = nn.Linear(64, 64), nn.Conv2d(3, 64, 3)
    lin.requires_grad_(not frozen)
    conv.requires_grad_(not frozen)
    for dtype in (None, torch.bfloat16):
        session = fp8hooks.compress()
        with session, torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            lin(active(32, 64))
            conv(active(1, 3, 32, 32))
        assert session.stats.weight_bytes == (64 * 64 + 64 * 27) * (4 if dtype is None else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
@pytest.mark.parametrize("autocast", [False, True])
def test_every_attention_backend_keeps_its_gradients(backend, autocast) -> None:
    def run(session):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 8, 256, 64, device="cuda", requires_grad=True) for _ in range(3))
        half = [t * 1 if autocast else (t * 1).bfloat16() for t in (q, k, v)]
        with sdpa_kernel(getattr(SDPBackend, backend)), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            if session is None:
                out = F.scaled_dot_product_attention(*half, is_causal=True)
            else:
                with session:
                    out = F.scaled_dot_product_attention(*half, is_causal=True)
            out.backward(torch.ones_like(out).cumsum(-1))
        return [t.grad for t in (q, k, v)]

    session = fp8hooks.compress()
    assert models.relative_error(run(session), run(None)) < 0.03
    if backend != "MATH":
        assert session.stats.by_role["statistic"].stored_bytes == session.stats.by_role["statistic"].original_bytes > 0
