"""`fp8hooks doctor`: what is installed here, which paths will be used, and why others will not."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import fp8hooks
from fp8hooks import codecs, host_memory
from fp8hooks.report import format_bytes

#: Versions of torch that it was tested on, and in between.
OLDEST, NEWEST = (2, 8), (2, 15)

YES, NO, FAULT = "yes", "no", "fault"


class Finding(NamedTuple):
    """One line.

    Attributes:
        verdict: YES, NO (will do without), or FAULT (will not work as it should).
    """

    what: str
    verdict: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(options: argparse.Namespace, console: Console) -> None:
    """Look, and print a table."""
    table = Table(title=f"fp8hooks {fp8hooks.__version__}")
    for column in ("", "", "found"):
        table.add_column(column, overflow="fold")
    style = {YES: "green", NO: "yellow", FAULT: "bold red"}
    for finding in examine():
        table.add_row(finding.what, f"[{style[finding.verdict]}]{finding.verdict}", finding.text)
    console.print(table)


def examine() -> Iterator[Finding]:
    """All findings. A check that fails with an error is a fault, and the others go on."""
    for what, check in _CHECKS.items():
        try:
            yield check(what)
        except Exception as error:  # whatever it is, the user should read it here
            yield Finding(what, FAULT, f"{type(error).__name__}: {error}")


def _torch(what: str) -> Finding:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    text = f"{torch.__version__}, Python {platform.python_version()}"
    if OLDEST <= version <= NEWEST:
        return Finding(what, YES, text)
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return Finding(what, FAULT if version < OLDEST else NO, f"{text}: tested on {oldest} to {newest}")


def _gpu(what: str) -> Finding:
    if not torch.cuda.is_available():
        built = "built with CUDA, but no GPU found" if torch.version.cuda else "built without CUDA"
        return Finding(what, NO, f"torch is {built}: tensors on a CPU are stored by plain torch operations")
    properties = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    text = f"{count} x {properties.name}, {format_bytes(properties.total_memory)}, CUDA {torch.version.cuda}"
    return Finding(what, YES, f"{text}, compute capability {properties.major}.{properties.minor}")


def _fp8(what: str) -> Finding:
    if not torch.cuda.is_available():
        return Finding(what, NO, "no GPU; on a CPU FP8 is rounded in software, bit for bit the same")
    capability = torch.cuda.get_device_capability()
    if capability >= (8, 9):
        return Finding(what, YES, "this GPU converts to and from FP8 itself")
    return Finding(what, NO, "before compute capability 8.9 FP8 is rounded in software; square8 and INT8 need none")


def _triton(what: str) -> Finding:
    try:
        version = importlib.import_module("triton").__version__
    except ImportError:
        return Finding(what, NO, "not installed: on a GPU plain torch operations, several passes over memory")
    if not torch.cuda.is_available():
        return Finding(what, NO, f"{version}, and no GPU to run kernels on")
    wrong = [name for name in codecs.LOSSY if not _kernel_is_right(name)]
    if wrong:
        return Finding(what, FAULT, f"{version}: kernels give other bytes than their definition: {', '.join(wrong)}")
    return Finding(what, YES, f"{version}: kernels of {', '.join(codecs.LOSSY)} give the bytes of their definition")


def _kernel_is_right(name: str) -> bool:
    codec = codecs.get(name, 128)
    assert isinstance(codec, codecs.BlockCodec)
    flat = torch.linspace(-3, 5, 10_007, device="cuda", dtype=torch.bfloat16)
    payload, reference = codec.encode(flat), codec.encode_reference(flat)
    return torch.equal(payload.buffer, reference.buffer) and torch.equal(
        payload.decode(), codec.decode_reference(reference)
    )


def _inlining(what: str) -> Finding:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.silu(x @ y)).sin()

    x, y = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    torch._dynamo.reset()
    with fp8hooks.compress(rules=[fp8hooks.Rule("int8", op="doctor")]) as session:
        loss = torch.compile(function, backend="aot_eager")(x, y).sum()
    loss.backward()
    stored = [entry for entry in session.compiled if entry.codec != codecs.EXACT]
    if stored:
        return Finding(what, YES, "graphs of torch.compile take the codec in")
    return Finding(what, NO, "graphs of torch.compile do not take the hooks in here: what they save stays exact")


def _offload(what: str) -> Finding:
    budget = format_bytes(host_memory.default_budget())
    if not torch.cuda.is_available():
        return Finding(what, NO, f"no GPU: host memory is the device's; up to {budget} by default")
    pinned = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.ones(1 << 20, dtype=torch.uint8, device="cuda")
    pinned.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    if not bool((pinned == 1).all()):
        return Finding(what, FAULT, "pinned memory does not hold what was copied to it")
    return Finding(what, YES, f"pinned memory works; up to {budget} by default")


def _transformer_engine(what: str) -> Finding:
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return Finding(what, NO, "not installed, and not needed")
    importlib.import_module("transformer_engine.pytorch")
    return Finding(what, YES, version)


def _hooks(what: str) -> Finding:
    x = torch.randn(64, 64, requires_grad=True)
    with fp8hooks.compress() as session:
        loss = torch.nn.functional.silu(x * 1).sum()
    loss.backward()
    if session.stats.savings > 0:
        return Finding(what, YES, f"a step on the CPU gave back {session.stats.savings:.0%} of its bytes")
    return Finding(what, FAULT, "autograd did not call the hooks")


_CHECKS: dict[str, Callable[[str], Finding]] = {
    "torch": _torch,
    "GPU": _gpu,
    "FP8 instructions": _fp8,
    "Triton kernels": _triton,
    "saved-tensor hooks": _hooks,
    "compiled graphs": _inlining,
    "offload": _offload,
    "TransformerEngine": _transformer_engine,
}
