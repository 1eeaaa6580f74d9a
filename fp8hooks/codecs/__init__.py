"""Storage formats, by name. A new codec is one file here and one line in `_CODECS`."""

from __future__ import annotations

import functools

from fp8hooks.codecs.base import FLOATS, BlockCodec, Codec, Payload
from fp8hooks.codecs.fp8_e3m4 import Fp8E3M4
from fp8hooks.codecs.fp8_e4m3 import Fp8E4M3
from fp8hooks.codecs.fp8_e5m2 import Fp8E5M2
from fp8hooks.codecs.int8 import Int8

__all__ = ["EXACT", "FLOATS", "LOSSY", "NAMES", "BlockCodec", "Codec", "Payload", "get"]

#: The name that means "keep the tensor as it is"; it has no codec object.
EXACT = "exact"

_CODECS: dict[str, type[BlockCodec]] = {codec.name: codec for codec in (Fp8E4M3, Fp8E3M4, Fp8E5M2, Int8)}

#: Names of the codecs that store an approximation.
LOSSY = tuple(_CODECS)

#: Every name that `CompressConfig.format` and `Rule.codec` may take.
NAMES = (EXACT, *LOSSY)


@functools.cache
def get(name: str, block_size: int) -> Codec:
    """The codec called `name` (one of `LOSSY`) with scales for blocks of `block_size` elements."""
    return _CODECS[name](block_size)
