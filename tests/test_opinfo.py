"""PyTorch's own operators and modules, each in a session that compresses whatever the policy lets it.

Forward is identical, nothing crashes, no gradient is lost, and what is finite without us is finite with us.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fp8hooks

pytest.importorskip("expecttest", reason="torch's test utilities need expecttest")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

# The largest relative error of the gradient that is allowed, against the larger of its norm and float32's noise.
BOUND = 0.15

# Some operators have thousands of samples that differ in little; this many of each, evenly spread, are taken.
MOST_SAMPLES = 40

# Operators that give different results from call to call, or leave some of them unwritten.
RANDOM = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})

# Operators that mean the storage of what they are given, and so can't be given a copy.
OF_STORAGE = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter"})


def differentiable() -> list[Any]:
    return [
        op
        for op in op_db
        if op.supports_autograd and torch.float32 in op.supported_backward_dtypes(torch.device("cpu").type)
    ]


def outputs_of(result: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.requires_grad and leaf.layout is torch.strided]


def gradients(call, inputs: list[Tensor], session: fp8hooks.Session | None) -> tuple[list[Tensor], list[Any]]:
    torch.manual_seed(0)
    if session is None:
        result = call()
    else:
        with session:
            result = call()
    outputs = outputs_of(result)
    if not outputs or not inputs:
        return [], []
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
    grads = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    return [o.detach() for o in outputs], list(grads)


def spread(given: Any) -> list[Any]:
    everything = list(given)
    return everything[:: -(-len(everything) // MOST_SAMPLES)]


def samples(op: Any) -> Iterator[tuple[Any, list[Tensor]]]:
    for sample in spread(op.sample_inputs("cpu", torch.float32, requires_grad=True)):
        leaves = [
            leaf
            for leaf in tree_leaves((sample.input, sample.args, sample.kwargs))
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.layout is torch.strided
        ]
        yield sample, leaves


def check(call, leaves: list[Tensor]) -> list[tuple[float, float]]:
    """Compare one call with and without a session: for each leaf, the error and the size of its gradient."""
    exact_outputs, exact = gradients(call, leaves, None)
    session = fp8hooks.compress(min_numel=0)
    got_outputs, got = gradients(call, leaves, session)
    assert len(exact_outputs) == len(got_outputs)
    for a, b in zip(exact_outputs, got_outputs, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), "forward is not identical"
    found = []
    for a, b in zip(exact, got, strict=True):
        assert (a is None) == (b is None), "a gradient was lost"
        if a is None or a.layout is not torch.strided or b is None:
            continue
        assert a.shape == b.shape
        assert b.isfinite().logical_or(~a.isfinite()).all(), "not finite where exact is finite"
        a, b = a.to(torch.complex128), b.to(torch.complex128)
        keep = a.isfinite() & b.isfinite()
        norm = float(a[keep].norm())
        noise = 1e-5 * max(1.0, float(keep.sum()) ** 0.5)
        found.append((float((b - a)[keep].norm()), max(norm, noise)))
    assert session.held_bytes == 0
    return found


@pytest.mark.parametrize("op", differentiable(), ids=lambda op: op.formatted_name)
@pytest.mark.filterwarnings("ignore")
def test_operators(op) -> None:
    compare = _only_that_it_runs if op.name in RANDOM else check
    worst = 0.0
    for sample, leaves in samples(op):
        # Clones of the leaves: operators save leaves as they are, but in a model operands are activations.
        def call(sample=sample):
            if op.name in OF_STORAGE:
                return op(sample.input, *sample.args, **sample.kwargs)
            moved = sample.transform(lambda t: t * 1 if isinstance(t, Tensor) and t.is_floating_point() else t)
            return op(moved.input, *moved.args, **moved.kwargs)

        worst = max([worst, *(error / size for error, size in compare(call, leaves))])
    assert worst <= BOUND


def _only_that_it_runs(call, leaves: list[Tensor]) -> list[tuple[float, float]]:
    _, grads = gradients(call, leaves, fp8hooks.compress(min_numel=0))
    assert all(grad is None or grad.shape == leaf.shape for grad, leaf in zip(grads, leaves, strict=False))
    return []


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
@pytest.mark.filterwarnings("ignore")
def test_modules(info) -> None:
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    worst = 0.0
    for given in spread(inputs):
        torch.manual_seed(0)
        module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
        arguments = given.forward_input
        if arguments is None:
            continue
        if any(isinstance(p, torch.nn.UninitializedParameter) for p in module.parameters()):
            with torch.no_grad():
                module(*arguments.args, **arguments.kwargs)
        leaves = [
            leaf
            for leaf in tree_leaves((arguments.args, arguments.kwargs, list(module.parameters())))
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        state = {name: value.clone() for name, value in module.state_dict().items()}

        def call(module=module, arguments=arguments, state=state):
            module.load_state_dict(state)
            return module(*arguments.args, **arguments.kwargs)

        try:
            gradients(call, leaves, None)
        except (RuntimeError, NotImplementedError):
            continue  # torch itself does not differentiate this one
        # Of all parameters and inputs taken as one vector: attention's bias of k, say, has no gradient but noise.
        errors, sizes = zip((0.0, 1e-30), *check(call, leaves), strict=True)
        worst = max(worst, math.hypot(*errors) / math.hypot(*sizes))
    assert worst <= BOUND
