"""Who saves a tensor, and as what: the operation, the module and the role.

The operation comes from a `TorchFunctionMode`, which sees torch's functions called, with their arguments; what it
cannot see (custom `autograd.Function`s; operations inside torch's own Python functions) is read off the call stack.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fp8hooks.saved import Site


class Call(NamedTuple):
    """One call of a torch function, while it runs."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Tracker(TorchFunctionMode):
    """Knows, at any moment on its thread, which torch function is running (`call`), if any."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Call | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outer = self.call
        self.call = Call(func, args, kwargs or {})
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.call = outer


_MODE_CODE = Tracker.__torch_function__.__code__
_APPLY_CODE = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_MODULE_CODE = nn.Module._call_impl.__code__

# Operations by what their saved tensors mean. Names are torch's, without underscores at the ends.
_ATTENTION = frozenset({"scaled_dot_product_attention", "flex_attention"})
_LOG_PROB = frozenset({"log_softmax", "cross_entropy", "cross_entropy_loss", "logsigmoid", "nll_loss"})
_PROBABILITY = frozenset({"softmax", "sigmoid", "softmin", "gumbel_softmax"})
_NORM = frozenset({"layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm", "local_response_norm"})
# Their operands differ in size for other reasons than broadcasting.
_CONTRACTION = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "addmv", "mv", "einsum", "tensordot", "bilinear"}
    | {f"conv{n}d" for n in (1, 2, 3)}
    | {f"conv_transpose{n}d" for n in (1, 2, 3)}
    | {"lstm", "gru", "rnn_tanh", "rnn_relu", "convolution", "embedding_bag", "grid_sample", "grid_sampler"}
)
# An operand, or a by-product, this many times smaller than the largest operand is a statistic of it.
_SMALL = 8


def weight_like(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter (or another leaf that requires grad), a view of one, or a cast copy of one.

    Modules hold their parameters anyway, and autocast its copies of them.
    """
    if isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
        return True
    base = tensor._base
    if base is not None and (isinstance(base, nn.Parameter) or (base.requires_grad and base.is_leaf)):
        return True
    return _only_casts_a_leaf(tensor)


# Nodes that move or cast and do nothing else.
_MOVES = frozenset(
    f"{name}Backward0"
    for name in ("ToCopy", "T", "Transpose", "View", "ReshapeAlias", "UnsafeView", "Permute", "Alias", "Slice",
                 "Select", "Expand", "Squeeze", "Unsqueeze", "AsStrided", "Detach", "Split", "SplitWithSizes", "Unbind")
)  # fmt: skip


def _only_casts_a_leaf(tensor: Tensor) -> bool:
    node = tensor.grad_fn
    cast = False
    for _ in range(4):
        if node is None:
            return False
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            return cast
        if name not in _MOVES:
            return False
        cast = True
        node = node.next_functions[0][0]
    return False


def site_of(tensor: Tensor, call: Call | None, frame: types.FrameType | None) -> Site:
    """The site of a plain tensor that is being saved.

    Args:
        tensor: what autograd saves.
        call: the torch function that runs, if known.
        frame: the frame that was executing when the pack hook was called.
    """
    op = op_name(call, frame)
    return Site(module_path(frame), op, role_of(tensor, op, call))


def role_of(tensor: Tensor, op: str, call: Call | None) -> str:
    """One of `fp8hooks.config.ROLES`."""
    if tensor.dtype == torch.bool:
        return "mask"
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return "index"
    operands = [] if call is None else list(_tensors(call))
    if weight_like(tensor) or any(_copy_of_parameter(tensor, operand) for _, operand in operands):
        return "weight"
    position = next((at for at, operand in operands if same_storage(operand, tensor)), None)
    largest = max((operand.numel() for _, operand in operands), default=0)
    if op in _ATTENTION:
        if call is not None and _name(call.func) == op:
            return _attention_role(tensor, position, operands)
        return _inner_attention_role(tensor)
    if tensor.dim() > 0 and tensor.shape[-1] == 1 and op not in _CONTRACTION:
        return "statistic"
    if op in _NORM:
        # What is saved beside the input and, in some, the normalized input: mean, rstd, running statistics.
        return "activation" if tensor.numel() == largest else "statistic"
    if position is None and op in _LOG_PROB:
        return "log_prob"
    if position is None and op in _PROBABILITY:
        return "probability"
    if op not in _CONTRACTION and tensor.numel() * _SMALL <= largest:
        return "statistic"
    return "activation"


def _attention_role(tensor: Tensor, position: int | str | None, operands: list[tuple[int | str, Tensor]]) -> str:
    """Roles in scaled dot product attention, whose arguments are query, key, value, mask."""
    if position in (0, 1, "query", "key"):
        return "attention_qk"
    if position in (2, "value"):
        return "attention_vo"
    if position is not None:
        # An additive mask or bias: it stands in the exponent, and many layers share it.
        return "statistic"
    query = operands[0][1]
    if tensor.shape[-1] == 1 or tensor.dim() < query.dim() and tensor._base is None and tensor.grad_fn is None:
        # logsumexp: [batch, heads, length], with a unit dimension after from cuDNN.
        return "statistic"
    if tensor.shape[-1] == query.shape[-1]:
        return "attention_vo" if tensor.shape == query.shape else "attention_qk"
    key = operands[1][1] if len(operands) > 1 else query
    return "probability" if tensor.shape[-1] == key.shape[-2] else "attention_qk"


