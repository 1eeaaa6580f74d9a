"""What becomes of a saved tensor: from identity, role, policy and codec to the object that the graph holds."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fp8hooks import callsite, codecs, identity, roles
from fp8hooks.callsite import Call, Op
from fp8hooks.codecs import Codec, Payload, philox
from fp8hooks.config import CompressConfig
from fp8hooks.identity import Geometry
from fp8hooks.integrations import distributed
from fp8hooks.planner import Plan, Recorder, Save
from fp8hooks.policy import Policy
from fp8hooks.saved import Exact, Packed, Saved, Site, Wrapped
from fp8hooks.stats import Ledger


class _SiteState:
    """What a packer knows of a site and dtype, so that the next save there need not ask again."""

    __slots__ = ("codec", "exact", "min_numel", "signs_suffice", "site")

    def __init__(self, site: Site, codec: Codec | None, min_numel: int, signs_suffice: bool) -> None:
        self.site = site
        self.codec = codec  # None: what is saved here stays exact
        self.min_numel = min_numel
        self.signs_suffice = signs_suffice
        self.exact: list[int] | None = None  # its row, once something was kept exact


class _Signs:
    """Saves of nothing but the signs of the same memory, until another site saves it whole.

    Attributes:
        save, row, charge: of the first of them.
    """

    def __init__(self, packed: Packed, save: Save | None, row: list[int], charge: int) -> None:
        self._handles = [weakref.ref(packed)]
        self.save = save
        self.row = row
        self.charge = charge

    def alive(self) -> list[Packed]:
        """Those that the graph still holds."""
        handles = (handle() for handle in self._handles)
        return [packed for packed in handles if packed is not None]

    def add(self, packed: Packed) -> None:
        self._handles.append(weakref.ref(packed))


class Packer:
    """Turns saved tensors into `Saved` objects, for one entry of a session on one thread.

    It holds weakly whatever belongs to the graph, and lets go of that too when it is closed.
    """

    def __init__(self, policy: Policy, ledger: Ledger, config: CompressConfig, plan: Plan | None) -> None:
        self._policy = policy
        self._ledger = ledger
        self._rows = ledger.rows()
        self._sites: dict[tuple[str, str, str, torch.dtype, bool], _SiteState] = {}
        self._block_size = config.block_size
        self._min_numel = max(1, config.min_numel)
        self._plan = plan
        # Only the knob asks what a step saved.
        self.recorder = None if config.memory_savings is None else Recorder()
        self._storages = identity.Storages()
        # Storage addresses: charged to a site, kept exact, and compressed (with the op, and the bytes).
        self._charged: set[int] = set()
        self._exact: set[int] = set()
        self._compressed: dict[int, tuple[str, int]] = {}
        # Payloads by the memory that they stand for, weakly: the graph owns them.
        self._payloads: dict[Any, weakref.ref[Payload]] = {}
        self._signs: dict[Any, _Signs] = {}
        self._keys = philox.Keys(config.seed, ledger.steps, ledger.contexts) if config.stochastic_rounding else None

    def close(self) -> None:
        """Say what compressing did not free, and forget all that is weakly held."""
        for address, (op, nbytes) in self._compressed.items():
            if self._storages.alive(address):
                self._ledger.record_not_freed(op, nbytes)
        self._payloads.clear()
        self._signs.clear()
        self._storages.clear()

    def save(self, tensor: Tensor, op: Op, call: Call | None, module: str) -> Saved:
        """What to keep in place of `tensor`, which `op` saves in `module`; `call` is the running call, if known."""
        if _is_plain(tensor):
            return self._save(tensor, op, call, module)
        if distributed.is_dtensor(tensor) and not roles.weight_like(tensor):
            local, join = distributed.split(tensor)
            if _is_plain(local):
                return Wrapped(self._save(local, op, None, module), join)
        return self._keep_whole(tensor, Site(module, op.name, "activation"))

    def _save(self, tensor: Tensor, op: Op, call: Call | None, module: str) -> Exact | Packed:
        role = roles.role_of(tensor, op, call)
        key = (module, op.name, role, tensor.dtype, op.inner)
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
        codec = state.codec
        if codec is None or address in self._exact or tensor.numel() < state.min_numel:
            return self._save_exact(tensor, state, address, charge)
        shape = identity.geometry(tensor.shape, tensor.stride())
        if shape is None or shape.numel < state.min_numel or tensor.is_neg():
            return self._save_exact(tensor, state, address, charge)
        # The pointer too, since a storage may be resized, and so move, without a new version.
        memory = (address, tensor.data_ptr(), shape.core, tensor.dtype, tensor._version)
        shared = self._share(memory, state, tensor.dtype)
        if shared is not None:
            self._record(state.site, shared.codec.name, charge, 0)
            packed = Packed(shared, shape)
            if shared.codec.name == codecs.SIGNS:
                self._signs[memory].add(packed)
            return packed
        limit = roles.limit_of(op, call) if codec.name == "narrow" else None
        return self._save_packed(tensor, memory, state, codec, address, charge, shape, limit)

    def _share(self, memory: Any, state: _SiteState, dtype: torch.dtype) -> Payload | None:
        """The payload of the same memory, if another save made one that serves here too."""
        known = self._payloads.get(memory)
        payload = None if known is None else known()
        if payload is None and state.signs_suffice and memory in self._signs:
            payload = next((packed.payload for packed in self._signs[memory].alive()), None)
        if payload is None:
            return None
        if state.signs_suffice or self._policy.accepts(state.site, dtype, payload.codec.name):
            return payload
        return None

    def _save_packed(
        self,
        tensor: Tensor,
        memory: Any,
        state: _SiteState,
        codec: Codec,
        address: int,
        charge: int,
        shape: Geometry,
        limit: int | None,
    ) -> Exact | Packed:
        signs = self._signs.pop(memory, None)
        earlier = [] if signs is None else signs.alive()
        save = None
        # Whole memory that a save of signs stands for already is numbered as that one.
        if self.recorder is not None and not earlier:
            save = self.recorder.next_save(state.site)
            if self._plan is not None and save in self._plan.exact:
                return self._save_exact(tensor, state, address, charge)
        core = identity.core_of(tensor, shape)
        payload = codec.encode(core, limit, None if self._keys is None else self._keys.next())
        if payload is None:
            return self._save_exact(tensor, state, address, charge)
        packed = Packed(payload, shape)
        self._compressed.setdefault(address, (state.site.op, tensor.untyped_storage().nbytes()))
        reference = self._ledger.watch(payload)
        row = self._record(state.site, codec.name, charge, payload.nbytes, payload.numel)
        if signs is not None and earlier:
            row[1] += self._replace(signs, earlier, payload)
        elif self.recorder is not None and save is not None and self._plan is None:
            self.recorder.compressed(save, charge, payload.nbytes)
        if state.signs_suffice:
            self._signs[memory] = _Signs(packed, save, row, charge)
        else:
            self._payloads[memory] = reference
        return packed

    def _replace(self, signs: _Signs, earlier: list[Packed], payload: Payload) -> int:
        """Let saves of signs use the whole payload of the same memory; the bytes that they were charged for that."""
        signs.row[1] -= signs.charge
        signs.row[2] -= earlier[0].payload.nbytes
        signs.row[3] -= earlier[0].payload.numel
        for packed in earlier:
            packed.payload = payload
        if self.recorder is not None:
            self.recorder.recompressed(signs.save, payload.nbytes)
        return signs.charge

    def _save_exact(self, tensor: Tensor, state: _SiteState, address: int, charge: int) -> Exact:
        row = state.exact
        if row is None:
            row = state.exact = self._row(state.site, codecs.EXACT)
        row[0] += 1
        row[1] += charge
        if address not in self._exact:
            self._exact.add(address)
            stored = charge or tensor.untyped_storage().nbytes()
            row[2] += stored
            if self.recorder is not None:
                self.recorder.exact(stored)
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

    def _new_site(self, key: tuple[str, str, str, torch.dtype, bool]) -> _SiteState:
        module, op, role, dtype, inner = key
        site = Site(module, op, role)
        policy = self._policy
        least = max(self._min_numel, policy.least_numel(site, dtype))
        # Of what runs inside another function the name is all that is known.
        signs_suffice = not inner and policy.signs_suffice(site, dtype)
        name = codecs.SIGNS if signs_suffice else policy.codec(site, dtype)
        codec = None if name == codecs.EXACT else codecs.get(name, self._block_size)
        state = _SiteState(site, codec, least, signs_suffice)
        self._sites[key] = state
        return state

    def _row(self, site: Site, codec: str) -> list[int]:
        row = self._rows.get((site, codec))
        if row is None:
            row = self._rows[site, codec] = [0, 0, 0, 0]
        return row

    def _record(self, site: Site, codec: str, original_bytes: int, stored_bytes: int, elements: int = 0) -> list[int]:
        row = self._row(site, codec)
        row[0] += 1
        row[1] += original_bytes
        row[2] += stored_bytes
        row[3] += elements
        return row


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
