"""Triton kernels for the block codecs: one pass over memory each way. Only this folder knows Triton.

Each function here launches one kernel and returns True, or returns False where none can run (no Triton, a GPU that
it does not support), so that the caller falls back on plain torch. The bytes are the same either way.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from fp8hooks.codecs.minifloat import Format

__all__ = [
    "cubic8_decode",
    "cubic8_encode",
    "int8_decode",
    "int8_encode",
    "minifloat_decode",
    "minifloat_encode",
]


def minifloat_encode(form: Format, flat: Tensor, buffer: Tensor, block_size: int, scales_offset: int) -> bool:
    """Encode `flat` (float32, bfloat16 or float16, contiguous) into `buffer` (uint8, scales from `scales_offset`)."""
    return _encode("minifloat", form, flat, buffer, block_size, scales_offset)


def minifloat_decode(form: Format, buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> bool:
    """Decode `buffer`, as `minifloat_encode` writes it, into `out` (flat, contiguous, any of the three dtypes)."""
    return _decode("minifloat", form, buffer, out, block_size, scales_offset)


def int8_encode(flat: Tensor, buffer: Tensor, block_size: int, scales_offset: int) -> bool:
    """As `minifloat_encode`, for INT8."""
    return _encode("int8", flat, buffer, block_size, scales_offset)


def int8_decode(buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> bool:
    """As `minifloat_decode`, for INT8."""
    return _decode("int8", buffer, out, block_size, scales_offset)


def cubic8_encode(flat: Tensor, buffer: Tensor, block_size: int, scales_offset: int) -> bool:
    """As `minifloat_encode`, for cubes."""
    return _encode("cubic8", flat, buffer, block_size, scales_offset)


def cubic8_decode(buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> bool:
    """As `minifloat_decode`, for cubes."""
    return _decode("cubic8", buffer, out, block_size, scales_offset)


def _encode(name: str, *args: object) -> bool:
    module = _load(name)
    return module is not None and module.encode(*args)


def _decode(name: str, *args: object) -> bool:
    module = _load(name)
    return module is not None and module.decode(*args)


@functools.cache
def _load(name: str) -> ModuleType | None:
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    import importlib

    return importlib.import_module(f"fp8hooks.kernels.{name}")
