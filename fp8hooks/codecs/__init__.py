"""Storage formats, by name. A new codec is one file here and one name below."""

from __future__ import annotations

import functools

import torch

from fp8hooks.codecs.base import FLOATS, BlockCodec, Codec, Coder, Payload
from fp8hooks.codecs.bits import Bits, Signs
from fp8hooks.codecs.cubic8 import Cubic8
from fp8hooks.codecs.fp8_e3m4 import Fp8E3M4
from fp8hooks.codecs.fp8_e4m3 import Fp8E4M3
from fp8hooks.codecs.fp8_e5m2 import Fp8E5M2
from fp8hooks.codecs.int4 import Int4
from fp8hooks.codecs.int8 import Int8
from fp8hooks.codecs.int10 import Int10
from fp8hooks.codecs.narrow import Narrow
from fp8hooks.codecs.raw import Raw
from fp8hooks.codecs.square8 import Square8

__all__ = [
    "ALWAYS_STOCHASTIC",
    "EXACT",
    "FLOATS",
    "LOSSLESS",
    "LOSSY",
    "NAMES",
    "RAW",
    "SIGNS",
    "BlockCodec",
    "Codec",
    "Coder",
    "Payload",
    "get",
    "holds",
]

#: The name that means "keep the tensor as it is"; it has no codec object.
EXACT = "exact"

_LOSSY: dict[str, type[BlockCodec]] = {
    codec.name: codec for codec in (Fp8E4M3, Fp8E3M4, Fp8E5M2, Int8, Int10, Int4, Square8, Cubic8)
}
_LOSSLESS: dict[str, type[Bits] | type[Narrow]] = {codec.name: codec for codec in (Bits, Narrow)}

#: Not for rules: it keeps no values, and serves only where `fp8hooks.policy` knows that signs suffice.
SIGNS = Signs.name

#: Not for rules either: what is moved to host memory as it is.
RAW = Raw()

#: Names of the codecs that store an approximation, and of those that do not.
LOSSY, LOSSLESS = tuple(_LOSSY), tuple(_LOSSLESS)

#: So coarse that rounding to nearest would bias a gradient for good: sessions round these stochastically, asked or not.
ALWAYS_STOCHASTIC = frozenset({Int4.name})

#: Every name that `Rule.codec` may take.
NAMES = (EXACT, *LOSSY, *LOSSLESS)


@functools.cache
def get(name: str, block_size: int) -> Codec:
    """The codec called `name` (any of `NAMES` but `exact`); lossy ones have scales for `block_size` elements."""
    if name == SIGNS:
        return Signs()
    return _LOSSY[name](block_size) if name in _LOSSY else _LOSSLESS[name]()


def holds(name: str, dtype: torch.dtype) -> bool:
    """Whether the codec called `name` takes tensors of `dtype`."""
    return name == EXACT or dtype in (_LOSSY.get(name) or _LOSSLESS[name]).dtypes
