"""Keeps Dynamo off what is ours: the mode that watches operations, and the hooks that eager operations call."""

from __future__ import annotations

import sys
from typing import Any

from torch.overrides import TorchFunctionMode

_hidden: set[type] = set()
_is_hiding = False


def hide(mode: type[TorchFunctionMode]) -> None:
    """Have Dynamo, once it is imported, overlook modes of a class. Cheap, to be called before any use of the mode.

    Its tracer would inline the mode at each operation, and with a mode it can't trace methods of `Tensor` that are
    written in Python (`unflatten`, `split`, ...). The mode's part is eager operations alone: in a graph sites are told
    from the graph. It stays on the stack, where guards and graph breaks expect it, and is taken for no mode at all.
    """
    global _is_hiding
    _hidden.add(mode)
    module = sys.modules.get("torch._dynamo.variables.torch_function")
    if module is None or _is_hiding:
        return
    state = getattr(module, "SymbolicTorchFunctionState", None)
    if state is not None and hasattr(state, "in_torch_function_mode"):
        state.in_torch_function_mode = _in_torch_function_mode
    _is_hiding = True


def _in_torch_function_mode(state: Any) -> bool:
    return any(type(_mode_of(variable)) not in _hidden for variable in state.mode_stack)


def _mode_of(variable: Any) -> Any:
    """The mode behind one of Dynamo's variables; asking one that is lazy for an attribute would put a guard on it."""
    is_lazy = hasattr(type(variable), "is_realized")
    if not is_lazy:
        return getattr(variable, "value", None)
    return variable.realize().value if variable.is_realized() else variable.original_value()


def skip(*functions: Any, callees: bool = True) -> None:
    """Have Dynamo not compile functions when they are called while it looks on; by default, nor what they call.

    It looks on between the graphs of a compiled model, where operations run in eager and call hooks. A function that it
    compiles breaks its graph at a call of one of these.
    """
    from torch._C._dynamo import eval_frame

    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if callees else action.DEFAULT)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
        if callees:
            function._torchdynamo_disable = True  # as `torch.compiler.disable` marks a function, which imports Dynamo


def cache_hits() -> int:
    """How many graphs AOTAutograd has taken from its cache in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["aot_autograd"].get("autograd_cache_hit", 0))
