"""Philox 4x32-10, the counter-based random number generator that CUDA and Triton use (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011), in torch operations: the same seed gives the same numbers on every device."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_KEYS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = (0xD2511F53, 0xCD9E8D57)
#: Bits of each number given out.
BITS = 24


def noise(seed: int, first: int, last: int, device: torch.device) -> Tensor:
    """One number from 0 to 2**24 - 1 (int32) for each element from `first`, a multiple of 4, up to `last`.

    Element `i` gets the upper bits of word `i % 4` for the counter `i // 4` and the 64-bit key `seed`.
    """
    counter = torch.arange(first // 4, -(-last // 4), device=device, dtype=torch.int64)
    words = _philox(counter, seed)
    return (torch.stack(words, 1).flatten()[: last - first] >> (32 - BITS)).int()


def _philox(counter: Tensor, seed: int) -> list[Tensor]:
    """The four 32-bit words (in int64) for each counter."""
    c0, c1, c2, c3 = counter & _LOW, counter >> 32, torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        # Products wrap around in int64, but all 64 bits are right.
        low, high = c0 * _ROUNDS[0], c2 * _ROUNDS[1]
        c0, c1 = ((high >> 32) & _LOW) ^ c1 ^ k0, high & _LOW
        c2, c3 = ((low >> 32) & _LOW) ^ c3 ^ k1, low & _LOW
        k0, k1 = (k0 + _KEYS[0]) & _LOW, (k1 + _KEYS[1]) & _LOW
    return [c0, c1, c2, c3]


class Keys:
    """Keys for one save after the other, 63 bits each, that depend on nothing but the numbers given."""

    def __init__(self, *numbers: int) -> None:
        self._state = 0
        for number in numbers:
            self._state = _mix(self._state + number)
        self._count = 0

    def next(self) -> int:
        """The next key."""
        self._count += 1
        return _mix(self._state + self._count) >> 1


def _mix(number: int) -> int:
    """SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)."""
    word = (number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)
