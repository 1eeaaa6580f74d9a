"""Triton kernels for the block codecs: one pass over memory each way. Only this folder knows Triton.

Each function here launches one kernel, and returns False or None where none can run (no Triton, memory that is strided
otherwise than in runs of whole blocks), so that the caller falls back. The bytes are the same either way.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from fp8hooks.kernels.launch import Launch

__all__ = ["decode", "encode", "pack_bits", "unpack_bits"]


def encode(
    family: str,
    core: Tensor,
    buffer: Tensor,
    block_size: int,
    scales_offset: int,
    seed: int | None = None,
    *settings: object,
) -> Launch | None:
    """Encode `core` (float32, bfloat16 or float16) into `buffer` (uint8, scales from `scales_offset`).

    Args:
        family: `minifloat`, `integers`, `square8` or `cubic8`.
        seed: of stochastic rounding; None rounds to nearest.
        settings: what the family needs besides: the format, for `minifloat`; the bits, for `integers`.
    """
    module = _load(family)
    return None if module is None else module.encode(*settings, core, buffer, block_size, scales_offset, seed)


def decode(
    family: str, buffer: Tensor, out: Tensor, block_size: int, scales_offset: int, *settings: object
) -> Launch | None:
    """Decode `buffer`, as `encode` writes it, into `out` (a core, of any of the three dtypes)."""
    module = _load(family)
    return None if module is None else module.decode(*settings, buffer, out, block_size, scales_offset)


def pack_bits(flat: Tensor, buffer: Tensor, signs: bool) -> bool:
    """Write a bit for each element of `flat` (contiguous) into `buffer` (uint8), the first in the lowest bit.

    Args:
        signs: the bit of a number says that it is positive or NaN; otherwise (bool) that it is not zero.
    """
    module = _load("bits")
    if module is not None:
        module.pack(flat, buffer, signs)
    return module is not None


def unpack_bits(buffer: Tensor, out: Tensor) -> bool:
    """Write the bits that `pack_bits` wrote as 1 and 0 into `out` (contiguous; bool or a float)."""
    module = _load("bits")
    if module is not None:
        module.unpack(buffer, out)
    return module is not None


@functools.cache
def _load(family: str) -> ModuleType | None:
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    return importlib.import_module(f"fp8hooks.kernels.{family}")
