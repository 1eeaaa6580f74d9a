"""Triton kernels for the block codecs: one pass over memory each way. Only this folder knows Triton.

Each function here launches one kernel and returns True, or returns False where none can run (no Triton, a GPU that
it does not support), so that the caller falls back on plain torch. The bytes are the same either way.
"""

from __future__ import annotations

import functools
from types import ModuleType

from torch import Tensor

__all__ = ["e4m3_decode", "e4m3_encode", "int8_decode", "int8_encode"]


def e4m3_encode(flat: Tensor, buffer: Tensor, block_size: int, scales_offset: int) -> bool:
    """Encode `flat` (float32, bfloat16 or float16, contiguous) into `buffer` (uint8, scales from `scales_offset`)."""
    module = _load("e4m3")
    return module is not None and module.encode(flat, buffer, block_size, scales_offset)


def e4m3_decode(buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> bool:
    """Decode `buffer`, as `e4m3_encode` writes it, into `out` (flat, contiguous, any of the three dtypes)."""
    module = _load("e4m3")
    return module is not None and module.decode(buffer, out, block_size, scales_offset)


def int8_encode(flat: Tensor, buffer: Tensor, block_size: int, scales_offset: int) -> bool:
    """As `e4m3_encode`, for INT8."""
    module = _load("int8")
    return module is not None and module.encode(flat, buffer, block_size, scales_offset)


def int8_decode(buffer: Tensor, out: Tensor, block_size: int, scales_offset: int) -> bool:
    """As `e4m3_decode`, for INT8."""
    module = _load("int8")
    return module is not None and module.decode(buffer, out, block_size, scales_offset)


@functools.cache
def _load(name: str) -> ModuleType | None:
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    import importlib

    return importlib.import_module(f"fp8hooks.kernels.{name}")
