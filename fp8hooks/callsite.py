"""Who saves a tensor: the operation, and the module that it runs in.

The operation comes from a `TorchFunctionMode`, which sees torch's functions called, with their arguments; what it
cannot see (custom `autograd.Function`s; operations inside torch's own Python functions) is read off the call stack.
Answers are kept by function, code and instruction, so that a site that was seen before costs a look-up.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from fp8hooks import dynamo


class Call(NamedTuple):
    """One call of a torch function, or of a custom `autograd.Function` (its class), while it runs."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None


# These run for every operation. (A named tuple's own constructor takes twice the time of tuple's.)
_new_call: Callable[[tuple[Any, ...]], Call] = functools.partial(tuple.__new__, Call)
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled


class Op(NamedTuple):
    """An operation.

    Attributes:
        name: torch's, without underscores at the ends; `Function.<class>` for a custom `autograd.Function`;
            `ops.<library>.<name>` for an operator that a library registered; `unknown` where nothing tells.
        inner: it was called by the torch function that runs, and not with that one's arguments.
    """

    name: str
    inner: bool


UNKNOWN = Op("unknown", True)


class Tracker(TorchFunctionMode):
    """Knows, at any moment on its thread, which torch function is running (`call`), if any.

    Args:
        before: called before each function.
    """

    def __init__(self, before: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.call: Call | None = None
        self._before = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_compiling() or not _is_grad_enabled():
            return func(*args, **kwargs) if kwargs else func(*args)
        outer = self.call
        self.call = _new_call((func, args, kwargs))
        if self._before is not None:
            self._before()
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.call = outer


dynamo.skip(Tracker.__torch_function__, callees=False)
_MODE_CODE = Tracker.__torch_function__.__code__
_APPLY_CODE = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_MODULE_CODE = nn.Module._call_impl.__code__


def call_at(call: Call | None, frame: types.FrameType) -> Call | None:
    """The call that saves: of the custom `autograd.Function` that runs in a frame, or else `call`.

    Args:
        call: the torch function that runs, if known.
        frame: the frame that was executing when the pack hook was called.
    """
    if frame.f_code is not _APPLY_CODE:
        return call
    variables = frame.f_locals
    return _new_call((variables["cls"], variables["args"], variables["kwargs"]))


_ops: dict[tuple[Any, types.CodeType, int], Op] = {}
# Code and classes that are made anew for each step (exec, notebooks' cells) must not fill the memory.
_MOST_OPS = 1 << 16


def op_at(call: Call | None, frame: types.FrameType) -> Op:
    """The operation that saves.

    Args:
        call: as `call_at` gives it.
        frame: the frame that was executing when the pack hook was called.
    """
    key = (None if call is None else call.func, frame.f_code, frame.f_lasti)
    try:
        op = _ops.get(key)
    except TypeError:  # a function that can't be hashed
        return _find_op(call, frame)
    if op is None:
        op = _find_op(call, frame)
        if len(_ops) >= _MOST_OPS:
            _ops.clear()
        _ops[key] = op
    return op


def _find_op(call: Call | None, frame: types.FrameType) -> Op:
    if call is not None and frame.f_code is _APPLY_CODE:
        return Op(f"Function.{call.func.__name__}", True)
    if call is None:
        # Another library's function may have a name like one of torch's.
        found = _called_at(frame)
        return Op(found.name, True) if found is not None and _is_torchs(found, frame) else UNKNOWN
    if isinstance(call.func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _registered_op(call.func)
    outer = _plain_name(getattr(call.func, "__name__", None) or type(call.func).__name__)
    if isinstance(call.func, types.FunctionType):
        # One of torch's Python functions: what it calls is what saves.
        inner = _called_at(frame)
        if inner is not None and inner.name != outer:
            return Op(inner.name, True)
    return Op(outer, False)


def _registered_op(func: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> Op:
    """An operator called through `torch.ops`: those that are not torch's own are named `ops.<library>.<name>`."""
    qualified = func._schema.name if isinstance(func, torch._ops.OpOverload) else func._qualified_op_name
    library, _, name = qualified.partition("::")
    return Op(_plain_name(name) if library == "aten" else f"ops.{library}.{name}", False)


def _plain_name(name: str) -> str:
    """`__rmul__`, `mul_` and `_softmax` are `mul` and `softmax` to a reader."""
    plain = name.strip("_")
    if name.startswith("__") and plain[:1] in "ri" and plain[1:] in _BINARY:
        return plain[1:]
    return plain


_BINARY = frozenset({"add", "sub", "mul", "truediv", "div", "floordiv", "pow", "matmul", "mod", "and", "or", "xor"})


class _Callee(NamedTuple):
    """What a line of source calls.

    Attributes:
        name: of the operation.
        root: the variable that the source starts from (`torch` in `torch.relu(x)`, `x` in `x.relu()`); None if it
            starts from an expression, or is an operator.
        bare: the variable is the function itself.
    """

    name: str
    root: str | None = None
    bare: bool = False


_HOMES = (torch, Tensor, nn.functional, torch._C._nn, torch.special)


def _called_at(frame: types.FrameType) -> _Callee | None:
    """The torch operation that a frame is calling, from the source at its current instruction."""
    if frame.f_code is _MODE_CODE:
        return None
    found = _called_in(frame.f_code, frame.f_lasti)
    return found if found is not None and _is_torch_name(found.name) else None


@functools.cache
def _is_torch_name(name: str) -> bool:
    """Whether torch has an operation of that name; the source may call it by a local one."""
    return any(hasattr(home, name) for home in _HOMES)


def _is_torchs(callee: _Callee, frame: types.FrameType) -> bool:
    """Whether the source calls a method of a tensor, a function in one of torch's modules, or an operator."""
    if callee.root is None:
        return True
    value = _variable(frame, callee.root)
    if callee.bare:
        return any(value is getattr(home, callee.name, None) for home in _HOMES)
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] == "torch"
    return isinstance(value, Tensor)


def _variable(frame: types.FrameType, name: str) -> Any:
    """The value of a variable in a frame; None if there is none."""
    if name in frame.f_code.co_varnames or name in frame.f_code.co_freevars or name in frame.f_code.co_cellvars:
        # Before Python 3.13 this is a copy that the frame keeps, and with it all its values, unless it is emptied.
        variables = frame.f_locals
        value = variables.get(name)
        if sys.version_info < (3, 13):
            variables.clear()
        return value
    return frame.f_globals.get(name)


def _called_in(code: types.CodeType, instruction: int) -> _Callee | None:
    if sys.version_info < (3, 11):
        return None
    line, last_line, column, last_column = list(code.co_positions())[instruction // 2]
    if line is None or last_line is None or column is None or last_column is None:
        return None
    lines = linecache.getlines(code.co_filename)[line - 1 : last_line]
    if not lines:
        return None
    # Columns count bytes.
    encoded = [text.encode() for text in lines]
    encoded[-1] = encoded[-1][:last_column]
    encoded[0] = encoded[0][column:]
    try:
        # Parentheses, since an expression that spans lines is only one inside some.
        node = ast.parse(b"(" + b"".join(encoded) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return _called(node)


def _called(node: ast.expr) -> _Callee | None:
    if isinstance(node, ast.BinOp):
        operator = _OPERATORS.get(type(node.op))
        return None if operator is None else _Callee(operator)
    if not isinstance(node, ast.Call):
        return None
    target = node.func
    if isinstance(target, ast.Name):
        return _Callee(_plain_name(target.id), target.id, bare=True)
    if not isinstance(target, ast.Attribute):
        return None
    start: ast.expr = target
    while isinstance(start, ast.Attribute):
        start = start.value
    return _Callee(_plain_name(target.attr), start.id if isinstance(start, ast.Name) else None)


_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}


# Modules

# By address, since modules may define equality; the weak reference tells whether the address has been used again.
_paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}


def module_path(frame: types.FrameType | None) -> str:
    """The path, from the outermost module that is running, of the innermost one; "" outside modules."""
    # Only frames of Module.__call__ are looked into: reading f_locals of a user's frame would keep alive what its
    # variables held, until it returns.
    while frame is not None:
        if frame.f_code is _MODULE_CODE:
            module = frame.f_locals["self"]
            known = _paths.get(id(module))
            if known is not None and known[0]() is module:
                return known[1]
            return _find_path(module, frame.f_back)
        frame = frame.f_back
    return ""


def outermost_module(frame: types.FrameType | None) -> nn.Module | None:
    """The module that was called first of those that are running."""
    outermost = None
    while frame is not None:
        if frame.f_code is _MODULE_CODE:
            outermost = frame
        frame = frame.f_back
    return None if outermost is None else outermost.f_locals["self"]


# Storages of the buffers of all modules seen, weakly held, by address.
_buffers: dict[int, StorageWeakRef] = {}


def is_buffer(address: int) -> bool:
    """Whether the storage at an address is a buffer of a module that has run: held whether autograd saves it or not."""
    return address in _buffers and not _buffers[address].expired()


def _remember_buffers(root: nn.Module) -> None:
    for address in [address for address, ref in _buffers.items() if ref.expired()]:
        del _buffers[address]
    for buffer in root.buffers():
        if type(buffer) is Tensor and buffer.layout is torch.strided:
            storage = buffer.untyped_storage()
            _buffers[storage._cdata] = StorageWeakRef(storage)


def _find_path(module: nn.Module, frame: types.FrameType | None) -> str:
    for address in [address for address, (ref, _) in _paths.items() if ref() is None]:
        del _paths[address]
    root = outermost_module(frame) or module
    _remember_buffers(root)
    for name, child in root.named_modules():
        _paths[id(child)] = (weakref.ref(child), name or type(root).__name__)
    if id(module) not in _paths:
        # Called by the root's forward, but not registered in it.
        _paths[id(module)] = (weakref.ref(module), type(module).__name__)
    return _paths[id(module)][1]
