"""What holds for the codecs that lose nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8hooks import codecs
from property_tests.strategies import dtypes, finite, lengths, seeds

BITS, NARROW = codecs.get("bits", 128), codecs.get("narrow", 128)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@given(seed=seeds, numel=lengths)
def test_masks_come_back_from_an_eighth_of_their_bytes(seed: int, numel: int) -> None:
    mask = torch.rand(numel, generator=torch.Generator().manual_seed(seed)) > 0.4
    payload = BITS.encode(mask)
    assert payload.nbytes == -(-numel // 8) == BITS.nbytes(numel)
    assert same(payload.decode(), mask)


@given(seed=seeds, numel=lengths, dtype=dtypes, value=st.floats(-1e4, 1e4).filter(lambda v: abs(v) > 1e-3))
def test_two_values_come_back_exactly(seed: int, numel: int, dtype: torch.dtype, value: float) -> None:
    mask = torch.rand(numel, generator=torch.Generator().manual_seed(seed)) > 0.4
    tensor = mask.to(dtype) * torch.tensor(value).to(dtype)
    payload = BITS.encode(tensor)
    assert payload.nbytes <= -(-numel // 8) + 8
    assert same(payload.decode(), tensor)


@given(tensor=finite())
def test_bits_refuses_what_it_would_lose(tensor: Tensor) -> None:
    payload = BITS.encode(tensor)
    values = tensor.unique()
    if payload is None:
        assert len(values[values != 0]) > 1
    else:
        assert same(payload.decode(), tensor)


@given(seed=seeds, numel=lengths, dtype=st.sampled_from((torch.int64, torch.int32)), data=st.data())
def test_integers_come_back_from_the_smallest_type(seed: int, numel: int, dtype: torch.dtype, data) -> None:
    info = torch.iinfo(dtype)
    ends = st.one_of(st.integers(-300, 300), st.integers(-40000, 40000), st.integers(info.min, info.max - 1))
    low, high = sorted((data.draw(ends), data.draw(ends)))
    tensor = torch.randint(low, high + 1, (numel,), generator=torch.Generator().manual_seed(seed), dtype=dtype)
    payload = NARROW.encode(tensor)
    if payload is None:
        fits = torch.iinfo(torch.int32 if dtype is torch.int64 else torch.int16)
        assert int(tensor.min()) < fits.min or int(tensor.max()) > fits.max
    else:
        assert payload.nbytes < numel * dtype.itemsize
        assert same(payload.decode(), tensor)


@pytest.mark.parametrize(("limit", "size"), [(256, 1), (257, 2), (32768, 2), (32769, 4), (2**31, 4)])
def test_a_known_limit_spares_the_look(limit: int, size: int) -> None:
    tensor = torch.tensor([0, limit - 1, 5])
    payload = NARROW.encode(tensor, limit=limit)
    assert payload.nbytes == size * 3
    assert same(payload.decode(), tensor)


def test_what_does_not_fit_is_refused() -> None:
    assert NARROW.encode(torch.tensor([2**40])) is None
    assert NARROW.encode(torch.tensor([7]), limit=2**31 + 1) is None
    assert BITS.encode(torch.tensor([0.0, float("inf")])) is None
    assert BITS.encode(torch.tensor([1.0, float("nan")])) is None
