"""What holds for every lossy codec, on any values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8hooks import codecs
from property_tests.strategies import DTYPES, any_values, block_sizes, finite, special

every_codec = pytest.mark.parametrize("name", codecs.LOSSY)


def roundtrip(name: str, tensor: Tensor, block_size: int = 128) -> Tensor:
    return codecs.get(name, block_size).encode(tensor).decode()


def rounding(decoded: Tensor) -> Tensor:
    """What rounding to the dtype may have added: at most one unit in the last place."""
    info = torch.finfo(decoded.dtype)
    return (decoded.double().abs() * info.eps).clamp(min=info.smallest_normal * info.eps)


@every_codec
@given(tensor=finite(), block_size=block_sizes)
def test_each_element_is_within_the_stated_bound(name: str, tensor: Tensor, block_size: int) -> None:
    codec = codecs.get(name, block_size)
    decoded = codec.encode(tensor).decode()
    error = (decoded.double() - tensor.double()).abs()
    # Codes of FP8 are representable in all three dtypes; nothing is rounded after them.
    allowed = codec.error_bound(tensor) + (0 if name in ("fp8_e4m3", "fp8_e5m2") else rounding(decoded))
    assert (error <= allowed).all()


@every_codec
@given(tensor=any_values(), block_size=block_sizes)
def test_signs_are_kept_and_nothing_becomes_zero(name: str, tensor: Tensor, block_size: int) -> None:
    decoded = roundtrip(name, tensor, block_size)
    number = ~tensor.isnan()
    assert torch.equal(decoded.sign()[number], tensor.sign()[number])


@every_codec
@given(tensor=any_values(), block_size=block_sizes)
def test_non_finite_elements_come_back_and_leave_their_neighbours_alone(
    name: str, tensor: Tensor, block_size: int
) -> None:
    decoded = roundtrip(name, tensor, block_size)
    wild = ~tensor.isfinite()
    assert torch.equal(decoded[wild].nan_to_num(nan=7.0), tensor[wild].nan_to_num(nan=7.0))
    # In their place the least number of the same sign: signs decide how some codecs store a block.
    least = torch.tensor(torch.finfo(tensor.dtype).tiny, dtype=tensor.dtype)
    tame = torch.where(wild, torch.where(tensor.isnan(), 0, torch.copysign(least, tensor)), tensor)
    error = (decoded.double() - tensor.double()).abs()[~wild]
    # INT4's steps are wider in a block with infinities or NaN: 6 in place of 7 for the largest element.
    bound = codecs.get(name, block_size).error_bound(tensor if name == "int4" else tame)
    allowed = bound + rounding(decoded)
    assert (error <= allowed[~wild]).all()


@every_codec
@given(tensor=finite(), block_size=block_sizes)
def test_finite_elements_stay_finite(name: str, tensor: Tensor, block_size: int) -> None:
    assert roundtrip(name, tensor, block_size).isfinite().all()


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_the_range_stay_finite_and_not_zero(name: str, dtype: torch.dtype) -> None:
    for value in special(dtype):
        decoded = roundtrip(name, value.repeat(200))
        assert decoded.isfinite().all()
        assert torch.equal(decoded.sign(), value.sign().repeat(200))


@every_codec
@given(tensor=finite(), block_size=block_sizes)
def test_zeros_are_exact(name: str, tensor: Tensor, block_size: int) -> None:
    decoded = roundtrip(name, tensor, block_size)
    assert (decoded[tensor == 0] == 0).all()


@every_codec
@given(tensor=any_values(), block_size=block_sizes)
def test_the_payload_has_the_size_that_was_said(name: str, tensor: Tensor, block_size: int) -> None:
    codec = codecs.get(name, block_size)
    payload = codec.encode(tensor)
    assert payload.nbytes == codec.nbytes(tensor.numel())
    assert payload.decode().dtype == tensor.dtype


@every_codec
@given(tensor=any_values(), block_size=block_sizes)
def test_the_same_values_give_the_same_bytes(name: str, tensor: Tensor, block_size: int) -> None:
    codec = codecs.get(name, block_size)
    assert torch.equal(codec.encode(tensor).buffer, codec.encode(tensor.clone()).buffer)


@every_codec
@given(tensor=any_values())
def test_torchs_default_dtype_does_not_matter(name: str, tensor: Tensor) -> None:
    codec = codecs.get(name, 128)
    want = codec.encode(tensor)
    torch.set_default_dtype(torch.float64)
    try:
        got = codec.encode(tensor)
        decoded = got.decode()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got.buffer, want.buffer)
    assert torch.equal(decoded.nan_to_num(), want.decode().nan_to_num())


@every_codec
@given(blocks=st.lists(finite(torch.float32), min_size=1, max_size=4))
def test_blocks_do_not_depend_on_each_other(name: str, blocks: list[Tensor]) -> None:
    padded = [torch.nn.functional.pad(block[:128], (0, 128 - len(block[:128]))) for block in blocks]
    whole = roundtrip(name, torch.cat(padded))
    assert torch.equal(whole, torch.cat([roundtrip(name, block) for block in padded]))
