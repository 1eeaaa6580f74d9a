"""Encoding and decoding in compiled graphs: operations that Inductor fuses with what stands beside them, or else
operators of our own that run the codec.

`square8` is written out, since activations are made and used by element-wise kernels mostly. What attention takes and
gives comes from and goes to kernels that nothing fuses with, so that for the other codecs an operator does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8hooks.codecs import NAMES, Payload, get, square8

# The widest row that is one block, where it is no multiple of the block size.
_WIDEST = 256
_NARROWEST = 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.bool)


class Form(NamedTuple):
    """How a tensor without gaps or overlaps lies in memory: its dimensions from the outermost to the innermost."""

    order: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Form | None:
        """None for a tensor with gaps or overlaps, or of another dtype."""
        if tensor.dtype not in _DTYPES or tensor.dim() == 0:
            return None
        # Sizes may be symbols: sorted by strides as they were at first.
        strides = [_hint(stride) for stride in tensor.stride()]
        sizes = [_hint(size) for size in tensor.shape]
        order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim if sizes[dim] != 1 else -1))
        expected = 1
        for dim in reversed(order):
            if sizes[dim] != 1:
                if strides[dim] != expected:
                    return None
                expected *= sizes[dim]
        return cls(tuple(order))


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 0)


def encode(tensor: Tensor, name: str, block_size: int, form: Form) -> tuple[Any, ...] | None:
    """What stands for a tensor: tensors, and whole numbers; None if it can't be encoded in a graph."""
    rows = tensor.permute(form.order)
    if name == "square8" and (block := _block(rows, block_size)):
        codes, scales = square8.encode_fused(rows.unflatten(-1, (-1, block)))
        return codes.flatten(-2), scales, _DTYPES.index(tensor.dtype), *form.order
    if tensor.dtype is torch.bool and name != "bits":
        return None
    if name == "bits" and tensor.dtype is not torch.bool:
        return None
    if any(not isinstance(size, int) for size in tensor.shape):
        return None
    buffer = torch.ops.fp8hooks.encode(rows.contiguous(), name, block_size)
    return buffer, NAMES.index(name), block_size, _DTYPES.index(tensor.dtype), *rows.shape, *form.order


def _block(rows: Tensor, block_size: int) -> int:
    """The size of blocks along the innermost dimension; 0 if none divides it."""
    width = rows.shape[-1]
    if not isinstance(width, int):
        return 0
    if width % block_size == 0:
        return block_size
    return width if _NARROWEST <= width <= _WIDEST else 0


def decode(packed: Any) -> Tensor:
    """The tensor that `encode` stored."""
    if isinstance(packed[1], Tensor):
        codes, scales, dtype, *order = packed
        rows = square8.decode_fused(codes.unflatten(-1, (scales.shape[-1], -1)), scales, _DTYPES[dtype]).flatten(-2)
    else:
        buffer, name, block_size, dtype, *rest = packed
        sizes, order = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        rows = torch.ops.fp8hooks.decode(buffer, NAMES[name], block_size, sizes, _DTYPES[dtype])
    return rows.permute([order.index(dim) for dim in range(len(order))])


@torch.library.custom_op("fp8hooks::encode", mutates_args=())
def _encode(tensor: Tensor, codec: str, block_size: int) -> Tensor:
    payload = get(codec, block_size).encode(tensor)
    assert payload is not None
    return payload.buffer


@_encode.register_fake
def _(tensor: Tensor, codec: str, block_size: int) -> Tensor:
    return tensor.new_empty(get(codec, block_size).nbytes(tensor.numel()), dtype=torch.uint8)


@torch.library.custom_op("fp8hooks::decode", mutates_args=())
def _decode(buffer: Tensor, codec: str, block_size: int, sizes: list[int], dtype: torch.dtype) -> Tensor:
    numel = 1
    for size in sizes:
        numel *= size
    return Payload(get(codec, block_size), buffer, numel, dtype).decode().view(sizes)


@_decode.register_fake
def _(buffer: Tensor, codec: str, block_size: int, sizes: list[int], dtype: torch.dtype) -> Tensor:
    return buffer.new_empty(sizes, dtype=dtype)
