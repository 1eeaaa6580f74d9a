"""The protocol that every codec follows, and the frame that the block-scaled codecs share.

A codec turns a *core*, a tensor whose elements are in the order of memory, into a :class:`Payload` and back. Mostly it
is flat; with gaps between its runs (a slice of a fused buffer) it has more dimensions. A codec knows nothing of
autograd, or of what was transposed, expanded or viewed: `fp8hooks.identity` has taken that off before, and puts it back
after.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fp8hooks import kernels
from fp8hooks.codecs import philox

if TYPE_CHECKING:
    from fp8hooks.kernels.launch import Launch
    from fp8hooks.offload import Home

#: dtypes that lossy codecs take. float64 and complex stay exact: who trains in them wants every bit.
FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})

# The plain-torch path on a CPU works in pieces of this many elements, so that temporaries stay in the cache.
_CHUNK = 1 << 17


def choose(condition: Tensor, yes: float, no: float) -> Tensor:
    """`torch.where` of two numbers, in float32 whatever torch's default dtype is."""
    return torch.where(condition, yes, no).float()


def round_stochastically(magnitude: Tensor, noise: Tensor) -> Tensor:
    """Whole numbers next to `magnitude` (not negative, float32), that are right on the average."""
    return torch.floor(magnitude + noise * 2.0**-philox.BITS)


def stochastic_step(above: Tensor, distance: Tensor, noise: Tensor) -> Tensor:
    """1.0 with the probability `above / distance`, else 0.0: whether to go on to the next code, `distance` away."""
    return (noise * 2.0**-philox.BITS * distance < above).float()


class Payload:
    """What a codec stores in place of a tensor: one uint8 buffer, and what is needed to read it.

    Attributes:
        codec: the codec that wrote it and can read it.
        buffer: uint8, one dimension, on the device of the tensor it stands for. Missing while it is in host memory.
        home: there, see `fp8hooks.offload`.
        numel: elements encoded.
        dtype: dtype of the tensor it stands for, and of what `decode` returns.
        finite: True if every element is known to be finite (lets a reader skip a pass), False if not known.
        coder: how to do the same with other memory of the same geometry, if there is a short way.
        shared: for whoever holds it: what several consumers of it share (`fp8hooks.saved.Shared`).
        ready, edited, ahead: see `fp8hooks.overlap`.
    """

    __slots__ = (
        "__weakref__", "ahead", "buffer", "codec", "coder", "dtype", "edited", "finite", "home", "numel", "ready",
        "shared",
    )  # fmt: skip

    def __init__(
        self,
        codec: Codec,
        buffer: Tensor,
        numel: int,
        dtype: torch.dtype,
        finite: bool = False,
        coder: Coder | None = None,
    ) -> None:
        self.codec = codec
        self.buffer = buffer
        self.numel = numel
        self.dtype = dtype
        self.finite = finite
        self.coder = coder
        self.shared: Any = None
        self.ready: Any = None
        self.edited: str | None = None
        self.ahead: Any = None
        self.home: Home | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return self.buffer.numel() if self.home is None else 0

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory held."""
        return 0 if self.home is None else self.home.nbytes

    def settle(self, home: Home) -> None:
        """Have the buffer, which was copied there, in host memory only."""
        self.home = home
        del self.buffer

    def here(self) -> Payload:
        """This payload with its buffer on the device: itself, or a copy for one use."""
        if self.home is None:
            return self
        return Payload(self.codec, self.home.buffer(), self.numel, self.dtype, self.finite, self.coder)

    def decode(self) -> Tensor:
        """A fresh flat tensor of `numel` elements and of `dtype`."""
        return self.codec.decode(self)

    def decode_into(self, core: Tensor) -> None:
        """Write what was encoded into a core of `numel` elements and of `dtype`."""
        self.codec.decode_into(self, core)


_empty_on_current_device: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


class Coder:
    """Encodes and decodes memory of one geometry and dtype on one GPU, by repeating launches that were made before.

    A save costs the host 20 us by way of `Codec.encode`, and half of that by this way.
    """

    __slots__ = ("_codec", "_core", "_decode", "_device", "_dtype", "_encode", "_nbytes", "_numel")

    def __init__(self, codec: BlockCodec, encode: Launch, core: Tensor) -> None:
        self._codec = codec
        self._encode = encode
        self._decode: Launch | None = None
        self._nbytes = (codec.nbytes(core.numel()),)
        self._numel = core.numel()
        self._dtype = core.dtype
        self._device = core.get_device()
        self._core = _gaps(core)

    @property
    def can_decode(self) -> bool:
        """Whether `decode` will give something, on the right device."""
        return self._decode is not None

    def encode(self, address: int, stream: int | None = None) -> Payload | None:
        """What `Codec.encode` gives for the core at an address; None if that must be asked.

        Args:
            stream: on which to launch, if not on the current one.
        """
        if address & 15 or _current_device() != self._device:
            return None
        buffer = _empty_on_current_device(self._nbytes, (1,), torch.uint8)
        self._encode.again(address, buffer.data_ptr(), stream)
        return Payload(self._codec, buffer, self._numel, self._dtype, False, self)

    def learn(self, decode: Launch | None, core: Tensor) -> None:
        """Remember a launch of the decoder, if `core`, into which it wrote, has the geometry of this coder."""
        if decode is not None and decode.repeatable and _gaps(core) == self._core:
            self._decode = decode

    def decode(
        self, payload: Payload, sizes: tuple[int, ...], strides: tuple[int, ...], stream: int | None = None
    ) -> Tensor | None:
        """A fresh tensor of these sizes and strides whose memory holds the decoded core; None if it can't be made."""
        if self._decode is None or _current_device() != self._device:
            return None
        out = _empty_on_current_device(sizes, strides, self._dtype)
        self._decode.again(payload.buffer.data_ptr(), out.data_ptr(), stream)
        return out


