"""Tensors that hypothesis makes up: dtypes, lengths, magnitudes, and what floating point has at its edges."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

dtypes = st.sampled_from(DTYPES)
block_sizes = st.sampled_from((16, 64, 128, 256))
seeds = st.integers(0, 2**32 - 1)
lengths = st.one_of(st.integers(1, 40), st.integers(100, 140), st.sampled_from((128, 256, 1000, 1024, 5000)))


def special(dtype: torch.dtype) -> Tensor:
    """Zeros of both signs, the ends of the range, subnormals, halves between codes."""
    info = torch.finfo(dtype)
    values = [
        0.0,
        -0.0,
        info.max,
        info.min,
        info.tiny,
        -info.tiny,
        info.smallest_normal * info.eps,
        448.0,
        416.0,
        432.0,
    ]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


@st.composite
def finite(draw: st.DrawFn, dtype: torch.dtype | None = None) -> Tensor:
    """A flat tensor of finite values."""
    dtype = dtype or draw(dtypes)
    generator = torch.Generator().manual_seed(draw(seeds))
    numel = draw(lengths)
    kind = draw(st.sampled_from(("normal", "outliers", "bits", "special", "sparse")))
    normal = torch.randn(numel, generator=generator, dtype=torch.float64)
    if kind == "normal":
        values = normal * 2.0 ** draw(st.integers(-30, 30))
    elif kind == "outliers":
        values = normal * torch.randn(numel, generator=generator, dtype=torch.float64).mul(6).exp()
    elif kind == "sparse":
        values = normal.relu()
    elif kind == "special":
        chosen = special(dtype)
        return chosen[torch.randint(len(chosen), (numel,), generator=generator)]
    else:
        limits = torch.iinfo(_BITS[dtype])
        bits = torch.randint(limits.min, limits.max + 1, (numel,), generator=generator, dtype=torch.int64)
        raw = bits.to(_BITS[dtype]).view(dtype)
        return torch.where(raw.isfinite(), raw, torch.ones((), dtype=dtype))
    info = torch.finfo(dtype)
    return values.clamp(info.min, info.max).to(dtype)


@st.composite
def any_values(draw: st.DrawFn, dtype: torch.dtype | None = None) -> Tensor:
    """As `finite`, with infinities and NaN among them."""
    tensor = draw(finite(dtype)).clone()
    places = draw(st.lists(st.integers(0, len(tensor) - 1), max_size=6))
    for place in places:
        tensor[place] = draw(st.sampled_from((float("inf"), float("-inf"), float("nan"))))
    return tensor