def _inner_attention_role(tensor: Tensor) -> str:
    """The role where the arguments are not known: attention inside `multi_head_attention_forward`.

    logsumexp has three dimensions and comes from no recorded operation; what else has three is a view or a product.
    """
    fresh = tensor.grad_fn is None and tensor._base is None
    return "statistic" if tensor.dim() < 4 and fresh else "attention_qk"


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory, as far as can be told cheaply; False for tensors without storage."""
    try:
        return a is b or a.untyped_storage()._cdata == b.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return False


def _copy_of_parameter(tensor: Tensor, operand: Tensor) -> bool:
    """A cast copy that autocast made of a frozen parameter: nothing in the graph leads back to it."""
    return (
        isinstance(operand, nn.Parameter)
        and operand.dtype != tensor.dtype
        and operand.numel() == tensor.numel()
        and (operand.shape == tensor.shape or operand.shape == tensor.shape[::-1])
    )


def _tensors(call: Call) -> Iterator[tuple[int | str, Tensor]]:
    """The tensors among a call's arguments, with their positions or names; lists are looked into."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    for position, value in arguments:
        if isinstance(value, Tensor):
            yield position, value
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, Tensor):
                    yield position, item


# Operation names


def op_name(call: Call | None, frame: types.FrameType | None) -> str:
    """The name of the operation that saves: torch's own, or `Function.<class>` for a custom `autograd.Function`."""
    if frame is not None and frame.f_code is _APPLY_CODE:
        return f"Function.{frame.f_locals['cls'].__name__}"
    if call is None:
        return _op_at(frame) or "unknown"
    if isinstance(call.func, types.FunctionType):
        # One of torch's Python functions: what it calls is what saves.
        return _op_at(frame) or _name(call.func)
    return _name(call.func)


def _name(func: Any) -> str:
    return _plain_name(getattr(func, "__name__", None) or type(func).__name__)


def _plain_name(name: str) -> str:
    """`__rmul__`, `mul_` and `_softmax` are `mul` and `softmax` to a reader."""
    plain = name.strip("_")
    if name.startswith("__") and plain[:1] in "ri" and plain[1:] in _BINARY:
        return plain[1:]
    return plain


_BINARY = frozenset({"add", "sub", "mul", "truediv", "div", "floordiv", "pow", "matmul", "mod", "and", "or", "xor"})


def _op_at(frame: types.FrameType | None) -> str | None:
    """The torch operation that a frame is calling, from the source at its current instruction."""
    if frame is None or frame.f_code is _MODE_CODE:
        return None
    name = _op_in(frame.f_code, frame.f_lasti)
    return name if name is not None and _is_torch_name(name) else None


@functools.cache
def _is_torch_name(name: str) -> bool:
    """Whether torch has an operation of that name; the source may call it by a local one."""
    return any(hasattr(home, name) for home in (torch, Tensor, nn.functional, torch._C._nn, torch.special))


@functools.lru_cache(maxsize=8192)
def _op_in(code: types.CodeType, instruction: int) -> str | None:
    if sys.version_info < (3, 11):
        return None
    line, last_line, column, last_column = list(code.co_positions())[instruction // 2]
    if None in (line, last_line, column, last_column):
        return None
    lines = linecache.getlines(code.co_filename)[line - 1 : last_line]
    if not lines:
        return None
    # Columns count bytes.
    encoded = [text.encode() for text in lines]
    encoded[-1] = encoded[-1][:last_column]
    encoded[0] = encoded[0][column:]
    try:
        node = ast.parse(b"".join(encoded).decode().strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return _called(node)


def _called(node: ast.expr) -> str | None:
    if isinstance(node, ast.Call):
        target = node.func
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", None)
        return None if name is None else _plain_name(name)
    if isinstance(node, ast.BinOp):
        return _OPERATORS.get(type(node.op))
    return None


_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}


# Module paths

# By address, since modules may define equality; the weak reference tells whether the address has been used again.
_paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}


def module_path(frame: types.FrameType | None) -> str:
    """The path, from the outermost module that is running, of the innermost one; "" outside modules."""
    module, frame = _innermost_module(frame)
    if module is None:
        return ""
    known = _paths.get(id(module))
    if known is not None and known[0]() is module:
        return known[1]
    return _find_path(module, frame)


def _innermost_module(frame: types.FrameType | None) -> tuple[nn.Module | None, types.FrameType | None]:
    while frame is not None:
        if frame.f_code is _MODULE_CODE:
            return frame.f_locals["self"], frame.f_back
        frame = frame.f_back
    return None, None


def _find_path(module: nn.Module, frame: types.FrameType | None) -> str:
    root = module
    while True:
        outer, frame = _innermost_module(frame)
        if outer is None:
            break
        root = outer
    for name, child in root.named_modules():
        _paths[id(child)] = (weakref.ref(child), name or type(root).__name__)
    if root is not module and id(module) not in _paths:
        # Called by the root's forward, but not registered in it.
        _paths[id(module)] = (weakref.ref(module), type(module).__name__)
    return _paths[id(module)][1]
