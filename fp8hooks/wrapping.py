"""Modules whose forward runs in a session: where the training loop is not the user's, or only some blocks are meant.

The module stays what it is: its class, its parameters' names, its state_dict and how FSDP wraps it. Only its forward is
another, as an attribute of the instance that goes along with copies and pickles.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from fp8hooks import dynamo
from fp8hooks.config import CompressConfig
from fp8hooks.session import Session, compress

# Where a module keeps what runs its forward.
_SLOT = "_fp8hooks"


class Compressed:
    """A method of a module, run in a session.

    Attributes:
        session: its session.
        active: whether it uses that.
    """

    def __init__(self, module: nn.Module, method: str, session: Session) -> None:
        self.session = session
        self.active = True
        self._method = method
        # What the instance had in this place before: other libraries do the same as we.
        self._before: Callable[..., Any] | None = module.__dict__.get(method)
        # A strong reference would be a cycle, and only gc could free the parameters.
        self._module = weakref.ref(module)
        self._checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.__wrapped__(*args, **kwargs)
        if not self._checked:
            self._check()
        with self.session:
            return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The method itself; `inspect.signature` looks here."""
        if self._before is not None:
            return self._before
        module = self._module()
        assert module is not None
        method: Callable[..., Any] = getattr(type(module), self._method).__get__(module)
        return method

    def _check(self) -> None:
        module = self._module()
        meta = next((name for name, p in module.named_parameters() if p.is_meta), None) if module is not None else None
        if meta is not None:
            raise RuntimeError(
                f"fp8hooks: parameter '{meta}' of {type(module).__name__} is on the meta device and has no values; "
                "call to_empty and initialize the module before its forward"
            )
        self._checked = True

    def remove(self) -> None:
        """Have the method as it was; where others have wrapped it since, do nothing from now on."""
        self.active = False
        module = self._module()
        if module is None:
            return
        module.__dict__.pop(_SLOT, None)
        if module.__dict__.get(self._method) is self:
            if self._before is None:
                del module.__dict__[self._method]
            else:
                module.__dict__[self._method] = self._before

    # Copies and pickles refer to the module that is copied or pickled with them.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _module=weakref.ref(state["_module"]))


dynamo.skip(Compressed.__call__, callees=False)


def enable(
    model: nn.Module,
    config: CompressConfig | None = None,
    /,
    *,
    memory_savings: float | str | None = None,
    method: str = "forward",
    **overrides: Any,
) -> Session:
    """Have every forward of a model run in a session of its own, for loops that are not yours.

    Args:
        model: stays what it is; deep copies and pickles of it are enabled too, each with a session of its own.
        config, memory_savings, overrides: as for `compress`.
        method: another method than forward to run in the session, as `training_step`.

    Returns:
        The session, for `report()`, `stats` and `plan`.

    Raises:
        TypeError: `model` is no module, or has no such method; a setting is unknown.
        ValueError: the model is enabled already, or checkpointed as a whole; a setting's value is not allowed.
    """
    session = compress(config, memory_savings=memory_savings, **overrides)
    _install(model, method, session, "enable")
    return session


def compress_wrapper(module: nn.Module, config: CompressConfig | None = None) -> nn.Module:
    """Have a module's forward run in a session of its own.

    For `apply_activation_checkpointing(model, checkpoint_wrapper_fn=compress_wrapper, check_fn=...)`, in the place of
    `checkpoint_wrapper`. `functools.partial(compress_wrapper, config=...)` gives it settings.

    Returns:
        The same module, so that names, keys and classes stay.

    Raises:
        TypeError, ValueError: as for `enable`.
    """
    _install(module, "forward", compress(config), "compress_wrapper")
    return module


def disable(model: nn.Module) -> None:
    """Undo `enable` and `compress_wrapper` for a model and all its submodules. Does nothing where there is nothing."""
    for module in model.modules():
        found = module.__dict__.get(_SLOT)
        if found is not None:
            found.remove()


def sessions(model: nn.Module) -> dict[str, Session]:
    """The sessions that `enable` and `compress_wrapper` have given to a model and its submodules, by path."""
    return {path: module.__dict__[_SLOT].session for path, module in model.named_modules() if _SLOT in module.__dict__}


def _install(module: object, method: str, session: Session, function: str) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{function}: {type(module).__name__} given, an nn.Module allowed")
    name = type(module).__name__
    if not callable(getattr(module, method, None)):
        raise TypeError(f"method: {method!r} given, a method of {name} allowed")
    if _SLOT in module.__dict__:
        raise ValueError(f"{function}: {name} is enabled already; fp8hooks.disable(module) first")
    if _is_checkpointed(module):
        raise ValueError(
            f"{function}: {name} is checkpointed already, and checkpointing saves nothing that could be compressed; "
            "use one of the two"
        )
    compressed = Compressed(module, method, session)
    module.__dict__[_SLOT] = module.__dict__[method] = compressed


def _is_checkpointed(module: nn.Module) -> bool:
    """Whether all that runs in a module's forward is recomputed: torch's wrapper, or a layer of transformers."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if "CheckpointWrapper" in kinds:
        return True
    return "GradientCheckpointingLayer" in kinds and bool(getattr(module, "gradient_checkpointing", False))
