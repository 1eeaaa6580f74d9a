"""Which memory a tensor is: its geometry, and its storage, weakly held.

Two saved tensors are the same memory if they agree in storage, offset, the extent they cover, dtype and version. `x`,
`x.view(-1, h)` and `x.t()` are; two chunks of a fused buffer are not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies in memory, without saying where.

    Attributes:
        sizes, strides: of the tensor, in elements, as they must come back.
        core: the memory itself: (size, stride) pairs by falling stride, without expanded (stride 0) and unit
            dimensions, neighbours merged where they are evenly spaced. Views of the same memory have the same core.
        numel: elements of the core.
        span: elements from the first to the last, gaps included.
        whole: no gaps, and nothing expanded.
        memory: sizes and strides (plain tuples) of a tensor that takes up the span: the geometry's own where whole.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    core: tuple[tuple[int, int], ...]
    numel: int
    span: int
    whole: bool
    memory: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def dense(self) -> bool:
        """No gaps: the core is one run of memory."""
        return self.span == self.numel


@functools.lru_cache(maxsize=8192)
def geometry(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Geometry | None:
    """The geometry of a strided tensor; None if elements overlap otherwise than by expansion, or if there are none."""
    dims = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1 and stride != 0]
    if 0 in sizes:
        return None
    merged: list[tuple[int, int]] = []
    span = 1
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride < span:
            return None
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
        span += (size - 1) * stride
    core = tuple(reversed(merged))
    numel = 1
    for size, _ in core:
        numel *= size
    whole = span == numel and all(stride != 0 or size == 1 for size, stride in zip(sizes, strides, strict=True))
    memory = (tuple(sizes), tuple(strides)) if whole else ((span,), (1,))
    return Geometry(sizes, strides, core, numel, span, whole, memory)


def core_of(tensor: Tensor, shape: Geometry) -> Tensor:
    """The tensor's memory as a view whose elements are in memory order: contiguous where dense, else with gaps."""
    if shape.dense:
        # Nobody who takes a core minds how many dimensions a contiguous one has, and a view costs a microsecond.
        return tensor if tensor.is_contiguous() else tensor.as_strided((shape.numel,), (1,), tensor.storage_offset())
    sizes, strides = zip(*shape.core, strict=True)
    return tensor.as_strided(sizes, strides, tensor.storage_offset())


def view_as(memory: Tensor, shape: Geometry) -> Tensor:
    """The tensor of the geometry's sizes and strides over new memory of its `memory`."""
    return memory if shape.whole else memory.as_strided(shape.sizes, shape.strides)


def edited_message(tensor: Tensor, version: int, site: str, shape: tuple[int, ...] | None = None) -> str:
    """Autograd's error for a tensor (of another shape, if given) that was edited after it was saved at a version."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape if shape is None else shape)}] saved by {site} is at version "
        f"{tensor._version}; expected version {version} instead."
    )


class Storages:
    """The storages seen in one context, each weakly held.

    A weak reference keeps the address of the storage's header from being used again, so an address identifies a
    storage for as long as this object lives, though its memory is freed as usual. The references are torch's own, as
    in `torch.multiprocessing.reductions.StorageWeakRef`, without an object around each: this runs for every save.
    """

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def __len__(self) -> int:
        return len(self._addresses)

    def address(self, storage: torch.UntypedStorage) -> int:
        """The identity of a storage; held weakly from now on."""
        address = storage._cdata
        if address not in self._addresses:
            storage._weak_ref()  # returns the address, and counts a weak reference to it
            self._addresses.add(address)
        return address

    def alive(self, address: int) -> bool:
        """Whether somebody still holds the storage."""
        return not torch.UntypedStorage._expired(address)

    def clear(self) -> None:
        """Let go of all."""
        while self._addresses:
            torch.UntypedStorage._free_weak_ref(self._addresses.pop())

    def __del__(self) -> None:
        # Also where a context was dropped without being left.
        self.clear()
