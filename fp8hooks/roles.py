"""What a saved tensor is to its operation: its role.

Runs for every tensor that autograd saves, so it looks at as little as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8hooks.callsite import Call, Op

# Operations by what their saved tensors mean. Names are torch's, without underscores at the ends.
_ATTENTION = frozenset({"scaled_dot_product_attention", "flex_attention"})
_LOG_PROB = frozenset({"log_softmax", "cross_entropy", "cross_entropy_loss", "logsigmoid", "nll_loss"})
_PROBABILITY = frozenset({"softmax", "sigmoid", "softmin", "gumbel_softmax"})
_NORM = frozenset({"layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm", "local_response_norm"})
_GRID = frozenset({"grid_sample", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d"})
# Their operands differ in size for other reasons than broadcasting.
_CONTRACTION = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "addmv", "mv", "einsum", "tensordot", "bilinear"}
    | {f"conv{n}d" for n in (1, 2, 3)}
    | {f"conv_transpose{n}d" for n in (1, 2, 3)}
    | {"lstm", "gru", "rnn_tanh", "rnn_relu", "convolution", "embedding_bag"}
)
# Custom autograd.Functions whose backward is known, by the name of their class, wherever they are copied to.
_ATTENTION_FUNCTIONS = (
    *(f"FlashAttn{kind}Func" for kind in ("", "QKVPacked", "KVPacked", "Varlen", "VarlenQKVPacked", "VarlenKVPacked")),
    "_fMHA",  # xFormers
)
_NORM_FUNCTIONS = (
    "LigerRMSNormFunction", "LigerLayerNormFunction", "LigerGroupNormFunction", "LigerFusedAddRMSNormFunction",
    *(f"Fused{kind}Norm{tail}Function" for kind in ("Layer", "RMS")
      for tail in ("", "Affine", "AffineMixedDtypes")),  # Apex
    "SyncBatchNorm",
)  # fmt: skip
_PRODUCT_FUNCTIONS = ("LigerSiLUMulFunction", "LigerGELUMulFunction")
#: Names of their operations.
KNOWN_FUNCTIONS = frozenset(f"Function.{n}" for n in (*_ATTENTION_FUNCTIONS, *_NORM_FUNCTIONS, *_PRODUCT_FUNCTIONS))
# An operand, or a by-product, this many times smaller than the largest operand is a statistic of it.
_SMALL = 8


# dtypes of masks and indices.
_WHOLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex)
)


def role_of(tensor: Tensor, op: Op, call: Call | None) -> str:
    """One of `fp8hooks.config.ROLES`, for a tensor that `op` saves; `call` is the running call, if known."""
    dtype = tensor.dtype
    if dtype in _WHOLE:
        return "mask" if dtype is torch.bool else "index"
    if weight_like(tensor):
        return "weight"
    position, largest, is_copy = _place(tensor, call) if call is not None else (None, 0, False)
    if is_copy:
        return "weight"
    return _BY_OP.get(op.name, _elementwise_role)(tensor, op, call, position, largest)


# Operations that make the indices which they save: positions in what they are given.
_INDEXING = frozenset(
    {f"max_pool{n}d{tail}" for n in (1, 2, 3) for tail in ("", "_with_indices")}
    | {f"adaptive_max_pool{n}d" for n in (2, 3)}
    | {"topk", "sort", "argsort", "max", "min", "kthvalue", "median", "mode", "cummax", "cummin"}
)


def limit_of(op: Op, call: Call | None) -> int | None:
    """What all of an operation's integers are known to be under, without a look at them; None if not known."""
    if call is None or op.name not in _INDEXING:
        return None
    return max((operand.numel() for _, operand in tensors_of(call)), default=None)


