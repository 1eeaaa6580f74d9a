"""`compress()`, and the session that it makes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import types
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8hooks import callsite, compiled, dynamo, plots
from fp8hooks.config import CompressConfig, check_fields
from fp8hooks.offload import Offloader
from fp8hooks.packer import Packer
from fp8hooks.plan import Plan
from fp8hooks.planner import Recorder, make_plan
from fp8hooks.policy import Policy
from fp8hooks.recipes import Recipes
from fp8hooks.report import Report, format_bytes
from fp8hooks.saved import Saved
from fp8hooks.stats import Ledger, Stats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_log = logging.getLogger(__name__)


def compress(
    config: CompressConfig | None = None, /, *, memory_savings: float | str | None = None, **overrides: Any
) -> Session:
    """A session: a context manager around forward that stores what autograd saves in 8 bits an element.

    Forward's results are bit-identical. Backward may run anywhere later. The session can be entered again and again
    (one for a training loop), nested, and shared by threads.

    Args:
        config: settings; those named besides override it.
        memory_savings: see `CompressConfig`.
        **overrides: any other field of `CompressConfig`.

    Raises:
        TypeError, ValueError: an unknown setting, or a value that is not allowed.

    Example:
        >>> import torch, fp8hooks
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        >>> with fp8hooks.compress() as session:
        ...     loss = model(torch.randn(256, 64)).square().mean()
        >>> loss.backward()
        >>> session.stats.savings > 0.5
        True
    """
    if config is not None and not isinstance(config, CompressConfig):
        raise TypeError(f"config: {config!r} given, a CompressConfig allowed")
    check_fields(overrides)
    if memory_savings is not None:
        overrides["memory_savings"] = memory_savings
    return Session(dataclasses.replace(config or CompressConfig(), **overrides))


class Session:
    """What `compress` returns. Attributes and methods may be used from any thread.

    Attributes:
        config: its `CompressConfig`.
    """

    def __init__(self, config: CompressConfig) -> None:
        self.config = config
        self._policy = Policy(config)
        self._hooks = compiled.hooks(config)
        self._recipes = Recipes(self._policy, config)
        self._ledger = Ledger()
        self._contexts = threading.local()
        self._lock = threading.Lock()
        self._open = 0
        self._plan: Plan | None = None
        self._plan_given = False
        # Of the entries that the plan was made from.
        self._recorders: list[Recorder] = []
        self._offloader = None if config.offload is False else Offloader(config.host_budget)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy (of a model that has one) starts with the settings and the plan, and counts for itself.
        return _restored, (self.config, self._plan)

    @property
    def stats(self) -> Stats:
        """What the latest step saved, a step being the time from the first entry to the last exit."""
        return self._ledger.stats()

    @property
    def held_bytes(self) -> int:
        """Bytes of compressed tensors alive now, whatever step they are from."""
        return self._ledger.held_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that saved tensors take now, whatever step they are from."""
        return 0 if self._offloader is None else self._offloader.pool.collect()

    @property
    def plan(self) -> Plan | None:
        """What becomes of each save: made from the first step if memory was asked for, or set by you; else None.

        One that was made is made anew when a later step saves what it does not name. One that was set stays: set what
        another process made, and this session follows it from the next step on; set None, and a new one is made, if
        memory is asked for.

        Raises:
            TypeError: what is set is neither.
        """
        return self._plan

    @plan.setter
    def plan(self, plan: Plan | None) -> None:
        if plan is not None and not isinstance(plan, Plan):
            raise TypeError(f"plan: {plan!r} given, a Plan or None allowed")
        self._plan, self._plan_given, self._recorders = plan, plan is not None, []

    @property
    def compiled(self) -> list[compiled.Compiled]:
        """What graphs that `torch.compile` made in sessions of this config hold, tensor by tensor, for each call.

        Graphs that came from a cache on disk are not among them.
        """
        return list(self._hooks.compiled)

    def report(self, by_module: bool = False) -> Report:
        """`stats` as a table, to print; with a row for each module on request."""
        return Report(self.stats, by_module, self.compiled, self._plan)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Bars of the latest step's saved bytes, before and after, by operation and by role.

        Args:
            path: of a picture to write, in the format that its suffix names.

        Returns:
            The figure, of matplotlib.

        Raises:
            ImportError: there is no matplotlib.
        """
        figure = plots.saved_bytes(self.stats)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    def __enter__(self) -> Session:
        with self._lock:
            if self._open == 0:
                self._ledger.begin_step()
            self._open += 1
        packer = Packer(self._policy, self._recipes, self._ledger, self.config, self._plan, self._offloader)
        context = _Context(self._hooks, packer, self._ledger)
        try:
            context.install()
        except BaseException as error:
            self._leave()
            if isinstance(error, RuntimeError):
                # torch.func's grad, vjp, jacrev and hessian switch hooks off.
                raise RuntimeError(
                    f"fp8hooks.compress() can't be entered here, since saved-tensor hooks are disabled: {error}"
                ) from error
            raise
        self._stack.append(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        context = self._stack.pop()
        try:
            context.remove()
        finally:
            self._leave()
        if kind is None:
            self._make_plan(context.packer.recorder)
            for rule in self._policy.unused():
                self._ledger.note(f"{rule} matched nothing.")

    @property
    def _stack(self) -> list[_Context]:
        if not hasattr(self._contexts, "stack"):
            self._contexts.stack = []
        stack: list[_Context] = self._contexts.stack
        return stack

    def _leave(self) -> None:
        with self._lock:
            self._open -= 1

    def _make_plan(self, recorder: Recorder | None) -> None:
        if not self.config.planned or recorder is None or self._plan_given:
            return
        with self._lock:
            if not recorder.empty:
                # The first entry, or one that saved what the plan does not name.
                self._recorders.append(recorder)
                asked = self._asked(sum(one.original_bytes for one in self._recorders))
                host_budget = 0 if self._offloader is None else self._offloader.budget
                self._plan = make_plan(self._recorders, asked, self._offloader is not None, host_budget)
                _log.info("a plan was made in step %d: %s", self._ledger.steps, self._plan)
        self._note_shortfall()

    def _note_shortfall(self) -> None:
        plan, config = self._plan, self.config
        if isinstance(config.device_budget, int):
            held = self.stats.stored_bytes
            if plan is not None and held > config.device_budget and plan.reached >= plan.asked:
                self._ledger.note(
                    f"This step holds {format_bytes(held)} on the device, device_budget={config.device_budget}: the "
                    "plan was made from steps that saved less."
                )
        if plan is None or config.memory_savings == "max" or plan.reached >= plan.asked:
            return
        setting = "memory_savings" if config.device_budget is None else "device_budget"
        rest = ", ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in plan.rest)
        self._ledger.note(
            f"{setting}={getattr(config, setting)} can't be reached: all that is allowed gives back "
            f"{plan.reached:.2f}, {plan.asked - plan.reached:.2f} less. What holds most of the rest: {rest}."
        )

    def _asked(self, original: int) -> float:
        """The share of a step's bytes that is to be given back."""
        savings, budget = self.config.memory_savings, self.config.device_budget
        if savings == "max":
            return 1.0
        if isinstance(budget, int):
            return max(0.0, 1 - budget / max(1, original))
        return float(savings or 0.0)


