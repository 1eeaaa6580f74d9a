"""Devices: the `--device` option that the commands share, names, streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_of(tensor: Tensor) -> int:
    """The current stream of a tensor's device, as a number; 0 where there are no streams."""
    return _raw_stream(tensor.get_device()) if tensor.is_cuda else 0


def find_device(name: str) -> torch.device:
    """The device that `--device` names.

    Raises:
        ValueError: there is none of that name here, or it is neither a CPU nor a GPU.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        have = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"--device: no device {name!r} here; there is {', '.join(have)}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: {name!r} given, cpu or cuda allowed")
    return device


def name_of(device: torch.device) -> str:
    """What a table calls a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
