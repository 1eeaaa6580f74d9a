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

from fp8hooks import codecs, identity, roles
from fp8hooks.codecs import Payload
from fp8hooks.config import CompressConfig, check_fields
from fp8hooks.identity import Geometry
from fp8hooks.planner import Plan, Recorder
from fp8hooks.policy import Policy
from fp8hooks.report import Report
from fp8hooks.saved import Exact, Opaque, Packed, Saved, Site
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
        except BaseException:
            self._leave()
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


class _Context:
    """One entry of a session on one thread: the hooks, and what must not outlive it."""

    def __init__(self, policy: Policy, ledger: Ledger, config: CompressConfig, plan: Plan | None) -> None:
        self._policy = policy
        self._ledger = ledger
        self._config = config
        self._plan = plan
        self.recorder = Recorder()
        self._tracker = roles.Tracker()
        self._storages = identity.Storages()
        # Storage address -> bytes, of what this context has charged to a site, has kept exact, has compressed (by op).
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
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
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
        if not _is_plain(tensor):
            return self._keep_opaque(tensor)
        site = roles.site_of(tensor, self._tracker.call, frame)
        storage = tensor.untyped_storage()
        address = self._storages.address(storage)
        nbytes = storage.nbytes()
        if site.role == "weight":
            self._ledger.record_weight(address, nbytes)
            return self._keep_exact(tensor, site)
        charge = 0 if address in self._charged else nbytes
        self._charged.add(address)
        shape = self._compressible(tensor, site)
        wanted = codecs.EXACT if shape is None else self._policy.codec(site, tensor.dtype)
        # Memory that is kept exact already costs nothing more.
        if wanted == codecs.EXACT or shape is None or address in self._exact:
            return self._record_exact(tensor, site, address, charge, nbytes)
        key = (address, tensor.storage_offset(), shape.core, tensor.dtype, tensor._version, tensor.data_ptr())
        known = self._payloads.get(key)
        payload = None if known is None else known()
        if payload is not None and self._policy.accepts(site, tensor.dtype, payload.codec.name):
            self._ledger.record(site, payload.codec.name, charge, 0)
            return Packed(payload, shape)
        if self._plan is not None and self.recorder.next_save(site) in self._plan.exact:
            return self._record_exact(tensor, site, address, charge, nbytes)
        payload = self._encode(tensor, shape, wanted)
        self._payloads[key] = weakref.ref(payload)
        self._compressed.setdefault(address, (site.op, nbytes))
        self._ledger.watch(payload)
        self._ledger.record(site, wanted, charge, payload.nbytes)
        if self._plan is None:
            self.recorder.compressed(self.recorder.next_save(site), charge, payload.nbytes)
        return Packed(payload, shape)

    @staticmethod
    def unpack(saved: Saved) -> Tensor:
        """The unpack hook."""
        return saved.unpack()

    def _compressible(self, tensor: Tensor, site: Site) -> Geometry | None:
        """The geometry of a tensor that a codec could hold; None for one that must stay as it is."""
        if tensor.dtype not in codecs.FLOATS or tensor.is_neg():
            return None
        shape = identity.geometry(tensor.shape, tensor.stride())
        return shape if shape is not None and shape.numel >= max(1, self._config.min_numel) else None

    def _encode(self, tensor: Tensor, shape: Geometry, codec: str) -> Payload:
        return codecs.get(codec, self._config.block_size).encode(identity.flatten(tensor.detach(), shape))

    def _record_exact(self, tensor: Tensor, site: Site, address: int, charge: int, nbytes: int) -> Exact:
        stored = 0 if address in self._exact else nbytes
        self._exact.add(address)
        self.recorder.exact(stored)
        self._ledger.record(site, codecs.EXACT, charge, stored)
        return self._keep_exact(tensor, site)

    @staticmethod
    def _keep_exact(tensor: Tensor, site: Site) -> Exact:
        # Detached: holding an output of the node that holds us would be a cycle that only gc could free.
        return Exact(tensor.detach(), tensor._version, site)

    @staticmethod
    def _keep_opaque(tensor: Tensor) -> Opaque:
        return Opaque(tensor.detach())


def _is_plain(tensor: Tensor) -> bool:
    """A strided tensor of torch's own with real storage."""
    return (type(tensor) is Tensor or type(tensor) is nn.Parameter) and (
        tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_quantized
    )
