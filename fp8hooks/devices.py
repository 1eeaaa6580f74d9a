"""The `--device` option that the commands share."""

from __future__ import annotations

import torch


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
