"""What holds for E4M3 with power-of-two scales, beyond what holds for every codec."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8hooks import codecs
from fp8hooks.codecs.minifloat import power_of_two
from property_tests.strategies import DTYPES, any_values, block_sizes, dtypes, finite, seeds
from property_tests.test_codecs import roundtrip

NAME = "fp8_e4m3"


@given(seed=seeds, dtype=dtypes, block_size=block_sizes)
def test_powers_of_two_near_the_largest_are_exact(seed: int, dtype: torch.dtype, block_size: int) -> None:
    exponents = torch.randint(-6, 7, (300,), generator=torch.Generator().manual_seed(seed))
    tensor = torch.exp2(exponents.float()).to(dtype)
    assert torch.equal(roundtrip(NAME, tensor, block_size), tensor)


@given(exponent=st.integers(-126, 127))
def test_a_lone_power_of_two_is_exact(exponent: int) -> None:
    tensor = torch.full((3,), 2.0**exponent)
    assert torch.equal(roundtrip(NAME, tensor), tensor) or exponent < -133


@given(tensor=finite(), block_size=block_sizes)
def test_decoding_and_encoding_again_changes_nothing(tensor: Tensor, block_size: int) -> None:
    once = roundtrip(NAME, tensor, block_size)
    assert torch.equal(roundtrip(NAME, once, block_size), once)


@given(seed=seeds, shift=st.integers(-40, 40), block_size=block_sizes)
def test_scaling_by_a_power_of_two_scales_the_result(seed: int, shift: int, block_size: int) -> None:
    tensor = torch.randn(700, generator=torch.Generator().manual_seed(seed))
    scaled = roundtrip(NAME, tensor * 2.0**shift, block_size)
    assert torch.equal(scaled, roundtrip(NAME, tensor, block_size) * 2.0**shift)


@given(tensor=finite(), block_size=block_sizes)
def test_relative_error_of_normal_codes_is_a_sixteenth(tensor: Tensor, block_size: int) -> None:
    codec = codecs.get(NAME, block_size)
    payload = codec.encode(tensor)
    scale = power_of_two(codec.split(payload)[1].int()).double().repeat_interleave(block_size)[: tensor.numel()]
    normal = tensor.double().abs() >= scale * 2.0**-6
    error = (payload.decode().double() - tensor.double()).abs()
    assert (error[normal] <= tensor.double().abs()[normal] / 16).all()


def test_what_fp8_holds_comes_back_exactly() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    values = values[values.isfinite() & (values.abs() <= 416)]
    for dtype in DTYPES:
        assert torch.equal(roundtrip(NAME, values.to(dtype), 256), values.to(dtype))


def test_codes_are_those_of_torch() -> None:
    """With a block whose scale is 1, the bytes are `float8_e4m3fn`'s own."""
    tensor = torch.cat([torch.zeros(1), torch.linspace(-416, -1, 63), torch.linspace(1, 416, 64)])
    codec = codecs.get(NAME, 128)
    codes, scales = codec.split(codec.encode(tensor))
    assert scales.tolist() == [127]
    want = tensor.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes, want)


@given(tensor=any_values(), block_size=block_sizes)
def test_non_finite_elements_do_not_touch_the_scale(tensor: Tensor, block_size: int) -> None:
    wild = ~tensor.isfinite()
    tame = torch.where(wild, torch.zeros((), dtype=tensor.dtype), tensor)
    assert torch.equal(roundtrip(NAME, tensor, block_size)[~wild], roundtrip(NAME, tame, block_size)[~wild])
