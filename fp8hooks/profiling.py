"""Ranges for profilers: torch's own, and NVTX under `torch.autograd.profiler.emit_nvtx()`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def _never() -> bool:
    return False


#: Whether somebody is profiling; asked for every save, and so a function of torch's in C++.
active: Any = getattr(torch.autograd, "_profiler_enabled", _never)


def span(what: str, where: str = "") -> AbstractContextManager[Any]:
    """A range called `fp8hooks.<what> <where>`."""
    return torch.profiler.record_function(f"fp8hooks.{what} {where}".rstrip())
