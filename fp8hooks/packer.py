"""What becomes of a saved tensor: from identity, role, policy and codec to the object that the graph holds."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fp8hooks import callsite, codecs, identity, overlap, roles
from fp8hooks.callsite import Call, Op
from fp8hooks.codecs import Codec, Coder, Payload, philox
from fp8hooks.config import CompressConfig
from fp8hooks.identity import Geometry
from fp8hooks.integrations import distributed, transformer_engine
from fp8hooks.planner import Plan, Recorder, Save
from fp8hooks.policy import Policy
from fp8hooks.saved import Exact, Packed, Saved, Shared, Site, Wrapped, keep_exact
from fp8hooks.stats import Ledger


class Recipe:
    """What to do with the saves at one site of tensors of one dtype and geometry on one device.

    Attributes:
        site: who saves, and as what.
        codec: None: what is saved here stays exact.
        shape: the geometry; never None where there is a codec.
        coder: the short way to encode, once known.
        signs_suffice: see `Policy.signs_suffice`.
        shares: see `fp8hooks.saved.Packed`.
        exact_row, row: keys of the ledger's rows, for what stays exact and for what does not.
    """

    __slots__ = ("codec", "coder", "exact_row", "row", "shape", "shares", "signs_suffice", "site")

    def __init__(self, site: Site, codec: Codec | None, shape: Geometry | None, signs_suffice: bool) -> None:
        self.site = site
        self.codec = codec
        self.shape = shape
        self.signs_suffice = signs_suffice
        self.shares = not site.op.startswith(("Function.", "te.", "ops.", "unknown"))
        self.coder: Coder | None = None
        self.exact_row = (site, codecs.EXACT)
        self.row = self.exact_row if codec is None else (site, codec.name)


class Recipes:
    """The recipes of a session, from step to step."""

    # Shapes that never come again must not fill the memory.
    _MOST = 1 << 16

    def __init__(self, policy: Policy, config: CompressConfig) -> None:
        self._policy = policy
        self._block_size = config.block_size
        self._min_numel = max(1, config.min_numel)
        self._known: dict[tuple[Any, ...], Recipe] = {}
        #: See `fp8hooks.overlap.Trace`.
        self.order: dict[int, int] = {}

    def of(self, tensor: Tensor, op: Op, role: str, module: str) -> Recipe:
        """The recipe for a plain tensor that `op` saves as `role` in `module`."""
        key = (module, op, role, tensor.dtype, tensor.get_device(), tensor.shape, tensor.stride())
        return self._known.get(key) or self._new(key, tensor, op)

    def _new(self, key: tuple[Any, ...], tensor: Tensor, op: Op) -> Recipe:
        site, dtype, policy = Site(key[0], op.name, key[2]), tensor.dtype, self._policy
        # Of what runs inside another function the name is all that is known.
        signs_suffice = not op.inner and policy.signs_suffice(site, dtype)
        name = codecs.SIGNS if signs_suffice else policy.codec(site, dtype)
        shape = identity.geometry(tensor.shape, tensor.stride())
        codec = None
        if name != codecs.EXACT and shape is not None:
            least = max(self._min_numel, policy.least_numel(site, dtype))
            codec = codecs.get(name, self._block_size) if shape.numel >= least else None
        recipe = Recipe(site, codec, shape, signs_suffice)
        if len(self._known) >= self._MOST:
            self._known.clear()
        self._known[key] = recipe
        return recipe


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
        self, policy: Policy, recipes: Recipes, ledger: Ledger, config: CompressConfig, plan: Plan | None
    ) -> None:
        self._policy = policy
        self._recipes = recipes
        self._ledger = ledger
        self._rows = ledger.rows()
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
        self._overlap = overlap.Encoder()
        self._trace = overlap.Trace(recipes.order)
        self._keys = philox.Keys(config.seed, ledger.steps, ledger.contexts)
        self._stochastic = config.stochastic_rounding

    def close(self) -> None:
        """Say what compressing did not free, and forget all that is weakly held."""
        for address, (op, nbytes) in self._compressed.items():
            if self._storages.alive(address):
                self._ledger.record_not_freed(op, nbytes)
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

    def _save(self, tensor: Tensor, op: Op, call: Call | None, module: str) -> Exact | Packed:
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
        shape = recipe.shape
        # Memory that is kept exact already costs nothing more.
        if recipe.codec is None or shape is None or address in self._exact or tensor.is_neg():
            return self._save_exact(tensor, recipe, address, charge)
        # The pointer too, since a storage may be resized, and so move, without a new version.
        memory = (address, tensor.data_ptr(), shape.core, tensor.dtype, tensor._version)
        if memory in self._payloads or recipe.signs_suffice:
            shared = self._share(memory, recipe, tensor.dtype)
            if shared is not None:
                self._record((recipe.site, shared.codec.name), charge, 0)
                packed = Packed(shared, shape, recipe.shares)
                if recipe.shares:
                    _count_user(shared)
                if shared.codec.name == codecs.SIGNS:
                    self._signs[memory].add(packed)
                elif shared.coder is not None:
                    self._trace.add(packed)
                return packed
        limit = roles.limit_of(op, call) if recipe.codec.name == "narrow" else None
        return self._save_packed(tensor, memory, recipe, charge, limit)

    def _share(self, memory: Any, recipe: Recipe, dtype: torch.dtype) -> Payload | None:
        """The payload of the same memory, if another save made one that serves here too."""
        known = self._payloads.get(memory)
        payload = None if known is None else known()
        if payload is None and recipe.signs_suffice and memory in self._signs:
            payload = next((packed.payload for packed in self._signs[memory].alive()), None)
        if payload is None:
            return None
        if recipe.signs_suffice or self._policy.accepts(recipe.site, dtype, payload.codec.name):
            return payload
        return None

    def _save_packed(
        self, tensor: Tensor, memory: Any, recipe: Recipe, charge: int, limit: int | None
    ) -> Exact | Packed:
        address = memory[0]
        signs = self._signs.pop(memory, None) if self._signs else None
        earlier = [] if signs is None else signs.alive()
        save = None
        # Whole memory that a save of signs stands for already is numbered as that one.
        if self.recorder is not None and not earlier:
            save = self.recorder.next_save(recipe.site)
            if self._plan is not None and save in self._plan.exact:
                return self._save_exact(tensor, recipe, address, charge)
        payload = self._encode(tensor, memory[1], recipe, limit)
        if payload is None:
            return self._save_exact(tensor, recipe, address, charge)
        assert recipe.shape is not None
        packed = Packed(payload, recipe.shape, recipe.shares)
        if payload.coder is not None:
            self._trace.add(packed)
        if charge:
            self._compressed[address] = (recipe.site.op, charge)
        reference = self._ledger.watch(payload)
        row = self._record(recipe.row, charge, payload.nbytes, payload.numel)
        if signs is not None and earlier:
            row[1] += self._replace(signs, earlier, payload)
        elif self.recorder is not None and save is not None and self._plan is None:
            self.recorder.compressed(save, charge, payload.nbytes)
        if recipe.signs_suffice:
            self._signs[memory] = _Signs(packed, save, row, charge)
        else:
            self._payloads[memory] = reference
        return packed

    def _encode(self, tensor: Tensor, pointer: int, recipe: Recipe, limit: int | None) -> Payload | None:
        coder = recipe.coder
        if coder is not None:
            payload = self._overlap.encode(coder, tensor, pointer, recipe.site) or coder.encode(pointer)
            if payload is not None:
                return payload
        assert recipe.codec is not None
        assert recipe.shape is not None
        core = identity.core_of(tensor, recipe.shape)
        stochastic = self._stochastic or recipe.codec.name in codecs.ALWAYS_STOCHASTIC
        payload = recipe.codec.encode(core, limit, self._keys.next() if stochastic else None)
        if payload is not None:
            recipe.coder = payload.coder
        return payload

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

    def _save_exact(self, tensor: Tensor, recipe: Recipe, address: int, charge: int) -> Exact:
        stored = 0
        if address not in self._exact:
            self._exact.add(address)
            stored = charge or tensor.untyped_storage().nbytes()
            if self.recorder is not None:
                self.recorder.exact(stored)
        self._record(recipe.exact_row, charge, stored)
        return keep_exact(tensor, recipe.site)

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
        return keep_exact(tensor, site)

    def _record(self, key: tuple[Site, str], original_bytes: int, stored_bytes: int, elements: int = 0) -> list[int]:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = [0, 0, 0, 0]
        row[0] += 1
        row[1] += original_bytes
        row[2] += stored_bytes
        row[3] += elements
        return row


def _saver(tensor: Tensor, op: Op, call: Call | None) -> tuple[Op, str]:
    """Who saves a tensor, down to the part of a fused function where that is known, and as what."""
    if call is not None and op.name in transformer_engine.FUNCTIONS:
        part = transformer_engine.part_of(tensor, call)
        if part is not None:
            return Op(part.op, True), part.role
    return op, roles.role_of(tensor, op, call)


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
