"""What to do with the saves at one site: decided once, looked up for each save."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8hooks import codecs, identity
from fp8hooks.callsite import Op
from fp8hooks.codecs import Codec, Coder
from fp8hooks.config import CompressConfig
from fp8hooks.identity import Geometry
from fp8hooks.policy import Policy
from fp8hooks.saved import Site


class Recipe:
    """What to do with the saves at one site of tensors of one dtype and geometry on one device.

    Attributes:
        site: who saves, and as what.
        codec: None: what is saved here stays exact.
        shape: the geometry; never None where there is a codec.
        coder: the short way to encode, once known.
        int4: the codec of 4 bits, where a plan may choose it.
        signs_suffice: see `Policy.signs_suffice`.
        shares: see `fp8hooks.saved.Packed`.
        exact_row, row: keys of the ledger's rows, for what stays exact and for what does not.
    """

    __slots__ = ("codec", "coder", "exact_row", "int4", "row", "shape", "shares", "signs_suffice", "site")

    def __init__(self, site: Site, codec: Codec | None, shape: Geometry | None, signs_suffice: bool) -> None:
        self.site = site
        self.codec = codec
        self.shape = shape
        self.signs_suffice = signs_suffice
        self.shares = not site.op.startswith(("Function.", "te.", "ops.", "unknown"))
        self.coder: Coder | None = None
        self.int4: Codec | None = None
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
        if codec is not None and not signs_suffice and policy.bears_int4(site, dtype):
            recipe.int4 = codecs.get("int4", self._block_size)
        if len(self._known) >= self._MOST:
            self._known.clear()
        self._known[key] = recipe
        return recipe
