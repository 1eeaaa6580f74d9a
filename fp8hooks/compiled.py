"""The pair of hooks: for AOTAutograd `torch.fx.GraphModule`s that it inlines into forward and backward, for eager
operations a call of the session that is open.

Inside a graph the encoder fuses into the kernel that makes the tensor and the decoder into the one that uses it. Sites
are told from the graph: what consumes the tensor in backward, what made it in forward. All this happens once, while the
graph is compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch._functorch.config as _functorch_config
from torch import Tensor, fx, nn

from fp8hooks import codecs, dynamo, graphs
from fp8hooks.codecs import operators
from fp8hooks.config import CompressConfig
from fp8hooks.policy import Policy
from fp8hooks.saved import Saved, Site, keep_exact

# What compiled graphs hold may change with this package: counted up, so that caches forget older graphs.
_FORMAT = 1


class Compiled(NamedTuple):
    """A tensor that a compiled graph saves.

    Attributes:
        graph, node: its number under this config in this process, and the node's name.
        shape, dtype: as autograd would have saved it. Sizes of dynamic dimensions are those of the first call.
        original_bytes, stored_bytes: for each call of the graph.
    """

    graph: int
    node: str
    site: Site
    codec: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    original_bytes: int
    stored_bytes: int


class Hooks:
    """The pair for one config. Guards of compiled code compare it by identity: there is one for equal configs.

    Attributes:
        pack, unpack: the hooks.
        compiled: what graphs that were compiled under this pair save, in the order of compilation.
    """

    def __init__(self, config: CompressConfig) -> None:
        self.config = config
        self.policy = Policy(config)
        self.compiled: list[Compiled] = []
        self._graphs: dict[int, int] = {}
        self.key = _key(config)
        self.pack: Any = _hook(_pack, self.key, _call_pack)
        self.unpack: Any = _hook(_unpack, self.key, _call_unpack)

    def trace_pack(self, tensor: Tensor) -> Any:
        """What a graph saves in place of `tensor`: tensors, and whole numbers that say how to read them."""
        saved = graphs.saved_node()
        sites = graphs.sites_of(tensor, saved)
        name, site = min(((self._codec(site, tensor), site) for site in sites), key=lambda found: _CARE.index(found[0]))
        form = operators.Form.of(tensor)
        packed = None
        if name != codecs.EXACT and form is not None:
            packed = operators.encode(tensor, name, self.config.block_size, form)
        if saved is not None and site.role != "weight":
            self._record(tensor, saved, site, codecs.EXACT if packed is None else name, packed)
        return tensor if packed is None else packed

    def _codec(self, site: Site, tensor: Tensor) -> str:
        if site.role == "log_prob":
            # Logits, here: the probabilities that backward rebuilds from them would be off by what they are.
            return codecs.EXACT
        least = max(1, self.config.min_numel, self.policy.least_numel(site, tensor.dtype))
        return codecs.EXACT if graphs.hint(tensor.numel()) < least else self.policy.codec(site, tensor.dtype)

    def _record(self, tensor: Tensor, saved: graphs.SavedNode, site: Site, codec: str, packed: Any) -> None:
        number = self._graphs.setdefault(id(saved.forward), len(self._graphs))
        stored = [leaf for leaf in (packed or (tensor,)) if isinstance(leaf, Tensor)]
        entry = Compiled(
            graph=number,
            node=saved.node.name,
            site=site,
            codec=codec,
            shape=tuple(graphs.hint(size) for size in tensor.shape),
            dtype=tensor.dtype,
            original_bytes=graphs.nbytes(tensor),
            stored_bytes=sum(map(graphs.nbytes, stored)),
        )
        if entry not in self.compiled[-1:]:  # a node is packed twice
            self.compiled.append(entry)


# Codecs by how much of a tensor they keep: where its users differ, the first of theirs is taken.
_CARE = (
    codecs.EXACT,
    *codecs.LOSSLESS,
    "int10",
    "cubic8",
    "int8",
    "square8",
    "fp8_e3m4",
    "fp8_e4m3",
    "fp8_e5m2",
    "int4",
)


_all: dict[CompressConfig, Hooks] = {}
_by_key: dict[str, Hooks] = {}
_lock = threading.Lock()


def hooks(config: CompressConfig) -> Hooks:
    """The pair of hooks for a config."""
    # Of the other settings graphs know nothing.
    config = CompressConfig(
        format=config.format, block_size=config.block_size, min_numel=config.min_numel, rules=config.rules
    )
    with _lock:
        found = _all.get(config)
        if found is None:
            found = _all[config] = Hooks(config)
            _by_key[found.key] = found
        return found


def is_ours(pack_hook: Any) -> bool:
    """Whether a pack hook belongs to a session."""
    return any(pack_hook is pair.pack for pair in _by_key.values())


def _key(config: CompressConfig) -> str:
    """Names a config, and the version of what it means, in every process."""
    text = json.dumps([_FORMAT, config.to_dict()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _pack(tensor: Tensor, key: str) -> Any:
    return _by_key[key].trace_pack(tensor)


def _unpack(packed: Any, key: str) -> Tensor:
    return packed if isinstance(packed, Tensor) else operators.decode(packed)


class Context(Protocol):
    """An entry of a session: what packs in eager."""

    def pack(self, tensor: Tensor, frame: types.FrameType) -> Saved:
        """Keep a tensor that is saved by what runs in a frame."""


class _Open(threading.local):
    """The contexts open on a thread, the innermost last."""

    def __init__(self) -> None:
        self.contexts: list[tuple[Hooks, Context]] = []


_open = _Open()


@contextlib.contextmanager
def installed(pair: Hooks, context: Context) -> Iterator[None]:
    """Push a pair of hooks onto this thread, for a context."""
    entry = (pair, context)
    # Graph inputs that are activations are compressed too, and weights never.
    with (
        _functorch_config.patch(saved_tensors_hooks_filtering_mode="no_static"),
        torch.autograd.graph.saved_tensors_hooks(pair.pack, pair.unpack),
    ):
        _open.contexts.append(entry)
        try:
            yield
        finally:
            _open.contexts.remove(entry)


def _call_pack(hook: fx.GraphModule, tensor: Tensor) -> Any:
    """The pack hook as autograd calls it."""
    kind = type(tensor)
    if kind is not Tensor and kind is not nn.Parameter and torch._guards.TracingContext.try_get() is not None:
        return hook.forward(tensor)
    frame = sys._getframe(1)
    for pair, context in reversed(_open.contexts):
        if pair.pack is hook:
            return context.pack(tensor, frame)
    return keep_exact(tensor, Site("", "unknown", "activation"))


def _call_unpack(hook: fx.GraphModule, saved: Any) -> Tensor:
    """The unpack hook as autograd calls it."""
    if isinstance(saved, Saved):
        return saved.unpack()
    return hook.forward(saved)


dynamo.skip(_call_pack, _call_unpack)


def _hook(function: Callable[..., Any], key: str, call: Callable[..., Any]) -> fx.GraphModule:
    """A graph of one call, `function(input, key)`, which in eager is `call(hook, input)`."""
    graph = fx.Graph()
    node = graph.call_function(function, (graph.placeholder("saved"), key))
    # AOTAutograd's and Inductor's caches know the graph by this.
    node.meta.update(is_wrapped=True, user_cache_hash=f"fp8hooks.{function.__name__}.{key}")
    graph.output(node)
    hook = fx.GraphModule(nn.Module(), graph)
    type(hook).__call__ = call  # type: ignore[method-assign]  # each instance has a class of its own
    return hook
