"""What becomes of a saved tensor: from identity, role, policy and codec to the object that the graph holds."""

from __future__ import annotations

import numbers
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fp8hooks import callsite, codecs, identity, overlap, profiling, roles
from fp8hooks.callsite import Call, Op
from fp8hooks.codecs import Payload, philox
from fp8hooks.config import CompressConfig
from fp8hooks.identity import Geometry
from fp8hooks.integrations import distributed, transformer_engine
from fp8hooks.offload import Offloader
from fp8hooks.plan import CODEC, EXACT, HOST, INT4, Plan, Save
from fp8hooks.planner import Recorder
from fp8hooks.policy import Policy
from fp8hooks.recipes import Recipe, Recipes
from fp8hooks.saved import Exact, Moved, Packed, Saved, Shared, Site, Wrapped, keep_exact
from fp8hooks.stats import Ledger


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

    def __init__(
        self,
        policy: Policy,
        recipes: Recipes,
        ledger: Ledger,
        config: CompressConfig,
        plan: Plan | None,
        offloader: Offloader | None,
    ) -> None:
        self._policy = policy
        self._recipes = recipes
        self._ledger = ledger
        self._rows = ledger.rows()
        self._plan = plan
        # Only the knob asks what a step saved.
        self.recorder = Recorder(plan) if config.planned or plan is not None else None
        self._offloader = offloader
        self._default = HOST if offloader is not None and _offloads_all(config) else CODEC
        # Bytes that this entry keeps on the device, and those that found no place in host memory.
        self._kept = 0
        self._refused = 0
        self._storages = identity.Storages()
        # Storage addresses: charged to a site, kept exact, and compressed (with the op, and the bytes).
        self._charged: set[int] = set()
        self._exact: set[int] = set()
        self._compressed: dict[int, tuple[str, int]] = {}
        # Those whose memory was moved to the host as it is.
        self._moved: dict[int, weakref.ref[Payload]] = {}
        # Payloads by the memory that they stand for, weakly: the graph owns them.
        self._payloads: dict[Any, weakref.ref[Payload]] = {}
        self._signs: dict[Any, _Signs] = {}
        self._overlap = overlap.Encoder()
        self._trace = overlap.Trace(recipes.order, _nothing if offloader is None else offloader.settle)
        self._keys = philox.Keys(config.seed, ledger.steps, ledger.contexts)
        self._stochastic = config.stochastic_rounding

    def close(self) -> None:
        """Say what compressing did not free, and forget all that is weakly held."""
        for address, (op, nbytes) in self._compressed.items():
            if self._storages.alive(address) and not self._on_its_way(address):
                self._ledger.record_not_freed(op, nbytes)
        if self.recorder is not None:
            self.recorder.close(lambda address: self._storages.alive(address) and not self._on_its_way(address))
        if self._refused:
            self._ledger.note(
                f"Host memory for saved tensors is full (host_budget): {self._refused:,} bytes that should have gone "
                "there stayed on the device."
            )
        if self._offloader is not None:
            self._offloader.settle()
        self._overlap.close()
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

    def _save(self, tensor: Tensor, op: Op, call: Call | None, module: str) -> Exact | Moved | Packed:
        op, role = _saver(tensor, op, call)
        recipe = self._recipes.of(tensor, op, role, module)
        storage = tensor.untyped_storage()
        address = self._storages.address(storage)
        if role == "weight" or callsite.is_buffer(address):
            self._ledger.record_weight(address, storage.nbytes())
            return keep_exact(tensor, recipe.site)
        charge = 0
        if address not in self._charged:
            self._charged.add(address)
            charge = storage.nbytes()
        save, choice = self._choose(recipe.site)
        shape = recipe.shape
        # Memory that is kept exact already, here or in host memory, costs nothing more.
        exact = address in self._exact
        if address in self._moved and not exact:
            exact = self._known(_raw_key(address, tensor)) is not None
        if recipe.codec is None or shape is None or exact or tensor.is_neg():
            return self._save_exact(tensor, recipe, address, charge, save, choice)
        # The pointer too, since a storage may be resized, and so move, without a new version.
        memory = (address, tensor.data_ptr(), shape.core, tensor.dtype, tensor._version)
        if memory in self._payloads or recipe.signs_suffice:
            shared = self._share(memory, recipe, tensor.dtype)
            if shared is not None:
                self._record((recipe.site, shared.codec.name), charge)
                if self.recorder is not None and save is not None:
                    self.recorder.shared(save, address, recipe.int4 is not None or recipe.signs_suffice)
                packed = Packed(shared, shape, recipe.shares)
                if recipe.shares:
                    _count_user(shared)
                if shared.codec.name == codecs.SIGNS:
                    self._signs[memory].add(packed)
                elif shared.coder is not None:
                    self._trace.add(packed)
                return packed
        if choice == EXACT:
            return self._save_exact(tensor, recipe, address, charge, save, choice)
        limit = roles.limit_of(op, call) if recipe.codec.name == "narrow" else None
        return self._save_packed(tensor, memory, recipe, charge, limit, save, choice)

    def _choose(self, site: Site) -> tuple[Save | None, str]:
        """The number of the save that comes now at a site, if saves are numbered, and what becomes of it."""
        if self.recorder is None:
            return None, self._default
        save = self.recorder.number(site)
        return save, self._default if self._plan is None else self._plan.of(save)

    def _known(self, memory: Any) -> Payload | None:
        """The payload of some memory, if there is one and the graph still holds it."""
        known = self._payloads.get(memory)
        return None if known is None else known()

    def _share(self, memory: Any, recipe: Recipe, dtype: torch.dtype) -> Payload | None:
        """The payload of the same memory, if another save made one that serves here too."""
        payload = self._known(memory)
        if payload is None and recipe.signs_suffice and memory in self._signs:
            payload = next((packed.payload for packed in self._signs[memory].alive()), None)
        if payload is None:
            return None
        if recipe.signs_suffice or self._policy.accepts(recipe.site, dtype, payload.codec.name):
            return payload
        return None

    def _save_packed(
        self,
        tensor: Tensor,
        memory: Any,
        recipe: Recipe,
        charge: int,
        limit: int | None,
        save: Save | None,
        choice: str,
    ) -> Exact | Moved | Packed:
        address = memory[0]
        signs = self._signs.pop(memory, None) if self._signs else None
        earlier = [] if signs is None else signs.alive()
        if profiling.active():
            with profiling.span("encode", recipe.site.op):
                payload = self._encode(tensor, memory[1], recipe, limit, choice)
        else:
            payload = self._encode(tensor, memory[1], recipe, limit, choice)
        if payload is None:
            return self._save_exact(tensor, recipe, address, charge, save, choice)
        assert recipe.shape is not None
        stored = payload.nbytes
        if choice == HOST and not recipe.signs_suffice:
            self._offload(payload)
        packed = Packed(payload, recipe.shape, recipe.shares)
        if payload.coder is not None or payload.home is not None:
            self._trace.add(packed)
        if charge:
            self._compressed[address] = (recipe.site.op, charge)
        reference = self._ledger.watch(payload)
        key = recipe.row if choice != INT4 else (recipe.site, payload.codec.name)
        row = self._record(key, charge, payload.nbytes, payload.numel, payload.host_bytes)
        if signs is not None and earlier:
            row[1] += self._replace(signs, earlier, payload, address)
        if self.recorder is not None and save is not None:
            small = None if recipe.int4 is None else recipe.int4.nbytes(recipe.shape.numel)
            nbytes = tensor.untyped_storage().nbytes()
            self.recorder.compressed(save, address, nbytes, stored, small, movable=not recipe.signs_suffice)
        if recipe.signs_suffice:
            self._signs[memory] = _Signs(packed, save, row, charge)
        else:
            self._payloads[memory] = reference
        return packed

    @property
    def _room(self) -> int:
        """Bytes that the device will have taken up at the end of forward, and does not yet."""
        return 0 if self._plan is None else self._plan.totals.device - self._kept

    def _on_its_way(self, address: int) -> bool:
        """Whether we still hold memory of others', since it is being copied to the host."""
        payload = self._moved[address]() if address in self._moved else None
        return payload is not None and payload.home is not None and payload.home.resident is not None

    def _offload(self, payload: Payload) -> bool:
        """Have a payload's buffer copied to host memory, if that has room."""
        nbytes = payload.nbytes
        if self._offloader is None or not self._offloader.suits(payload.buffer):
            return False
        home = self._offloader.move(payload.buffer, self._room, foreign=payload.codec is codecs.RAW)
        if home is None:
            self._refused += nbytes
            return False
        payload.settle(home)
        return True

    def _encode(self, tensor: Tensor, pointer: int, recipe: Recipe, limit: int | None, choice: str) -> Payload | None:
        codec, coder = recipe.codec, recipe.coder
        if choice == INT4 and recipe.int4 is not None:
            codec = recipe.int4
        elif coder is not None:
            payload = self._overlap.encode(coder, tensor, pointer, recipe.site) or coder.encode(pointer)
            if payload is not None:
                return payload
        assert codec is not None
        assert recipe.shape is not None
        core = identity.core_of(tensor, recipe.shape)
        stochastic = self._stochastic or codec.name in codecs.ALWAYS_STOCHASTIC
        payload = codec.encode(core, limit, self._keys.next() if stochastic else None)
        if payload is not None and codec is recipe.codec:
            recipe.coder = payload.coder
        return payload

    def _replace(self, signs: _Signs, earlier: list[Packed], payload: Payload, address: int) -> int:
        """Let saves of signs use the whole payload of the same memory; the bytes that they were charged for that."""
        signs.row[1] -= signs.charge
        signs.row[2] -= earlier[0].payload.nbytes
        signs.row[3] -= earlier[0].payload.numel
        for packed in earlier:
            packed.payload = payload
        if self.recorder is not None:
            self.recorder.replaced(signs.save, address)
        return signs.charge

    def _save_exact(
        self, tensor: Tensor, recipe: Recipe, address: int, charge: int, save: Save | None, choice: str
    ) -> Exact | Moved:
        storage = tensor.untyped_storage()
        nbytes, key, fills = storage.nbytes(), _raw_key(address, tensor), _fills(tensor, recipe.shape, storage)
        if self.recorder is not None and save is not None:
            self.recorder.exact(save, address, nbytes, key, fills)
        if key is not None and address not in self._exact:
            # A plan has looked at all of the storage.
            chosen = choice == HOST and (fills or self._plan is not None)
            moved = self._move(tensor, recipe, charge, key) if chosen or self._known(key) is not None else None
            if moved is not None:
                return moved
        stored = 0
        if address not in self._exact:
            self._exact.add(address)
            stored = charge or nbytes
        self._record(recipe.exact_row, charge, stored)
        return keep_exact(tensor, recipe.site)

    def _move(self, tensor: Tensor, recipe: Recipe, charge: int, key: Any) -> Moved | None:
        """Keep a tensor as it is, its storage in host memory; None if that has no room. Once, whoever else saves it."""
        payload, host_bytes = self._known(key), 0
        if payload is None:
            storage = tensor.untyped_storage()
            payload = codecs.RAW.encode(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            if not self._offload(payload):
                return None
            self._payloads[key] = self._moved[key[0]] = self._ledger.watch(payload)
            host_bytes = payload.host_bytes
            if charge:
                self._compressed[key[0]] = (recipe.site.op, charge)
        shape = identity.geometry((payload.numel,), (1,))
        assert shape is not None
        packed = Packed(payload, shape, False)
        self._trace.add(packed)
        self._record(recipe.exact_row, charge, 0, 0, host_bytes)
        return Moved(tensor, packed, recipe.site)

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
            self._record((site, codecs.EXACT), nbytes, nbytes)
            if self.recorder is not None:
                self.recorder.fixed(f"{site.op} ({type(tensor).__name__})", nbytes)
        return keep_exact(tensor, site)

    def _record(
        self, key: tuple[Site, str], original_bytes: int, stored_bytes: int = 0, elements: int = 0, host_bytes: int = 0
    ) -> list[int]:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = [0, 0, 0, 0, 0]
        row[0] += 1
        row[1] += original_bytes
        row[2] += stored_bytes
        row[3] += elements
        row[4] += host_bytes
        self._kept += stored_bytes
        if self._offloader is not None and stored_bytes and self._offloader.busy:
            self._offloader.settle(room=self._room)
        return row


def _saver(tensor: Tensor, op: Op, call: Call | None) -> tuple[Op, str]:
    """Who saves a tensor, down to the part of a fused function where that is known, and as what."""
    if call is not None and op.name in transformer_engine.FUNCTIONS:
        part = transformer_engine.part_of(tensor, call)
        if part is not None:
            return Op(part.op, True), part.role
    return op, roles.role_of(tensor, op, call)


def _nothing() -> None:
    pass


def _raw_key(address: int, tensor: Tensor) -> Any:
    """Names a storage that is moved as it is, at the version of a tensor in it; None for those that have none."""
    return None if tensor.is_inference() else (address, codecs.RAW, tensor._version)


def _fills(tensor: Tensor, shape: Geometry | None, storage: torch.UntypedStorage) -> bool:
    """Whether a tensor is most of its storage, so that moving the whole is worth it."""
    return shape is not None and 2 * shape.numel * tensor.itemsize >= storage.nbytes()


# A first step that may use host memory uses it where 8 bits would not give back as much as this.
_BY_CODECS = 0.5


def _offloads_all(config: CompressConfig) -> bool:
    """Whether what no plan speaks of goes to the host: that was asked for, or the first step may not fit without."""
    if not config.planned:
        return config.offload is True
    savings = config.memory_savings
    return not isinstance(savings, numbers.Real) or savings > _BY_CODECS


def _count_user(payload: Payload) -> None:
    """Count another consumer of a payload that has one."""
    if payload.shared is None:
        payload.shared = Shared()
    payload.shared.users += 1


def _is_plain(tensor: Tensor) -> bool:
    """A strided tensor of torch's own with real storage."""
    return (
        (type(tensor) is Tensor or type(tensor) is nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
    )