def weight_like(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter (or another leaf that requires grad), a view of one, or a cast copy of one.

    Modules hold their parameters anyway, and autocast its copies of them.
    """
    base = tensor._base
    if base is not None:
        if type(base) is nn.Parameter or (base.requires_grad and base.is_leaf):
            return True
        if tensor.grad_fn is None:
            # A view made where nothing is recorded, inside a custom Function say, has no history and so looks a leaf.
            return base.requires_grad and _only_casts_a_leaf(base)
    if tensor.requires_grad:
        return tensor.is_leaf or _only_casts_a_leaf(tensor)
    return type(tensor) is nn.Parameter


# Nodes that move or cast and do nothing else.
_MOVES = frozenset(
    f"{name}Backward0"
    for name in ("ToCopy", "T", "Transpose", "View", "ReshapeAlias", "UnsafeView", "Permute", "Alias", "Slice",
                 "Select", "Expand", "Squeeze", "Unsqueeze", "AsStrided", "Detach", "Split", "SplitWithSizes", "Unbind")
)  # fmt: skip


def _only_casts_a_leaf(tensor: Tensor) -> bool:
    node = tensor.grad_fn
    if node is None or node.name() not in _MOVES:
        return False  # nearly always
    for _ in range(4):
        if node is None:
            return False
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            return True
        if name not in _MOVES:
            return False
        node = node.next_functions[0][0]
    return False


def _place(tensor: Tensor, call: Call) -> tuple[int | str | None, int, bool]:
    """Which argument the tensor is, the elements of the largest argument, and whether it copies a parameter."""
    position: int | str | None = None
    largest = 0
    address = -1
    for at, operand in enumerate(call.args):
        kind = type(operand)
        if kind is not Tensor and kind is not nn.Parameter:
            if isinstance(operand, Tensor | list | tuple):
                return _place_among_all(tensor, call)
            continue
        numel = operand.numel()
        if numel > largest:
            largest = numel
        if position is None:
            if operand is tensor:
                position = at
                continue
            if address == -1:
                address = tensor.untyped_storage()._cdata
            if address_of(operand) == address:
                position = at
                continue
        if kind is nn.Parameter and _copies(tensor, operand):
            return at, largest, True
    if position is None and call.kwargs:
        return _place_among_all(tensor, call)
    return position, largest, False


def _place_among_all(tensor: Tensor, call: Call) -> tuple[int | str | None, int, bool]:
    """As `_place`, with keyword arguments, subclasses, and tensors in lists."""
    position: int | str | None = None
    largest = 0
    address = tensor.untyped_storage()._cdata
    for at, operand in tensors_of(call):
        largest = max(largest, operand.numel())
        if position is None and (operand is tensor or address_of(operand) == address):
            position = at
        elif type(operand) is nn.Parameter and _copies(tensor, operand):
            return at, largest, True
    return position, largest, False


def address_of(tensor: Tensor) -> int | None:
    """The address of a tensor's storage object; None if it has none."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse, or another tensor without storage
        return None


def _copies(tensor: Tensor, parameter: Tensor) -> bool:
    """A cast copy that autocast made of a frozen parameter: nothing in the graph leads back to it."""
    return parameter.dtype != tensor.dtype and (
        parameter.shape == tensor.shape or parameter.shape == tensor.shape[::-1]
    )


def tensors_of(call: Call) -> Iterator[tuple[int | str, Tensor]]:
    """The tensors among a call's arguments, with their positions or names; lists are looked into."""
    position: int | str
    for position, value in enumerate(call.args):
        yield from _tensors_in(position, value)
    if call.kwargs:
        for position, value in call.kwargs.items():
            yield from _tensors_in(position, value)


def _tensors_in(position: int | str, value: Any) -> Iterator[tuple[int | str, Tensor]]:
    if isinstance(value, Tensor):
        yield position, value
    elif type(value) in (list, tuple):
        for item in value:
            if isinstance(item, Tensor):
                yield position, item


# Roles by kind of operation: f(tensor, op, call, position, largest) -> role


def _elementwise_role(tensor: Tensor, op: Op, call: Call | None, position: int | str | None, largest: int) -> str:
    return "statistic" if is_statistic(tensor, largest) else "activation"


def is_statistic(tensor: Tensor, largest: int) -> bool:
    """Whether a tensor is so much smaller than the largest operand, or a number a row, that it sums something up."""
    return tensor.numel() * _SMALL <= largest or (tensor.dim() > 0 and tensor.shape[-1] == 1)


def _contraction_role(tensor: Tensor, op: Op, call: Call | None, position: int | str | None, largest: int) -> str:
    return "activation"


def _norm_role(tensor: Tensor, op: Op, call: Call | None, position: int | str | None, largest: int) -> str:
    # What is saved beside the input and, in some, the normalized input: mean, rstd, running statistics.
    return "activation" if tensor.numel() == largest else "statistic"


def _grid_role(tensor: Tensor, op: Op, call: Call | None, position: int | str | None, largest: int) -> str:
    # The grid says where to read: a position that moves past a pixel's edge has another gradient altogether.
    return "activation" if position in (0, "input") else "statistic"


def _log_prob_role(tensor: Tensor, op: Op, call: Call | None, position: int | str | None, largest: int) -> str:
    if position is None and tensor.dim() > 0:
        return "log_prob"
    return _elementwise_role(tensor, op, call, position, largest)


def _probability_role(tensor: Tensor, op: Op, call: Call | None, position: int | str | None, largest: int) -> str:
    return "probability" if position is None else _elementwise_role(tensor, op, call, position, largest)


def _attention_role(tensor: Tensor, op: Op, call: Call | None, position: int | str | None, largest: int) -> str:
    """Roles in scaled dot product attention, whose arguments are query, key, value, mask."""
    if op.inner or call is None:
        # Inside another torch function (multi_head_attention_forward), where arguments are not known.
        return _attention_by_product(tensor, 4, "attention_qk")
    if position in (0, 1, "query", "key"):
        return "attention_qk"
    if position in (2, "value"):
        return "attention_vo"
    if position is not None:
        # An additive mask or bias: it stands in the exponent, and many layers share it.
        return "statistic"
    query = next(operand for _, operand in tensors_of(call))
    return _attention_by_product(tensor, query.dim(), "attention_vo" if tensor.shape == query.shape else "attention_qk")


def _attention_by_product(tensor: Tensor, dims: int, otherwise: str) -> str:
    """The role of what attention makes itself, for a query of `dims` dimensions.

    Fused kernels save the output and logsumexp, [batch, heads, length], with a unit dimension after from cuDNN. The
    composite of plain operations saves the probabilities, dropout's mask, and operands of products in three
    dimensions, none of which backward exponentiates.
    """
    node = tensor.grad_fn
    if node is not None and "Softmax" in node.name():
        return "probability"
    if node is None and tensor._base is None:
        return "statistic" if tensor.dim() < dims or tensor.shape[-1] == 1 else "mask"
    return "activation" if tensor.dim() < dims else otherwise


def _result(tensor: Tensor, op: Op) -> bool:
    """Whether a custom Function returns this tensor."""
    node = tensor.grad_fn
    return node is not None and node.name() == f"{op.name.removeprefix('Function.')}Backward"


def _made_inside(tensor: Tensor) -> bool:
    """Whether a custom Function made this tensor for itself: it is no operand with a history, nor a view of one."""
    return tensor.grad_fn is None and tensor._base is None and not tensor.requires_grad


def _fused_attention_role(tensor: Tensor, op: Op, call: Call | None, position: int | str | None, largest: int) -> str:
    """q, k, v, [batch, length, heads, width] or packed; the output, alike; logsumexp in float32, without the width."""
    if _result(tensor, op):
        return "attention_vo"
    if not _made_inside(tensor):
        return "attention_qk"  # or v, which nothing tells from them
    return "statistic" if tensor.dtype is torch.float32 and tensor.dim() < 4 else "attention_vo"


def _fused_norm_role(tensor: Tensor, op: Op, call: Call | None, position: int | str | None, largest: int) -> str:
    """The input, or the output in its place; mean and rstd in float32."""
    return "statistic" if tensor.dtype is torch.float32 and _made_inside(tensor) else "activation"


_Role = Callable[[Tensor, Op, Call | None, "int | str | None", int], str]
_BY_OP: dict[str, _Role] = {
    name: role
    for names, role in (
        (_CONTRACTION, _contraction_role),
        (_NORM, _norm_role),
        (_LOG_PROB, _log_prob_role),
        (_PROBABILITY, _probability_role),
        (_ATTENTION, _attention_role),
        (_GRID, _grid_role),
        ([f"Function.{name}" for name in _ATTENTION_FUNCTIONS], _fused_attention_role),
        ([f"Function.{name}" for name in _NORM_FUNCTIONS], _fused_norm_role),
    )
    for name in names
}
