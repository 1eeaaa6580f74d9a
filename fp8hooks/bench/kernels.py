"""`fp8hooks bench kernels`: how fast tensors are encoded and decoded, beside a copy of the same tensor."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from fp8hooks import codecs, identity
from fp8hooks.codecs import BlockCodec, Payload
from fp8hooks.devices import find_device, name_of
from fp8hooks.saved import Packed

LAYOUTS = ("dense", "chunk", "transposed")
# Tensors by turns, so that none is still in the cache from the time before.
_SETS = 4


@dataclass(frozen=True)
class Result:
    """One codec, one way.

    Attributes:
        what: `encode` or `decode`.
        layout: `dense`; `chunk`, a third of a fused buffer's last dimension; `transposed`, heads before positions.
        gbytes_per_second: bytes read and written by the second.
        ratio: to the bandwidth of a copy of a dense tensor of that size, in the same run.
    """

    codec: str
    what: str
    dtype: str
    layout: str
    gbytes_per_second: float
    ratio: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--mib", type=int, default=256, help="size of the bfloat16 tensor (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="times to measure (default %(default)s)")
    parser.add_argument("--codecs", nargs="+", default=list(codecs.LOSSY), choices=codecs.LOSSY, metavar="CODEC")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, ... (default %(default)s)")
    parser.add_argument("--out", metavar="JSON", help="write the figures to this file too")


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    if options.mib < 1 or options.repeats < 1:
        raise ValueError(f"--mib, --repeats: {options.mib}, {options.repeats} given, 1 or more allowed")
    device = find_device(options.device)
    numel = options.mib * (1 << 19)
    cases = [(torch.bfloat16, layout) for layout in LAYOUTS] + [(torch.float32, "dense"), (torch.float16, "dense")]
    results = []
    for dtype, layout in track(cases, "measuring", console=console, transient=True):
        results += measure(numel, dtype, layout, options.codecs, options.repeats, device)
    table = Table(title=f"{numel} elements on {name_of(device)}, torch {torch.__version__}: of a copy's bandwidth")
    for column in ("codec", "dtype", "layout", "encode", "decode"):
        table.add_column(column, justify="right" if column.endswith("code") else "left")
    for encode, decode in zip(results[::2], results[1::2], strict=True):
        speeds = (f"{way.ratio:.2f} ({way.gbytes_per_second:.0f} GB/s)" for way in (encode, decode))
        table.add_row(encode.codec, encode.dtype, encode.layout, *speeds)
    console.print(table)
    if options.out:
        Path(options.out).write_text(json.dumps([asdict(result) for result in results], indent=1))


def measure(
    numel: int, dtype: torch.dtype, layout: str, names: Sequence[str], repeats: int, device: torch.device
) -> list[Result]:
    """Encoding and decoding by each codec, in turn."""
    tensors = [_tensor(numel, dtype, layout, device) for _ in range(_SETS)]
    dense = [torch.randn(numel, device=device, dtype=dtype) for _ in range(_SETS)]
    target = torch.empty_like(dense[0])
    runs: dict[tuple[str, str], Callable[[int], object]] = {("", ""): lambda i: target.copy_(dense[i])}
    moved = {("", ""): 2 * numel * dtype.itemsize}
    for name in names:
        codec = codecs.get(name, 128)
        assert isinstance(codec, BlockCodec)
        shape = identity.geometry(tensors[0].shape, tensors[0].stride())
        assert shape is not None
        payloads = [codec.encode(identity.core_of(tensor, shape)) for tensor in tensors]
        runs[name, "encode"] = _encode(codec, tensors, shape)
        runs[name, "decode"] = _decode(payloads, shape)
        moved[name, "encode"] = moved[name, "decode"] = numel * dtype.itemsize + codec.nbytes(numel)
    seconds = _time_all(runs, repeats, device)
    speeds = {key: moved[key] / seconds[key] / 1e9 for key in runs}
    short = str(dtype).removeprefix("torch.")
    return [
        Result(name, what, short, layout, speeds[name, what], speeds[name, what] / speeds["", ""])
        for name in names
        for what in ("encode", "decode")
    ]


def _encode(codec: BlockCodec, tensors: list[Tensor], shape: identity.Geometry) -> Callable[[int], object]:
    return lambda i: codec.encode(identity.core_of(tensors[i], shape))


def _decode(payloads: list[Payload], shape: identity.Geometry) -> Callable[[int], object]:
    return lambda i: Packed(payloads[i], shape, shares=False).unpack()


def _tensor(numel: int, dtype: torch.dtype, layout: str, device: torch.device) -> Tensor:
    if layout == "chunk":
        return torch.randn(numel // 1024, 3 * 1024, device=device, dtype=dtype).chunk(3, -1)[1]
    if layout == "transposed":
        # q of a fused projection: [batch, heads, length, width] over memory of [batch, length, 3, heads, width].
        fused = torch.randn(4, numel // 4096, 3, 8, 128, device=device, dtype=dtype)
        return fused[:, :, 0].transpose(1, 2)
    return torch.randn(numel, device=device, dtype=dtype)


def _time_all(
    runs: dict[tuple[str, str], Callable[[int], object]], repeats: int, device: torch.device
) -> dict[tuple[str, str], float]:
    """Median seconds of each; by turns, so that a slow moment of the machine does not fall on one of them."""
    timers = {key: _timer(function, device) for key, function in runs.items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(repeats):
        for key, timer in timers.items():
            times[key].append(timer())
    return {key: statistics.median(found) for key, found in times.items()}


def _timer(function: Callable[[int], object], device: torch.device) -> Callable[[], float]:
    """A function that gives the seconds of one run of `function`."""
    for i in range(_SETS):
        function(i)  # kernels are compiled, caches filled
    if device.type != "cuda":
        return lambda: _on_host(function)
    # A graph, since a host launches more slowly than a GPU runs a small kernel.
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(_SETS):
            function(i)
    graph.replay()
    return lambda: _on_device(graph, device)


def _on_host(function: Callable[[int], object]) -> float:
    start = time.perf_counter()
    for i in range(_SETS):
        function(i)
    return (time.perf_counter() - start) / _SETS


def _on_device(graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3 / _SETS
