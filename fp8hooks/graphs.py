"""What a compiled graph tells of a tensor that it saves: who makes it, who uses it, and so its site.

Looked at once, while AOTAutograd inlines the hooks into a pair of forward and backward graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fp8hooks import callsite
from fp8hooks.saved import Site

# AOTAutograd's function that calls the hooks with fake tensors, and its variables. From torch 2.12 on a part of them is
# also in a context for hooks, which lacks the inputs that are static.
_INLINER = "maybe_inline_graph_saved_tensors_hooks"

# An operand this many times smaller than the largest one that the graph saves is a statistic of it; see
# `fp8hooks.roles`.
_SMALL = 8

# Operations that move, cast or view and do nothing else.
_MOVES = frozenset(
    {"view", "unsafe_view", "reshape", "permute", "transpose", "t", "squeeze", "unsqueeze", "expand", "clone", "alias",
     "to_copy", "convert_element_type", "detach", "slice", "select", "as_strided", "getitem"}
)  # fmt: skip

# Operations of graphs by the name that they have in eager, where the policy speaks of them.
_EAGER_NAMES = {
    "var_mean": "layer_norm",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "native_batch_norm_legit": "batch_norm",
    "native_batch_norm_legit_functional": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
    "addmm": "linear",
    "mm": "linear",
}

# Arguments of attention's backward by what they are.
_ATTENTION_ROLES = {"query": "attention_qk", "key": "attention_qk", "value": "attention_vo", "out": "attention_vo"}
# Those of `flex_attention_backward`, by position; what follows are statistics.
_FLEX_ROLES = ("attention_qk", "attention_qk", "attention_vo", "attention_vo")


class SavedNode(NamedTuple):
    """A node whose value is saved from a forward graph to a backward graph.

    Attributes:
        static: the forward graph's inputs that stay from call to call (parameters and buffers); None if not known.
    """

    node: fx.Node
    forward: fx.Graph
    backward: fx.Graph
    static: frozenset[fx.Node] | None


def saved_node() -> SavedNode | None:
    """The node that hooks are being inlined for; None if this version of torch does not tell."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != _INLINER:
        frame = frame.f_back
    variables = frame.f_locals if frame.f_code.co_name == _INLINER else {}
    node, forward, backward = (variables.get(name) for name in ("saved", "fw_g", "bw_g"))
    if not isinstance(node, fx.Node) or not isinstance(forward, fx.Graph) or not isinstance(backward, fx.Graph):
        return None
    static = variables.get("static_input_indices")
    inputs = list(forward.find_nodes(op="placeholder"))
    known = None if static is None else frozenset(inputs[i] for i in static if i < len(inputs))
    return SavedNode(node, forward, backward, known)


def sites_of(tensor: Tensor, saved: SavedNode | None) -> list[Site]:
    """The sites at which a tensor is saved: one for each operation that uses it in forward, the one that makes it last.

    The role is the same in all.
    """
    if saved is None:
        return [Site("", "compiled", _role_by_shape(tensor, 0))]
    role = _role(tensor, saved)
    module = _module(saved.node)
    users = [op_name(user) for user in users_of(saved.node) if user.op == "call_function"]
    return [Site(module, name, role) for name in dict.fromkeys((*users, op_name(saved.node)))]


def _role(tensor: Tensor, saved: SavedNode) -> str:
    if tensor.dtype is torch.bool:
        return "mask"
    if not tensor.dtype.is_floating_point:
        return "index"
    if _is_weight(saved):
        return "weight"
    for node, user in _backward_uses(saved):
        role = _attention_role(node, user)
        if role is not None:
            return role
    largest = max((_numel(other) for other in saved.forward.output_node().all_input_nodes), default=0)
    role = _role_by_shape(tensor, largest)
    if role == "activation" and _is_exponentiated(saved):
        return "log_prob"
    return role


def _role_by_shape(tensor: Tensor, largest: int) -> str:
    small = tensor.dim() < 2 or tensor.shape[-1] == 1 or hint(tensor.numel()) * _SMALL <= largest
    return "statistic" if small else "activation"


def _is_weight(saved: SavedNode) -> bool:
    """Whether the tensor is a static input, or moved or cast from one."""
    node = saved.node
    while node.op == "call_function" and op_name(node) in _MOVES and node.all_input_nodes:
        node = node.all_input_nodes[0]
    if node.op != "placeholder":
        return node.op == "get_attr"
    if saved.static is None:
        return node is not saved.node  # a cast or a view of an input: of a weight, mostly
    return node in saved.static


def users_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that use a value, or what was merely moved or cast from it."""
    for user in node.users:
        if user.op == "call_function" and op_name(user) in _MOVES:
            yield from users_of(user)
        else:
            yield user


def _backward_uses(saved: SavedNode) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The backward graph's nodes that use the tensor, each with the node that it takes for it."""
    waiting = [node for node in saved.backward.find_nodes(op="placeholder") if node.name == saved.node.name]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user.op == "call_function" and op_name(user) in _MOVES:
                waiting.append(user)
            else:
                yield node, user


def _attention_role(node: fx.Node, user: fx.Node) -> str | None:
    """The role of an argument of attention's backward; None if that is not what uses it."""
    name = op_name(user)
    if name == "flex_attention_backward":
        position = list(user.args).index(node) if node in user.args else len(_FLEX_ROLES)
        return _FLEX_ROLES[position] if position < len(_FLEX_ROLES) else "statistic"
    schema = getattr(user.target, "_schema", None)
    if schema is None or "attention" not in name or "backward" not in name:
        return None
    named = [(argument.name, value) for argument, value in zip(schema.arguments, user.args, strict=False)]
    for argument, value in (*named, *user.kwargs.items()):
        if value is node:
            return _ATTENTION_ROLES.get(argument, "statistic")
    return "statistic"


def _is_exponentiated(saved: SavedNode) -> bool:
    """Whether backward rebuilds probabilities from the tensor: exponentiates it, less some statistics."""
    waiting = [(user, 0) for _, user in _backward_uses(saved)]
    while waiting:
        node, depth = waiting.pop()
        if node.op != "call_function":
            continue
        name = op_name(node)
        if name == "exp":
            return True
        if depth < 4 and (name == "sub" or name in _MOVES):
            waiting += [(user, depth + 1) for user in node.users]
    return False


def op_name(node: fx.Node) -> str:
    """A node's operation as the policy names it; `ops.<library>.<name>` for one of another library than torch."""
    if node.op != "call_function":
        return node.op
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        name = callsite._plain_name(getattr(target, "__name__", str(target)))
        return f"ops.{name}" if "triton" in name else name
    library, _, qualified = target._schema.name.partition("::")
    name = callsite._plain_name(qualified)
    if library not in ("aten", "prims"):
        return f"ops.{library}.{name}"
    if name.startswith("scaled_dot_product") and "backward" not in name:
        return "scaled_dot_product_attention"
    return _EAGER_NAMES.get(name, name)


def _module(node: fx.Node) -> str:
    """The path of the module that makes a value."""
    stack = node.meta.get("nn_module_stack") or {}
    path, _ = list(stack.values())[-1] if stack else ("", None)
    return str(path).removeprefix("L['self'].").removeprefix("L['self']").replace("_modules.", "")


def hint(size: Any) -> int:
    """A size, or the one that a dynamic one had at first; 0 where there was none."""
    if isinstance(size, int):
        return size
    found = getattr(getattr(size, "node", None), "hint", None)
    return int(found) if found is not None else 0


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    return hint(value.numel()) if isinstance(value, Tensor) and value.dtype.is_floating_point else 0


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return hint(tensor.numel()) * tensor.itemsize
