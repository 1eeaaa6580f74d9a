"""Runs every kernel of this package once a layout on little memory: what `tests/test_sanitizer_gpu.py` watches."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8hooks import codecs, kernels
from fp8hooks.identity import core_of, geometry


def cores(dtype: torch.dtype) -> list[Tensor]:
    """Memory as kernels meet it: dense with a ragged end, chunks of rows, heads of a fused product."""
    x = torch.randn(4, 6, 1536, device="cuda").to(dtype)
    tensors = [torch.randn(1000, device="cuda").to(dtype), x[..., 512:1024], x.view(4, 6, 12, 128)[:, :, 4:8]]
    shapes = [geometry(tensor.shape, tensor.stride()) for tensor in tensors]
    return [core_of(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True) if shape is not None]


def block_codecs(name: str, dtype: torch.dtype) -> None:
    codec = codecs.get(name, 128)
    for core in cores(dtype):
        for seed in (None, 7):
            payload = codec.encode(core, seed=seed)
            assert payload is not None
            out = torch.empty_strided(core.shape, core.stride(), dtype=dtype, device="cuda")
            payload.decode_into(out)
            assert (payload.decode() - core.flatten()).abs().max() < 1


def bits() -> None:
    for numel in (7, 1000, 4096):
        mask = torch.rand(numel, device="cuda") > 0.5
        buffer = torch.empty((numel + 7) // 8, dtype=torch.uint8, device="cuda")
        out = torch.empty_like(mask)
        assert kernels.pack_bits(mask, buffer, signs=False)
        assert kernels.unpack_bits(buffer, out)
        assert torch.equal(mask, out)


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name in codecs.LOSSY:
            block_codecs(name, dtype)
    bits()
    torch.cuda.synchronize()
    print("ran every kernel")
