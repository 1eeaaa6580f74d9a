"""torch.distributed: DTensors are taken apart, so that the local tensor inside is stored like any other."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_LOCAL = "_local_tensor"


def is_dtensor(tensor: Tensor) -> bool:
    """Whether this is a DTensor, asked without importing what defines it."""
    kind = type(tensor)
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")


def split(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The local tensor of a DTensor, and what makes a DTensor like it of another local tensor."""
    outer = tensor.detach()
    names, context = outer.__tensor_flatten__()  # type: ignore[attr-defined]
    # Beside the local tensor, later versions of torch name the device mesh here.
    rest = {name: getattr(outer, name) for name in names if name != _LOCAL}
    kind, shape, strides = type(outer), outer.shape, outer.stride()

    def join(local: Tensor) -> Tensor:
        parts = {_LOCAL: local, **rest}
        result: Tensor = kind.__tensor_unflatten__(parts, context, shape, strides)  # type: ignore[attr-defined]
        return result

    return getattr(outer, _LOCAL), join