def _gaps(core: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Sizes and strides of a core with gaps; None for one without, which is the same to a kernel whatever its sizes."""
    return None if core.is_contiguous() else (tuple(core.shape), core.stride())


class Codec(abc.ABC):
    """One storage format. Instances are immutable and shared; equal names and settings give equal bytes."""

    name: str
    #: What it takes.
    dtypes: frozenset[torch.dtype]

    @abc.abstractmethod
    def encode(self, core: Tensor, limit: int | None = None, seed: int | None = None) -> Payload | None:
        """Store `core` (a dtype of `dtypes`, at least one element).

        Args:
            core: what to store; its elements are in the order of memory.
            limit: if given, all elements are known to be whole numbers from 0 up to less than this.
            seed: if given, what is not lossless rounds stochastically: up or down, to neighbouring codes, with the
                probabilities that make the mean right. The same 64-bit seed gives the same bytes.

        Returns:
            None if this codec can't hold these values, or can't tell without waiting for a GPU.
        """

    @abc.abstractmethod
    def decode(self, payload: Payload) -> Tensor:
        """The tensor that `payload` stands for: flat, contiguous, of the payload's dtype, fresh each time."""

    def decode_into(self, payload: Payload, core: Tensor) -> None:
        """Write what `payload` stands for into `core`, which may have gaps."""
        core.copy_(self.decode(payload).view(core.shape))

    @abc.abstractmethod
    def nbytes(self, numel: int) -> int:
        """The most bytes that `numel` elements take once encoded, scales included."""

    @abc.abstractmethod
    def error_bound(self, flat: Tensor) -> Tensor:
        """For each element of `flat`, the most by which its decoded value may differ, in float64.

        Non-finite elements get 0: they come back as they were. The rounding to the dtype of `flat` (half a unit in
        the last place) is not counted in.
        """


class BlockCodec(Codec):
    """A codec of about one byte an element and one scale a block of `block_size` elements in memory order.

    The buffer holds the codes of all blocks, `row_bytes` each, zero bytes up to the next multiple of `scale_bytes`,
    and then the scales. A last block that is not full has fewer codes, and its own scale.
    """

    dtypes = FLOATS
    scale_dtype: torch.dtype
    #: Family of the Triton kernels, and what they need to know besides; see `fp8hooks.kernels`.
    kernel_family: str
    kernel_settings: tuple[object, ...] = ()

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def __repr__(self) -> str:
        return f"{self.name}(block_size={self.block_size})"

    # Layout

    def row_bytes(self, width: int) -> int:
        """Bytes that the codes of a block of `width` elements take."""
        return width

    @property
    def scale_bytes(self) -> int:
        return self.scale_dtype.itemsize

    def code_bytes(self, numel: int) -> int:
        """Bytes that all codes take."""
        full, rest = divmod(numel, self.block_size)
        return full * self.row_bytes(self.block_size) + self.row_bytes(rest)

    def scales_offset(self, numel: int) -> int:
        """Byte at which the scales begin; aligned, so that they can be viewed as `scale_dtype`."""
        return -(-self.code_bytes(numel) // self.scale_bytes) * self.scale_bytes

    def nblocks(self, numel: int) -> int:
        return -(-numel // self.block_size)

    @functools.lru_cache(maxsize=1024)  # noqa: B019 (codecs are few, and live as long as the program)
    def layout(self, numel: int) -> tuple[int, int]:
        """The buffer's bytes, and `scales_offset`."""
        offset = self.scales_offset(numel)
        return offset + self.nblocks(numel) * self.scale_bytes, offset

    def nbytes(self, numel: int) -> int:
        return self.layout(numel)[0]

    def split(self, payload: Payload) -> tuple[Tensor, Tensor]:
        """Codes (uint8) and scales (`scale_dtype`, one a block) of a payload, as views of its buffer."""
        return self._split(payload.buffer, payload.numel)

    def _split(self, buffer: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        start = self.scales_offset(numel)
        end = start + self.nblocks(numel) * self.scale_bytes
        return buffer[: self.code_bytes(numel)], buffer[start:end].view(self.scale_dtype)

    # What a format adds: the arithmetic on full rows, in plain torch. It is the definition; kernels must match it.

    @abc.abstractmethod
    def encode_rows(self, rows: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None) -> bool:
        """Encode each row of `rows` [n, k] into `codes` [n, row_bytes(k)] uint8 and `scales` [n].

        Args:
            noise: for stochastic rounding, numbers from 0 to 2**24 - 1, int32 [n, k].

        Returns:
            True if all elements are known to be finite.
        """

    @abc.abstractmethod
    def decode_rows(self, codes: Tensor, scales: Tensor, out: Tensor, finite: bool) -> None:
        """Decode `codes` [n, row_bytes(k)] with `scales` [n] into `out` [n, k]."""

    # The protocol

    def encode(self, core: Tensor, limit: int | None = None, seed: int | None = None) -> Payload:
        numel = core.numel()
        buffer = torch.empty(self.layout(numel)[0], dtype=torch.uint8, device=core.device)
        if core.is_cuda:
            launch = self.encode_by_kernel(core, buffer, seed)
            if launch is not None:
                return Payload(self, buffer, numel, core.dtype, coder=self._coder(core, launch, seed))
            if self.encode_by_kernel(core.reshape(-1), buffer, seed) is not None:
                return Payload(self, buffer, numel, core.dtype)
        return self.encode_reference(core.reshape(-1), buffer, seed)

    def _coder(self, core: Tensor, launch: Launch, seed: int | None) -> Coder | None:
        # A seed is one of the launch's numbers; and what is not aligned is read otherwise than what is.
        if seed is not None or not launch.repeatable or core.data_ptr() & 15 or _empty_on_current_device is None:
            return None
        return Coder(self, launch, core)

    def encode_by_kernel(self, core: Tensor, buffer: Tensor, seed: int | None = None) -> Launch | None:
        """`encode` in one pass over memory; None, with nothing done, where no kernel can run."""
        offset = self.layout(core.numel())[1]
        return kernels.encode(self.kernel_family, core, buffer, self.block_size, offset, seed, *self.kernel_settings)

    def decode_by_kernel(self, payload: Payload, out: Tensor) -> Launch | None:
        """`decode` in one pass over memory; None, with nothing done, where no kernel can run."""
        offset = self.layout(payload.numel)[1]
        launch = kernels.decode(self.kernel_family, payload.buffer, out, self.block_size, offset, *self.kernel_settings)
        if payload.coder is not None:
            payload.coder.learn(launch, out)
        return launch

    def encode_reference(self, flat: Tensor, buffer: Tensor | None = None, seed: int | None = None) -> Payload:
        """`encode` in plain torch operations, on any device."""
        numel = flat.numel()
        if buffer is None:
            buffer = torch.empty(self.nbytes(numel), dtype=torch.uint8, device=flat.device)
        buffer[self.code_bytes(numel) : self.scales_offset(numel)] = 0
        codes, scales = self._split(buffer, numel)
        finite = True
        for piece in self._pieces(numel, flat.device):
            noise = None
            if seed is not None:
                noise = philox.noise(seed, piece.elements.start, piece.elements.stop, flat.device)
                noise = noise.view(-1, piece.width)
            rows = flat[piece.elements].view(-1, piece.width)
            finite &= self.encode_rows(rows, codes[piece.codes].view(len(rows), -1), scales[piece.blocks], noise)
        return Payload(self, buffer, numel, flat.dtype, finite)

    def decode(self, payload: Payload) -> Tensor:
        out = torch.empty(payload.numel, dtype=payload.dtype, device=payload.buffer.device)
        if out.is_cuda and self.decode_by_kernel(payload, out) is not None:
            return out
        return self.decode_reference(payload, out)

    def decode_into(self, payload: Payload, core: Tensor) -> None:
        if not core.is_cuda or self.decode_by_kernel(payload, core) is None:
            super().decode_into(payload, core)

    def decode_reference(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """`decode` in plain torch operations, on any device."""
        if out is None:
            out = torch.empty(payload.numel, dtype=payload.dtype, device=payload.buffer.device)
        codes, scales = self.split(payload)
        for piece in self._pieces(payload.numel, out.device):
            rows = out[piece.elements].view(-1, piece.width)
            self.decode_rows(codes[piece.codes].view(len(rows), -1), scales[piece.blocks], rows, payload.finite)
        return out

    def _pieces(self, numel: int, device: torch.device) -> Iterator[Piece]:
        """Rows of full blocks, some at a time, then the rest as one short row."""
        size = self.block_size
        full, rest = divmod(numel, size)
        step = max(1, _CHUNK // size) if device.type == "cpu" else max(1, full)
        for first in range(0, full, step):
            yield self._piece(first, min(full, first + step), size)
        if rest:
            yield self._piece(full, full + 1, rest)

    def _piece(self, first: int, last: int, width: int) -> Piece:
        size, bytes_before = self.block_size, first * self.row_bytes(self.block_size)
        return Piece(
            elements=slice(first * size, first * size + (last - first) * width),
            codes=slice(bytes_before, bytes_before + (last - first) * self.row_bytes(width)),
            blocks=slice(first, last),
            width=width,
        )


class Piece(NamedTuple):
    """Some neighbouring blocks of one width: their elements, the bytes of their codes, and their scales."""

    elements: slice
    codes: slice
    blocks: slice
    width: int
