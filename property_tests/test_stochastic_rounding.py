"""Stochastic rounding: right on the average, and the same for the same seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8hooks import codecs
from fp8hooks.codecs import philox
from property_tests.strategies import any_values, block_sizes, finite
from property_tests.test_codecs import every_codec, rounding

noise_seeds = st.integers(0, 2**63 - 1)


@every_codec
@given(tensor=any_values(), block_size=block_sizes, seed=noise_seeds)
def test_the_same_seed_gives_the_same_bytes(name: str, tensor: Tensor, block_size: int, seed: int) -> None:
    codec = codecs.get(name, block_size)
    assert torch.equal(codec.encode(tensor, seed=seed).buffer, codec.encode(tensor.clone(), seed=seed).buffer)


@every_codec
@given(seed=noise_seeds)
def test_another_seed_gives_other_bytes(name: str, seed: int) -> None:
    tensor, codec = torch.linspace(-1, 1, 1000), codecs.get(name, 128)
    assert not torch.equal(codec.encode(tensor, seed=seed).buffer, codec.encode(tensor, seed=seed ^ 1).buffer)


@every_codec
@given(tensor=finite(), block_size=block_sizes, seed=noise_seeds)
def test_each_element_goes_to_a_neighbouring_code(name: str, tensor: Tensor, block_size: int, seed: int) -> None:
    codec = codecs.get(name, block_size)
    decoded = codec.encode(tensor, seed=seed).decode()
    error = (decoded.double() - tensor.double()).abs()
    assert (error <= 2.01 * codec.error_bound(tensor) + rounding(decoded)).all()


@every_codec
@given(tensor=any_values(), block_size=block_sizes, seed=noise_seeds)
def test_signs_zeros_and_what_is_not_finite_are_kept(name: str, tensor: Tensor, block_size: int, seed: int) -> None:
    decoded = codecs.get(name, block_size).encode(tensor, seed=seed).decode()
    number = ~tensor.isnan()
    assert torch.equal(decoded.sign()[number], tensor.sign()[number])
    assert torch.equal(decoded.isinf(), tensor.isinf())
    assert torch.equal(decoded.isnan(), tensor.isnan())


@every_codec
@given(seed=noise_seeds, shift=st.integers(-20, 20), one_sign=st.booleans())
def test_the_mean_converges_on_the_element(name: str, seed: int, shift: int, one_sign: bool) -> None:
    """For elements of at least one step: what is smaller can't become zero, and so has a mean of up to one step."""
    copies = 4096
    block = torch.rand(128, generator=torch.Generator().manual_seed(seed % 2**32)) * 0.8 + 0.2
    signs = torch.where(torch.arange(128) % 3 == 0, -1, 1)
    block = block * (1 if one_sign else signs) * 2.0**shift
    codec = codecs.get(name, 128)
    decoded = codec.encode(block.repeat(copies), seed=seed).decode().view(copies, 128)
    step = 2 * codec.error_bound(block)
    # Deviation of one draw: at most half a step. Seven deviations of the mean.
    assert ((decoded.double().mean(0) - block.double()).abs() <= 7 * step / 2 / copies**0.5 + step * 1e-3).all()


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5])
def test_noise_does_not_depend_on_how_it_is_asked_for(seed: int) -> None:
    whole = philox.noise(seed, 0, 1000, torch.device("cpu"))
    parts = [philox.noise(seed, first, min(first + 128, 1000), torch.device("cpu")) for first in range(0, 1000, 128)]
    assert torch.equal(whole, torch.cat(parts))
    assert 0 <= int(whole.min()) <= int(whole.max()) < 2**24
    assert abs(whole.float().mean() / 2**24 - 0.5) < 0.05


def test_philox_is_the_published_one() -> None:
    """Known answers of the Random123 library: counter and key of zeros, and of the digits of pi."""
    words = philox._philox(torch.zeros(1, dtype=torch.int64), 0)
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
