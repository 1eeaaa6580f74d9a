"""Real text as bytes: CPython's own documentation topics, or the user's file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 0.1


class TextError(ValueError):
    """A text that can't be trained on; the message says why."""


def load(path: str | None) -> Tensor:
    """The bytes of a text file (of CPython's documentation topics if `path` is None) as a uint8 tensor.

    Raises:
        TextError: the file is missing, not readable, or empty.
    """
    if path is None:
        from pydoc_data import topics

        raw = "\n\n".join(topics.topics.values()).encode()
    else:
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise TextError(f"--text: can't read {path!r}: {error.strerror}") from None
        if not raw.strip():
            raise TextError(f"--text: {path!r} is empty")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


class Batches:
    """Random windows of a text, and fixed ones of its held-out end.

    Args:
        text: uint8, one dimension.
        batch: windows a batch.
        length: bytes a window; targets are the same bytes shifted by one.
        seed: of the order of windows.
        device: where batches go.

    Raises:
        TextError: the text is shorter than one training batch, or its held-out end than one window.
    """

    def __init__(self, text: Tensor, batch: int, length: int, seed: int, device: torch.device) -> None:
        self.batch, self.length, self.device = batch, length, device
        split = int(len(text) * (1 - HELD_OUT))
        self.train, self.held_out = text[:split], text[split:]
        need = max(batch * (length + 1), length + 2)
        if len(self.train) < need or len(self.held_out) < length + 1:
            least = max(int(need / (1 - HELD_OUT)), int((length + 1) / HELD_OUT)) + 2
            raise TextError(
                f"--text: {len(text)} bytes are shorter than one batch; {batch} windows of {length} bytes need {least}"
            )
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [batch, length]."""
        starts = torch.randint(len(self.train) - self.length, (self.batch,), generator=self._generator)
        return self._windows(self.train, starts)

    def evaluation(self, most: int = 8) -> list[tuple[Tensor, Tensor]]:
        """Up to `most` batches that cover the held-out text evenly."""
        windows = min(most * self.batch, (len(self.held_out) - 1) // self.length)
        starts = torch.linspace(0, len(self.held_out) - 1 - self.length, windows).long()
        return [self._windows(self.held_out, part) for part in starts.split(self.batch)]

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = text[starts[:, None] + torch.arange(self.length + 1)].long().to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
