"""TransformerEngine's Functions, by stand-ins that are named alike and save what those save; the real ones run on GPUs
(tests/test_transformer_engine_gpu.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import fp8hooks
from fp8hooks import Rule

TOKENS, HIDDEN, FFN = 384, 128, 320


def function(name: str, saved: Any, module: str = "transformer_engine.pytorch.module.stand_in") -> type[Function]:
    """A Function that saves what `saved(*args)` gives."""

    def forward(ctx, *args):
        ctx.save_for_backward(*saved(*args))
        return next(a for a in args if isinstance(a, Tensor) and a.is_floating_point()) * 1

    return type(name, (Function,), {"forward": staticmethod(forward), "__module__": module})


def saved_as(cls: type[Function], *args: Any) -> dict[tuple[str, str, str], int]:
    """By operation, role and codec: tensors that were saved; weights, which are not counted, are left out."""
    session = fp8hooks.compress()
    with session:
        keep = cls.apply(*args)
    assert keep is not None
    return {(site.op, site.role, codec): entry.tensors for (site, codec), entry in session.stats.sites.items()}


def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """An activation: it has a history."""
    return torch.randn(shape or (TOKENS, HIDDEN), dtype=dtype, requires_grad=True) * 1


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape or (FFN, HIDDEN), dtype=dtype))


def raw(*shape: int) -> Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize("name", ["_Linear", "_GroupedLinear"])
def test_products_save_their_input_and_weights(name: str) -> None:
    cls = function(name, lambda w, inp, b, args: (inp, w, w, b))
    op = f"te.{name[1:]}"
    assert saved_as(cls, weight(), x(), weight(FFN), object()) == {(op, "activation", "square8"): 1}
    # A list of weights and parts of the input, as for experts.
    cls = function(name, lambda inp, a, b: (*inp.split(TOKENS // 2), a, b))
    assert saved_as(cls, x(), weight(), weight()) == {(op, "activation", "square8"): 2}


def test_fp8_data_is_kept_as_it_is_and_that_of_weights_is_not_counted() -> None:
    def save(w, inp, b, args):
        scales = made(1, dtype=torch.float32), made(TOKENS, 1, dtype=torch.float32)
        return raw(TOKENS, HIDDEN), raw(HIDDEN, TOKENS), raw(*w.shape), raw(HIDDEN, FFN), *scales

    found = saved_as(function("_Linear", save), weight(), x(), None, object())
    assert found == {("te.Linear", "activation", "exact"): 2, ("te.Linear", "statistic", "exact"): 2}


def test_data_of_4_bits() -> None:
    def save(w, inp, b, args):
        return raw(TOKENS, HIDDEN // 2), raw(FFN, HIDDEN // 2), raw(HIDDEN, FFN // 2)

    found = saved_as(function("_Linear", save), weight(), x(), None, object())
    assert found == {("te.Linear", "activation", "exact"): 1}


@pytest.mark.parametrize("frozen", [False, True])
def test_casts_for_autocast_are_weights_and_inputs(frozen: bool) -> None:
    w = weight(dtype=torch.float32).requires_grad_(not frozen)

    def save(w, inp, b, args):
        return inp.bfloat16(), w.bfloat16(), w

    assert saved_as(function("_Linear", save), w, x(dtype=torch.float32), None, object()) == {
        ("te.Linear", "activation", "square8"): 1
    }


def test_an_input_as_large_as_the_weight_is_no_weight() -> None:
    w = weight(TOKENS, HIDDEN, dtype=torch.float32)
    found = saved_as(function("_Linear", lambda w, inp, b, args: (inp, raw(TOKENS, HIDDEN))), w, x(), None, object())
    assert found == {("te.Linear", "activation", "square8"): 1, ("te.Linear", "activation", "exact"): 1}


@pytest.mark.parametrize(
    ("norm", "part", "codec"), [("LayerNorm", "layer_norm", "int8"), ("RMSNorm", "rms_norm", "square8")]
)
def test_norm_and_product(norm: str, part: str, codec: str) -> None:
    def save(inp, ln_weight, ln_bias, w, workspace, bias, rest):
        rows = TOKENS
        statistics = made(rows, dtype=torch.float32), made(rows, dtype=torch.float32)
        return inp.view(-1, HIDDEN), w, w, bias, ln_weight, made(rows, HIDDEN), *statistics

    cls = function("_LayerNormLinear", save)
    args = weight(HIDDEN), weight(HIDDEN), weight(), None, weight(FFN), (1e-5, norm, False)
    assert saved_as(cls, x(2, TOKENS // 2, HIDDEN), *args) == {
        (f"te.LayerNormLinear.{part}", "activation", codec): 1,
        ("te.LayerNormLinear.linear", "activation", "square8"): 1,
        ("te.LayerNormLinear", "statistic", "exact"): 2,
    }
    # Under autocast nothing tells the norm's input from its output.
    cast = function("_LayerNormLinear", lambda inp, *rest: (inp.bfloat16(), made(TOKENS, HIDDEN)))
    either = "layer_norm_or_linear" if norm == "LayerNorm" else "linear"
    assert saved_as(cast, x(dtype=torch.float32), *args) == {
        (f"te.LayerNormLinear.{either}", "activation", "int10" if norm == "LayerNorm" else "square8"): 2
    }


def test_norm_and_mlp() -> None:
    def save(inp, ln_weight, ln_bias, w1, ws1, b1, w2, ws2, b2, rest):
        middle = made(TOKENS, 2 * FFN), made(TOKENS, FFN)
        return inp, ln_weight, made(TOKENS, HIDDEN), w1, w1, *middle, w2, w2, made(TOKENS, dtype=torch.float32)

    args = weight(HIDDEN), None, weight(2 * FFN, HIDDEN), None, None, weight(HIDDEN, FFN), None, None, ("RMSNorm",)
    assert saved_as(function("_LayerNormMLP", save), x(), *args) == {
        ("te.LayerNormMLP.rms_norm", "activation", "square8"): 1,
        ("te.LayerNormMLP.linear", "activation", "square8"): 1,
        ("te.LayerNormMLP.activation", "activation", "square8"): 2,
        ("te.LayerNormMLP", "statistic", "exact"): 1,
    }


@pytest.mark.parametrize("groups", [1, 4])
def test_attention(groups: int) -> None:
    heads, width = 8, 32
    packed = x(2, 64, heads + 2 * heads // groups, width)
    q, k, v = packed.split((heads, heads // groups, heads // groups), 2)

    def save(q, k, v, bias, offset, rest):
        lengths = torch.tensor([0, 64, 128], dtype=torch.int32)
        return q, k, v, torch.randn_like(q), lengths, made(2, heads, 64, 1, dtype=torch.float32), lengths.long()

    found = saved_as(function("FusedAttnFunc", save), q, k, v, None, None, object())
    assert found == {
        ("te.DotProductAttention", "attention_qk", "int10"): 2,
        ("te.DotProductAttention", "attention_vo", "int8"): 2,
        ("te.DotProductAttention", "statistic", "exact"): 3,
    }


def test_attention_of_older_versions_with_other_arguments_first() -> None:
    q, k, v = (x(2, 64, 4, 32) for _ in range(3))
    lengths = torch.tensor([0, 64, 128], dtype=torch.int32)
    cls = function("FusedAttnFunc", lambda training, length, lengths, q, k, v, bias: (q, k, v, bias))
    bias = x(1, 4, 64, 64)
    assert saved_as(cls, True, 64, lengths, q, k, v, bias) == {
        ("te.DotProductAttention", "attention_qk", "int10"): 2,
        ("te.DotProductAttention", "attention_vo", "int8"): 1,
        ("te.DotProductAttention", "statistic", "exact"): 1,
    }


class LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = weight(HIDDEN)


class Fuser:
    def __init__(self, *ops: nn.Module) -> None:
        self._basic_ops = ops


@pytest.mark.parametrize(
    ("ops", "op", "codec"),
    [
        ((LayerNorm(),), "te.ops.layer_norm", "int8"),
        ((LayerNorm(), nn.Linear(HIDDEN, FFN)), "te.ops.layer_norm_or_linear", "int10"),
        ((nn.Linear(HIDDEN, FFN), nn.GELU()), "te.ops", "square8"),
    ],
)
def test_operations(ops: tuple[nn.Module, ...], op: str, codec: str) -> None:
    cls = function(
        "_OperationFuserAutogradFunction",
        lambda inp, fuser, kwargs, flag, *params: (inp, made(TOKENS, FFN), *params, made(TOKENS, dtype=torch.float32)),
    )
    assert saved_as(cls, x(), Fuser(*ops), [{}], True, weight(), weight(HIDDEN)) == {
        ("te.ops", "activation", "square8"): 2 if op == "te.ops" else 1,
        ("te.ops", "statistic", "exact"): 1,
        **({} if op == "te.ops" else {(op, "activation", codec): 1}),
    }


def test_other_functions_and_namesakes_stay_exact() -> None:
    other = function("CrossEntropyFunction", lambda inp: (inp,))
    assert saved_as(other, x()) == {("Function.CrossEntropyFunction", "activation", "exact"): 1}
    namesake = function("_Linear", lambda w, inp, b, args: (inp,), module="mine.transformer_engine")
    assert saved_as(namesake, weight(), x(), None, None) == {("Function._Linear", "activation", "exact"): 1}


def test_a_rule_may_speak_of_it() -> None:
    cls = function("_Linear", lambda w, inp, b, args: (inp, w))
    session = fp8hooks.compress(rules=[Rule("fp8_e4m3", op="te.Linear")])
    with session:
        keep = cls.apply(weight(), x(), None, None)
    assert keep is not None
    assert [codec for _, codec in session.stats.sites] == ["fp8_e4m3"]


def test_what_it_unpacks_is_its_own() -> None:
    """TransformerEngine empties what it unpacks as soon as it can."""

    class _Linear(Function):
        @staticmethod
        def forward(ctx, w: Tensor, inp: Tensor) -> Tensor:
            ctx.save_for_backward(inp, w)
            return inp @ w.t()

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
            inp, w = ctx.saved_tensors
            result = grad.t() @ inp, grad @ w
            for tensor in (inp, w):
                tensor.data = torch.empty(0)
            return result

    _Linear.__module__ = "transformer_engine.pytorch.module.linear"
    w, leaf = weight(), torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with fp8hooks.compress():
        h = leaf * 1
        out = _Linear.apply(w, h)
        out = out + torch.nn.functional.linear(h, w)
    out.sum().backward(retain_graph=True)
    once = leaf.grad.clone(), w.grad.clone()
    leaf.grad = w.grad = None
    out.sum().backward()
    assert torch.equal(leaf.grad, once[0])
    assert torch.equal(w.grad, once[1])
    assert w.numel() == FFN * HIDDEN
