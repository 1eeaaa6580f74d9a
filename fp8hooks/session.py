"""`compress()`: the only file that touches torch's saved-tensor hooks."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from fp8hooks import callsite, codecs, identity, roles
from fp8hooks.callsite import Call, Op
from fp8hooks.codecs import Payload
from fp8hooks.config import CompressConfig, check_fields
from fp8hooks.identity import Geometry
from fp8hooks.integrations import distributed
from fp8hooks.planner import Plan, Recorder
from fp8hooks.policy import Policy
from fp8hooks.report import Report
from fp8hooks.saved import Exact, Packed, Saved, Site, Wrapped
from fp8hooks.stats import Ledger, Stats


def compress(
    config: CompressConfig | None = None, /, *, memory_savings: float | None = None, **overrides: Any
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
        self._ledger = Ledger()
        self._contexts = threading.local()
        self._lock = threading.Lock()
        self._open = 0
        self._plan: Plan | None = None

    @property
    def stats(self) -> Stats:
        """What the latest step saved, a step being the time from the first entry to the last exit."""
        return self._ledger.stats()

    @property
    def held_bytes(self) -> int:
        """Bytes of compressed tensors alive now, whatever step they are from."""
        return self._ledger.held_bytes

    def report(self, by_module: bool = False) -> Report:
        """`stats` as a table, to print; with a row for each module on request."""
        return Report(self.stats, by_module)

    def __enter__(self) -> Session:
        with self._lock:
            if self._open == 0:
                self._ledger.begin_step()
            self._open += 1
        context = _Context(self._policy, self._ledger, self.config, self._plan)
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
            self._make_plan(context)
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

    def _make_plan(self, context: _Context) -> None:
        asked = self.config.memory_savings
        if asked is None:
            return
        if self._plan is None and not context.recorder.empty:
            self._plan = context.recorder.plan(asked)
        if self._plan is not None and self._plan.reached < asked:
            self._ledger.note(
                f"memory_savings={asked:g} can't be reached: "
                f"all that the policy allows gives back {self._plan.reached:.2f}."
            )


class _SiteState:
    """What a context knows of a site and dtype, so that the next save there need not ask again."""

    __slots__ = ("codec", "exact", "site")

    def __init__(self, site: Site, codec: str) -> None:
        self.site = site
        self.codec = codec
        self.exact: list[int] | None = None  # its row, once something was kept exact


class _Context:
    """One entry of a session on one thread: the hooks, and what must not outlive it."""

    def __init__(self, policy: Policy, ledger: Ledger, config: CompressConfig, plan: Plan | None) -> None:
        self._policy = policy
        self._ledger = ledger
        self._rows = ledger.rows()
        self._sites: dict[tuple[str, str, str, torch.dtype], _SiteState] = {}
        self._block_size = config.block_size
        self._min_numel = max(1, config.min_numel)
        self._plan = plan
        self.recorder = Recorder()
        self._hooks = (self.pack, self.unpack)
        self._tracker = callsite.Tracker(self._look_for_other_hooks)
        self._storages = identity.Storages()
        # Storage addresses: charged to a site, kept exact, and compressed (with the op, and the bytes).
        self._charged: set[int] = set()
        self._exact: set[int] = set()
        self._compressed: dict[int, tuple[str, int]] = {}
        # Payloads by the memory that they stand for, weakly: the graph owns them.
        self._payloads: dict[Any, weakref.ref[Payload]] = {}
        self._installed = contextlib.ExitStack()

    def install(self) -> None:
        """Push the hooks and the mode onto this thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._tracker)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
            self._installed = stack.pop_all()

    def remove(self) -> None:
        """Take them off again, and forget all that was weakly held."""
        try:
            self._installed.close()
        finally:
            for address, (op, nbytes) in self._compressed.items():
                if self._storages.alive(address):
                    self._ledger.record_not_freed(op, nbytes)
            self._payloads.clear()
            self._storages.clear()

    def pack(self, tensor: Tensor) -> Saved:
        """The pack hook."""
        frame = sys._getframe(1)
        call = self._tracker.call
        op, module = callsite.op_at(call, frame), callsite.module_path(frame)
        if _is_plain(tensor):
            return self._save(tensor, op, call, module)
        if distributed.is_dtensor(tensor) and not roles.weight_like(tensor):
            local, join = distributed.split(tensor)
            if _is_plain(local):
                return Wrapped(self._save(local, op, None, module), join)
        return self._keep_whole(tensor, Site(module, op.name, "activation"))

    @staticmethod
    def unpack(saved: Saved) -> Tensor:
        """The unpack hook."""
        return saved.unpack()

    def _save(self, tensor: Tensor, op: Op, call: Call | None, module: str) -> Exact | Packed:
        role = roles.role_of(tensor, op, call)
        key = (module, op.name, role, tensor.dtype)
        state = self._sites.get(key) or self._new_site(key)
        storage = tensor.untyped_storage()
        address = self._storages.address(storage)
        if role == "weight" or callsite.is_buffer(address):
            self._ledger.record_weight(address, storage.nbytes())
            return _keep_exact(tensor, state.site)
        charge = 0
        if address not in self._charged:
            self._charged.add(address)
            charge = storage.nbytes()
        # Memory that is kept exact already costs nothing more.
        if state.codec == codecs.EXACT or address in self._exact or tensor.numel() < self._min_numel:
            return self._save_exact(tensor, state, address, charge)
        shape = identity.geometry(tensor.shape, tensor.stride())
        if shape is None or shape.numel < self._min_numel or tensor.is_neg():
            return self._save_exact(tensor, state, address, charge)
        return self._save_packed(tensor, state, address, charge, shape, op, call)

    def _save_packed(
        self,
        tensor: Tensor,
        state: _SiteState,
        address: int,
        charge: int,
        shape: Geometry,
        op: Op,
        call: Call | None,
    ) -> Exact | Packed:
        # The pointer too, since a storage may be resized, and so move, without a new version.
        key = (address, tensor.data_ptr(), shape.core, tensor.dtype, tensor._version)
        known = self._payloads.get(key)
        payload = None if known is None else known()
        if payload is not None and self._policy.accepts(state.site, tensor.dtype, payload.codec.name):
            self._record(state.site, payload.codec.name, charge, 0)
            return Packed(payload, shape)
        save = self.recorder.next_save(state.site)
        if self._plan is not None and save in self._plan.exact:
            return self._save_exact(tensor, state, address, charge)
        flat = identity.flatten(tensor.detach(), shape)
        payload = codecs.get(state.codec, self._block_size).encode(flat, roles.limit_of(op, call))
        if payload is None:
            return self._save_exact(tensor, state, address, charge)
        self._payloads[key] = weakref.ref(payload)
        self._compressed.setdefault(address, (state.site.op, tensor.untyped_storage().nbytes()))
        self._ledger.watch(payload)
        self._record(state.site, state.codec, charge, payload.nbytes, payload.numel)
        if self._plan is None:
            self.recorder.compressed(save, charge, payload.nbytes)
        return Packed(payload, shape)

    def _save_exact(self, tensor: Tensor, state: _SiteState, address: int, charge: int) -> Exact:
        stored = 0
        if address not in self._exact:
            self._exact.add(address)
            stored = tensor.untyped_storage().nbytes()
            self.recorder.exact(stored)
        row = state.exact
        if row is None:
            row = state.exact = self._row(state.site, codecs.EXACT)
        row[0] += 1
        row[1] += charge
        row[2] += stored
        return _keep_exact(tensor, state.site)

    def _keep_whole(self, tensor: Tensor, site: Site) -> Exact:
        """Keep a tensor that is not plain and dense (a subclass, sparse, nested, ...) without looking into it."""
        try:
            storage = tensor.untyped_storage()
            nbytes = 0 if storage.device.type == "meta" else storage.nbytes()  # fake tensors have meta storage
        except (NotImplementedError, RuntimeError):
            nbytes = 0
        if roles.weight_like(tensor):
            site = site._replace(role="weight")
        else:
            self._record(site, codecs.EXACT, nbytes, nbytes)
        return _keep_exact(tensor, site)

    def _new_site(self, key: tuple[str, str, str, torch.dtype]) -> _SiteState:
        *names, dtype = key
        site = Site(*names)
        state = self._sites[key] = _SiteState(site, self._policy.codec(site, dtype))
        return state

    def _row(self, site: Site, codec: str) -> list[int]:
        row = self._rows.get((site, codec))
        if row is None:
            row = self._rows[site, codec] = [0, 0, 0, 0]
        return row

    def _record(self, site: Site, codec: str, original_bytes: int, stored_bytes: int, elements: int = 0) -> None:
        row = self._row(site, codec)
        row[0] += 1
        row[1] += original_bytes
        row[2] += stored_bytes
        row[3] += elements

    def _look_for_other_hooks(self) -> None:
        """Only the innermost pair of hooks runs: say so if it is not ours."""
        innermost = _top_hooks(False)
        if innermost and innermost[0] is not self._hooks[0]:
            self._ledger.note(
                f"Some of this step ran under other hooks inside the session, by {_owner(innermost[0])}; "
                "what was saved there is neither compressed nor counted."
            )


_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def _owner(pack_hook: Any) -> str:
    """Who a pack hook belongs to, by name."""
    function = getattr(pack_hook, "__func__", pack_hook)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name.split('.')[0]}"


def _keep_exact(tensor: Tensor, site: Site) -> Exact:
    # Detached: holding an output of the node that holds us would be a cycle that only gc could free.
    kept = tensor.detach()
    try:
        return Exact(kept, kept._version, site)
    except RuntimeError:  # an inference tensor
        return Exact(kept, None, site)


def _is_plain(tensor: Tensor) -> bool:
    """A strided tensor of torch's own with real storage."""
    return (
        (type(tensor) is Tensor or type(tensor) is nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
    )
