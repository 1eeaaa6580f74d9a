"""Ranges for profilers: torch's own, and NVTX under `torch.autograd.profiler.emit_nvtx()`. Nothing while none runs."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

_enabled: Any = getattr(torch.autograd, "_profiler_enabled", None)
_NOTHING = contextlib.nullcontext()


def span(what: str, where: str = "") -> AbstractContextManager[Any]:
    """A range called `fp8hooks.<what> <where>`, if somebody is profiling."""
    if _enabled is None or not _enabled():
        return _NOTHING
    return torch.profiler.record_function(f"fp8hooks.{what} {where}".rstrip())
