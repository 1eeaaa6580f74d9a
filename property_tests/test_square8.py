"""What holds for squares of integers beyond what holds for every codec."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from property_tests.strategies import dtypes, finite, seeds
from property_tests.test_codecs import roundtrip


@given(tensor=finite(torch.bfloat16))
def test_the_largest_of_a_bfloat16_block_is_exact(tensor: Tensor) -> None:
    tensor = torch.where(tensor.abs() < 2.0**-90, 0, tensor)
    padded = torch.nn.functional.pad(tensor, (0, -len(tensor) % 128)).view(-1, 128)
    place = padded.abs().argmax(1, keepdim=True)
    decoded = roundtrip("square8", padded.flatten()).view_as(padded)
    assert torch.equal(decoded.gather(1, place), padded.gather(1, place))


@given(seed=seeds, dtype=dtypes, value=st.floats(-1e3, 1e3).filter(lambda v: abs(v) > 1e-3))
def test_a_mask_times_a_number_is_exact(seed: int, dtype: torch.dtype, value: float) -> None:
    """Float masks are the usual case; some kernels refuse a target that is a little over 1."""
    mask = torch.rand(700, generator=torch.Generator().manual_seed(seed)) > 0.4
    tensor = mask.to(dtype) * torch.tensor(value).bfloat16().to(dtype)
    assert torch.equal(roundtrip("square8", tensor), tensor)


@given(seed=seeds)
def test_noise_on_a_normal_distribution_and_on_long_tails(seed: int) -> None:
    """0.7 % of the standard deviation, where FP8 E3M4 has 1.3 %; half of INT8's where tails are long."""
    normal = torch.randn(1 << 14, generator=torch.Generator().manual_seed(seed))
    tails = normal * torch.randn(1 << 14, generator=torch.Generator().manual_seed(seed + 1)).exp()
    error = {
        (name, kind): float((roundtrip(name, x) - x).norm() / x.norm())
        for name in ("square8", "int8", "fp8_e3m4")
        for kind, x in (("normal", normal), ("tails", tails))
    }
    assert error["square8", "normal"] < 0.0075 < error["fp8_e3m4", "normal"] * 0.6
    assert error["square8", "tails"] < 0.7 * error["int8", "tails"]


@given(seed=seeds, size=st.sampled_from((30.0, 300.0)))
def test_a_channel_beside_an_outlier_keeps_its_values(seed: int, size: float) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))
    x[:, 7] *= size
    others = [i for i in range(128) if i != 7]
    error = (roundtrip("square8", x.flatten()).view_as(x) - x)[:, others].norm() / x[:, others].norm()
    assert error < 0.01 * (size / 3) ** 0.5
