"""What holds for INT8 beyond what holds for every codec."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from property_tests.strategies import seeds
from property_tests.test_codecs import roundtrip


@given(seed=seeds, offset=st.floats(10, 1e4), sign=st.sampled_from((-1, 1)))
def test_a_common_offset_costs_no_precision(seed: int, offset: float, sign: int) -> None:
    noise = torch.rand(512, generator=torch.Generator().manual_seed(seed))
    tensor = (noise + offset) * sign
    error = (roundtrip("int8", tensor) - tensor).abs().max()
    # Half a step of 1/253 of the range, to which truncating the offset to bfloat16 adds at most 2**-7 of it.
    assert error <= (1 + offset * 2.0**-7) / 253 * 0.51 + offset * 2.0**-22


@given(seed=seeds, peak=st.floats(0, 30))
def test_probabilities_survive_their_logarithm(seed: int, peak: float) -> None:
    """exp(log p) after the round trip, for the few likely and the many unlikely alike."""
    logits = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)) * 4
    logits[:, 3] += peak
    log_p = logits.log_softmax(-1)
    decoded = roundtrip("int8", log_p.flatten()).view_as(log_p)
    assert (decoded.exp() - log_p.exp()).norm() <= 0.05 * log_p.exp().norm()


@given(seed=seeds)
def test_codes_are_uniform_steps_of_the_largest(seed: int) -> None:
    tensor = torch.randn(128, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3)
    tensor[0], tensor[1] = 3.0, -3.0
    step = 3 / 126 * (1 + 2.0**-7)  # the scale is rounded up to bfloat16
    error = (roundtrip("int8", tensor) - tensor).abs()
    assert (error <= torch.where(tensor.abs() > step / 2, step / 2, step) * 1.0001).all()
