"""Kernels against the plain-torch reference, bit for bit: on a GPU, or in Triton's interpreter.

Triton decides when it is imported whether it interprets, so the interpreted tests run in a process of their own
(`test_in_the_interpreter`) wherever there is no GPU.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8hooks import codecs, kernels
from fp8hooks.codecs import bits
from property_tests.strategies import any_values, block_sizes, seeds

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
# Names and, for FP8, whether the hardware's conversion is used.
VARIANTS = [
    *((name, {"native": False}) for name in codecs.LOSSY if name.startswith("fp8")),
    *((name, {}) for name in codecs.LOSSY if not name.startswith("fp8")),
]
if DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
    VARIANTS += [(name, {"native": True}) for name, _ in VARIANTS if name.startswith("fp8")]

runs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="no CUDA device here; test_in_the_interpreter runs it"
)
variants = pytest.mark.parametrize(("name", "options"), VARIANTS)
# No deadline: the first launch of each variant compiles.
few = settings(max_examples=20 if INTERPRETED else 100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run(name: str, verb: str, *args, **options) -> bool:
    """Call the kernel of a codec past the choices that the codec makes."""
    codec = codecs.get(name, 128)
    family = importlib.import_module(f"fp8hooks.kernels.{codec.kernel_family}")
    return getattr(family, verb)(*codec.kernel_settings, *args, **options)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


@runs_kernels
@variants
@few
@given(tensor=any_values(), block_size=block_sizes, seed=st.none() | st.integers(0, 2**64 - 1))
def test_encode_writes_the_reference_bytes(
    name: str, options: dict, tensor: Tensor, block_size: int, seed: int | None
) -> None:
    codec = codecs.get(name, block_size)
    want = codec.encode_reference(tensor, seed=seed).buffer
    got = torch.full_like(want, 0xAA).to(DEVICE)
    offset = codec.scales_offset(tensor.numel())
    got[codec.code_bytes(tensor.numel()) : offset] = 0
    assert run(name, "encode", tensor.to(DEVICE), got, codec.block_size, offset, seed, **options)
    assert torch.equal(got.cpu(), want)


@runs_kernels
@variants
@few
@given(tensor=any_values(), block_size=block_sizes)
def test_decode_gives_the_reference_values(name: str, options: dict, tensor: Tensor, block_size: int) -> None:
    codec = codecs.get(name, block_size)
    payload = codec.encode_reference(tensor)
    out = torch.full((tensor.numel(),), 77.0, dtype=tensor.dtype, device=DEVICE)
    offset = codec.scales_offset(tensor.numel())
    assert run(name, "decode", payload.buffer.to(DEVICE), out, codec.block_size, offset, **options)
    assert same(out.cpu(), codec.decode_reference(payload))


@runs_kernels
@pytest.mark.parametrize("name", codecs.LOSSY)
def test_codecs_find_their_kernels_and_the_reference_agrees(name: str) -> None:
    codec = codecs.get(name, 64)
    tensor = torch.randn(777)
    want = codec.encode_reference(tensor)
    buffer, out = torch.zeros_like(want.buffer).to(DEVICE), torch.empty(777, device=DEVICE)
    assert codec.encode_by_kernel(tensor.to(DEVICE), buffer)
    assert torch.equal(buffer.cpu(), want.buffer)
    payload = codecs.Payload(codec, buffer, 777, torch.float32)
    assert codec.decode_by_kernel(payload, out)
    assert same(out.cpu(), codec.decode_reference(want))


# Cores with gaps, as (sizes, strides): runs of many blocks, of one, and two levels of them.
CORES = [((5, 2048), (6144, 1)), ((7, 128), (384, 1)), ((3, 4, 256), (5008, 512, 1)), ((2, 3, 1024), (9216, 2048, 1))]


@runs_kernels
@pytest.mark.parametrize(("sizes", "strides"), CORES)
@pytest.mark.parametrize("name", codecs.LOSSY)
def test_gaps_are_passed_over_both_ways(name: str, sizes: tuple, strides: tuple) -> None:
    """What the reference has: the same bytes as of a compact copy, decoded in place, gaps left alone."""
    codec = codecs.get(name, 128)
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    core = torch.randn(span).as_strided(sizes, strides)
    core[..., 5] = float("inf")
    want = codec.encode_reference(core.reshape(-1))
    buffer = torch.zeros_like(want.buffer).to(DEVICE)
    moved = torch.empty(span, device=DEVICE).as_strided(sizes, strides)
    moved.copy_(core)
    assert codec.encode_by_kernel(moved, buffer)
    assert torch.equal(buffer.cpu(), want.buffer)
    memory = torch.full((span,), 77.0, device=DEVICE)
    out = memory.as_strided(sizes, strides)
    assert codec.decode_by_kernel(codecs.Payload(codec, buffer, core.numel(), torch.float32), out)
    assert same(out.cpu().reshape(-1), codec.decode_reference(want))
    out.fill_(77.0)
    assert (memory == 77.0).all()


@runs_kernels
@few
@given(tensor=any_values(), seed=seeds)
def test_bits_and_signs(tensor: Tensor, seed: int) -> None:
    mask = torch.rand(len(tensor), generator=torch.Generator().manual_seed(seed)) > 0.4
    for flat, signs in ((mask, False), (tensor, True)):
        want = bits.pack_reference(flat, signs)
        buffer = torch.full_like(want, 0xAA).to(DEVICE)
        assert kernels.pack_bits(flat.to(DEVICE), buffer, signs)
        assert torch.equal(buffer.cpu(), want)
        out = torch.ones_like(flat).to(DEVICE)
        assert kernels.unpack_bits(buffer, out)
        assert torch.equal(out.cpu(), bits.unpack_reference(want, len(flat), flat.dtype))


@runs_kernels
def test_what_kernels_cannot_reach_is_refused() -> None:
    codec = codecs.get("square8", 128)
    buffer = torch.zeros(1 << 14, dtype=torch.uint8, device=DEVICE)
    memory = torch.randn(1 << 14, device=DEVICE)
    for sizes, strides in (
        ((8, 100), (200, 1)),
        ((8, 128), (200, 1)),
        ((8, 128), (512, 2)),
        ((2, 2, 2, 128), (2048, 1024, 256, 1)),
    ):
        assert not codec.encode_by_kernel(memory.as_strided(sizes, strides), buffer)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run here as they are")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-k",
        "not interpreter",
        __file__,
    ]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
