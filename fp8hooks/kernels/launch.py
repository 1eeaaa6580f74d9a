"""Launching: a kernel that ran once can be repeated on other memory in a few microseconds, where Triton's way takes
twenty.

Measured on an H200's host: Triton's own call 20 us; its compiled launcher with tensors 6.1, with addresses 5.7; torch's
static launcher, by which Inductor starts its kernels, 4.4; cuLaunchKernel by ctypes 6.9.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8hooks.kernels import common

#: Gives a kernel's constants.
Constants = Callable[[], tuple[Any, ...]]

# Compiled kernels by what they were compiled for.
_compiled: dict[Any, Any] = {}

_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_static: Any = getattr(getattr(torch._C, "_StaticCudaLauncher", None), "_launch_kernel", None)


class Launch:
    """A launch that was made, to be made again on memory of the same geometry, dtype, device and alignment.

    Attributes:
        repeatable: False where this version of Triton or torch offers no short way.
    """

    __slots__ = ("_device", "_head", "_run", "_tail", "_types", "repeatable")

    def __init__(self, compiled: Any, device: torch.device, programs: int, numbers: tuple[int, ...]) -> None:
        self._device = device.index
        self._run: Any = None
        scratch = _scratch(compiled)
        if device.type == "cuda" and scratch is not None:
            shared = compiled.metadata.shared
            self._run = _static
            self._head = (compiled.function, programs, 1, 1, common.WARPS, shared)
            self._types = "OO" + "l" * len(numbers) + "O" * scratch
            self._tail = (*numbers, *(None,) * scratch)
        self.repeatable = self._run is not None

    def again(self, first: int, second: int, stream: int | None = None) -> None:
        """Launch over what lies at these addresses, on the current stream or another of the device, the current one."""
        if stream is None:
            stream = _current_stream(self._device)
        self._run(*self._head, self._types, (first, second, *self._tail), stream)


def _scratch(compiled: Any) -> int | None:
    """How many unused pointers Triton puts after a kernel's parameters; None if torch can't start such a kernel."""
    if _static is None or not hasattr(compiled, "function") or not hasattr(compiled, "metadata"):
        return None
    sizes = [getattr(compiled.metadata, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    return None if any(sizes) else sum(size is not None for size in sizes)


def encode(
    kernel: Any,
    key: Any,
    constants: Constants,
    core: Tensor,
    buffer: Tensor,
    block_size: int,
    scales_offset: int,
    seed: int | None,
) -> Launch | None:
    """Run a family's encoder, whose constants end with STOCHASTIC and LAYOUT; None if the core can't be reached.

    Args:
        key: what `constants`, its first constants, depend on beside the core's dtype.
    """
    found = layout_of(core, block_size)
    if found is None:
        return None
    layout, places = found
    stochastic, numel = seed is not None, core.numel()
    numbers = (numel, scales_offset, _signed(seed), *places)
    return start(
        kernel,
        (key, layout, stochastic),
        (core, buffer),
        numbers,
        lambda: (*constants(), stochastic, layout),
        numel,
        block_size,
    )


def decode(
    kernel: Any, key: Any, constants: Constants, buffer: Tensor, out: Tensor, block_size: int, scales_offset: int
) -> Launch | None:
    """As `encode`, for a decoder, whose constants end with NATIVE_BF16 and LAYOUT."""
    found = layout_of(out, block_size)
    if found is None:
        return None
    layout, places = found
    numel = out.numel()

    def all_constants() -> tuple[Any, ...]:
        return *constants(), common.native_bf16(out.device), layout

    return start(
        kernel, (key, layout), (buffer, out), (numel, scales_offset, *places), all_constants, numel, block_size
    )


def _signed(seed: int | None) -> int:
    """A 64-bit seed as the kernels' signed number; 0 for none."""
    return 0 if seed is None else (seed ^ (1 << 63)) - (1 << 63)


def layout_of(core: Tensor, block_size: int) -> tuple[int, tuple[int, int, int, int]] | None:
    """How kernels find the elements of a tensor whose dimensions go from the outermost to the innermost in memory.

    Returns:
        The layout, and (run, middle, middle_stride, outer_stride) as `fp8hooks.kernels.common.locate` has them; None
        for a tensor whose runs no block divides, or of more than three dimensions, or with strides that are no
        multiples of 16.
    """
    if core.is_contiguous():
        return common.DENSE, (1, 1, 0, 0)
    if core.dim() not in (2, 3) or core.stride(-1) != 1 or core.shape[-1] % block_size:
        return None
    run = core.shape[-1]
    # Rows are counted in 32 bits, and read 16 elements at a time.
    if core.numel() // block_size >= 2**31 or any(stride % 16 for stride in core.stride()[:-1]):
        return None
    layout = common.TILES if run % max(common.ELEMENTS, block_size) == 0 else common.BLOCKS
    if core.dim() == 2:
        return layout, (run, core.shape[0], core.stride(0), 0)
    return layout, (run, core.shape[1], core.stride(1), core.stride(0))


def start(
    kernel: Any,
    key: Any,
    tensors: tuple[Tensor, Tensor],
    numbers: tuple[int, ...],
    constants: Constants,
    numel: int,
    block_size: int,
) -> Launch:
    """Run `kernel` over `numel` elements in rows of `block_size`, on the device and current stream of the tensors.

    Args:
        key: what the constants depend on, beside the tensors' dtypes and device.
        tensors, numbers: its first parameters; numbers are 64-bit.
        constants: gives its other parameters, but for the block size and the rows of a program; asked once for a key.
    """
    first, second = tensors
    device = first.device
    a, b = first.data_ptr(), second.data_ptr()
    # By its address, since Triton hashes a kernel by its source. Triton loads 16 bytes at once where it knows that they
    # are aligned.
    full_key = (id(kernel), key, device.index, first.dtype, second.dtype, a & 15 == 0, b & 15 == 0, block_size)
    rows = max(1, common.ELEMENTS // block_size)
    programs = -(-numel // (rows * block_size))
    with _current(device):
        found = _compiled.get(full_key)
        if found is not None:
            launch = Launch(found, device, programs, numbers)
            if launch.repeatable:
                launch.again(a, b)
                return launch
        last = (*constants(), block_size, rows)
        # Contraction into fused multiply-adds would round differently from the reference.
        compiled = kernel[(programs,)](*tensors, *numbers, *last, num_warps=common.WARPS, enable_fp_fusion=False)
    _compiled[full_key] = compiled
    return Launch(compiled, device, programs, numbers)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever device its tensors are on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