def _restored(config: CompressConfig, plan: Plan | None) -> Session:
    session = Session(config)
    session.plan = plan
    return session


dynamo.skip(compress, Session.__enter__, Session.__exit__)


class _Context:
    """One entry of a session on one thread: the hooks, and what must not outlive it."""

    def __init__(self, hooks: compiled.Hooks, packer: Packer, ledger: Ledger) -> None:
        self.packer = packer
        self._hooks = hooks
        self._tracker = callsite.Tracker(_look_for_other_hooks(hooks.pack, ledger))
        self._ledger = ledger
        self._cache_hits = dynamo.cache_hits()
        self._installed = contextlib.ExitStack()

    def install(self) -> None:
        """Push the hooks and the mode onto this thread."""
        with contextlib.ExitStack() as stack:
            # Where nothing is recorded nothing is saved, and no operation need be watched. (What is saved where it is
            # switched on again in there is told from the call stack alone.)
            if torch.is_grad_enabled():
                dynamo.hide(callsite.Tracker)
                stack.enter_context(self._tracker)
            stack.enter_context(compiled.installed(self._hooks, self))
            self._installed = stack.pop_all()

    def remove(self) -> None:
        """Take them off again, and forget all that was weakly held."""
        try:
            self._installed.close()
        finally:
            self.packer.close()
        found = dynamo.cache_hits() - self._cache_hits
        if found:
            self._ledger.note(
                f"Graphs that came compiled from torch.compile's cache: {found}. What they save is as compressed as "
                "when they were made, and not counted here."
            )

    def pack(self, tensor: Tensor, frame: types.FrameType) -> Saved:
        """Keep a tensor that is saved by what runs in a frame."""
        call = callsite.call_at(self._tracker.call, frame)
        return self.packer.save(tensor, callsite.op_at(call, frame), call, callsite.module_path(frame))


_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def _look_for_other_hooks(pack: Any, ledger: Ledger) -> Callable[[], None]:
    """A function that says so in the report if the innermost hooks, the only ones that run, are not those of `pack`."""

    def look() -> None:
        innermost = _top_hooks(False)
        if innermost and innermost[0] is not pack:
            ledger.note(
                f"Some of this step ran under other hooks inside the session, by {_owner(innermost[0])}; "
                "what was saved there is neither compressed nor counted."
            )

    dynamo.skip(look)
    return look


def _owner(pack_hook: Any) -> str:
    """Who a pack hook belongs to, by name."""
    if compiled.is_ours(pack_hook):
        return "another session of fp8hooks"
    function = getattr(pack_hook, "__func__", pack_hook)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name.split('.')[0]}"
