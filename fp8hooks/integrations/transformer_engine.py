"""TransformerEngine: what its fused Functions save, told from their arguments, without importing it.

Each does the work of several operations (a norm and a product, a whole MLP) and saves what all of them need. Beside
that it saves FP8 data as raw bytes, with scales of all sizes, and the weights that it cast to FP8: none of this is
touched. What is left, in the floats that it trains in, is told apart here, so that the policy can speak of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8hooks import roles
from fp8hooks.callsite import Call


class Part(NamedTuple):
    """Which part of a fused Function saves a tensor, `te.<module>[.<part>]`, and as what."""

    op: str
    role: str


class _Operands(NamedTuple):
    """The floating-point tensors that a Function was given.

    Attributes:
        weights: parameters, and what is a view or a cast of one.
        inputs: the others.
    """

    weights: list[Tensor]
    inputs: list[Tensor]


def part_of(tensor: Tensor, call: Call) -> Part | None:
    """What a tensor is to the Function that saves it; None for Functions that are not known here.

    Args:
        tensor: the saved tensor, a plain one.
        call: of the Function's `apply`.
    """
    known = _FUNCTIONS.get(call.func.__name__)
    if known is None or not call.func.__module__.startswith("transformer_engine."):
        return None
    name, describe = known
    operands = _operands(call)
    role = _plain_role(tensor, operands)
    if role is not None:
        return Part(f"te.{name}", role)
    part, role = describe(tensor, call, operands)
    return Part(f"te.{name}.{part}" if part else f"te.{name}", role)


def _operands(call: Call) -> _Operands:
    weights: list[Tensor] = []
    inputs: list[Tensor] = []
    for value in _flat(call.args):
        if isinstance(value, Tensor) and value.is_floating_point():
            (weights if _is_weight(value) else inputs).append(value)
    return _Operands(weights, inputs)


def _is_weight(tensor: Tensor) -> bool:
    # Other leaves that require grad are inputs of the model.
    return isinstance(tensor, nn.Parameter) or (roles.weight_like(tensor) and not tensor.is_leaf)


def _flat(values: tuple[Any, ...] | list[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) in (tuple, list):
            yield from _flat(value)
        else:
            yield value


def _plain_role(tensor: Tensor, operands: _Operands) -> str | None:
    """The role of what is saved without a loss whatever part saves it; None for the rest."""
    if roles.weight_like(tensor):
        return "weight"
    if _given(tensor, operands.inputs):
        return None
    # FP8 data that may be the input's as well is: it is only counted.
    inputs = [] if tensor.is_floating_point() else operands.inputs
    if any(_copies(tensor, weight) for weight in operands.weights) and not any(_holds(tensor, x) for x in inputs):
        return "weight"
    if not tensor.is_floating_point():
        # Raw FP8 data is an activation, but nothing that a codec takes. What else there is, offsets of sequences and
        # the like, goes on to C++ as it is.
        return "activation" if tensor.dtype is torch.uint8 else "statistic"
    return "statistic" if roles.is_statistic(tensor, max((t.numel() for t in operands.inputs), default=0)) else None


def _given(tensor: Tensor, inputs: list[Tensor]) -> bool:
    """Whether a tensor is an input, or a part of one."""
    address = tensor.untyped_storage()._cdata
    return any(roles.address_of(given) == address for given in inputs)


def _copies(tensor: Tensor, weight: Tensor) -> bool:
    """Whether a tensor may be a weight in another dtype: cast for autocast, or FP8 data."""
    if weight.dim() != 2 or tensor.dim() != 2:
        return False
    if tensor.is_floating_point():
        return tensor.dtype != weight.dtype and tuple(tensor.shape) in (tuple(weight.shape), tuple(weight.shape)[::-1])
    return _holds(tensor, weight)


def _holds(data: Tensor, tensor: Tensor) -> bool:
    """Whether raw data is of a tensor's size, by rows or by columns, in 8 bits an element or in 4."""
    width = tensor.shape[-1] if tensor.dim() else 1
    rows = tensor.numel() // max(1, width)
    return tuple(data.shape) in (
        tuple(tensor.shape),
        *((a, b // bits) for a, b in ((rows, width), (width, rows)) for bits in (1, 2)),
    )


# What is left, by Function: f(tensor, call, operands) -> part, role


def _linear(tensor: Tensor, call: Call, operands: _Operands) -> tuple[str, str]:
    return "", "activation"


def _norm_linear(tensor: Tensor, call: Call, operands: _Operands) -> tuple[str, str]:
    """The norm's input, and its output if that is not in FP8."""
    norm = _norm(call)
    if _given(tensor, operands.inputs):
        return norm, "activation"
    return _after_norm(tensor, norm, operands), "activation"


def _norm_mlp(tensor: Tensor, call: Call, operands: _Operands) -> tuple[str, str]:
    """As `_norm_linear`; between the products, which have another width, the activation's input and output."""
    part, role = _norm_linear(tensor, call, operands)
    if part != "linear" or any(tensor.shape[-1] == given.shape[-1] for given in operands.inputs):
        return part, role
    return "activation", role


def _after_norm(tensor: Tensor, norm: str, operands: _Operands) -> str:
    """The part that saves what a Function with a norm made inside."""
    # An input in another dtype was cast before the norm, and nothing tells that copy from the norm's output.
    cast = any(given.dtype != tensor.dtype and given.shape[-1] == tensor.shape[-1] for given in operands.inputs)
    return "layer_norm_or_linear" if norm == "layer_norm" and cast else "linear"


def _norm(call: Call) -> str:
    return "rms_norm" if any(value == "RMSNorm" for value in _flat(call.args) if type(value) is str) else "layer_norm"


def _attention(tensor: Tensor, call: Call, operands: _Operands) -> tuple[str, str]:
    """q, k, v, which come first among the floats, and the output, q by v in size; all else is small or a bias."""
    if len(operands.inputs) < 3:
        return "", "statistic"
    q, k, v = operands.inputs[:3]
    if any(_is_view(tensor, given) for given in (q, k)):
        return "", "attention_qk"
    output = q.numel() // q.shape[-1] * v.shape[-1]
    if _is_view(tensor, v) or (tensor.numel() == output and not _given(tensor, operands.inputs)):
        return "", "attention_vo"
    return "", "statistic"


def _is_view(tensor: Tensor, given: Tensor) -> bool:
    """Whether a tensor is all of an operand. (q, k and v may lie in one buffer.)"""
    return tensor.numel() == given.numel() and tensor.data_ptr() == _pointer(given)


def _pointer(tensor: Tensor) -> int | None:
    try:
        return tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass without storage
        return None


def _operations(tensor: Tensor, call: Call, operands: _Operands) -> tuple[str, str]:
    """One of a sequence of basic operations: which one, only a norm's width tells."""
    basic = _basic_operations(call)
    norms = [op for op in basic if type(op).__name__ == "LayerNorm" and _width(op) == tensor.shape[-1]]
    if not norms:
        return "", "activation"
    return "layer_norm" if len(norms) == len(basic) else "layer_norm_or_linear", "activation"


def _basic_operations(call: Call) -> list[Any]:
    for value in call.args:
        found = getattr(value, "_basic_ops", None)
        if found is not None:
            return list(found)
    return [value for value in _flat(call.args) if isinstance(value, nn.Module)]


def _width(norm: Any) -> int | None:
    weight = getattr(norm, "weight", None)
    return weight.shape[-1] if isinstance(weight, Tensor) else None


_Describe = Callable[[Tensor, Call, _Operands], tuple[str, str]]
_FUNCTIONS: dict[str, tuple[str, _Describe]] = {
    "_Linear": ("Linear", _linear),
    "_GroupedLinear": ("GroupedLinear", _linear),
    "_LayerNormLinear": ("LayerNormLinear", _norm_linear),
    "_LayerNormMLP": ("LayerNormMLP", _norm_mlp),
    "FusedAttnFunc": ("DotProductAttention", _attention),
    "_OperationFuserAutogradFunction": ("ops", _operations),
}
#: Names of their operations, as `fp8hooks.callsite` has them.
FUNCTIONS = frozenset(f"Function.{name}" for name in _FUNCTIONS)
