"""`fp8hooks bench all`: every bench, small enough for the device at hand, into one folder."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console

import fp8hooks
from fp8hooks.devices import find_device, name_of

_TINY = ("--shape", "tiny", "--repeats", "3")

#: Arguments by bench: on a CPU, on a GPU, and for `--full`, at the sizes of the README's tables.
RUNS: Mapping[str, tuple[tuple[str, ...] | None, tuple[str, ...], tuple[str, ...]]] = {
    "kernels": (("--mib", "4", "--repeats", "3"), ("--mib", "256"), ()),
    "host": ((), (), ()),
    "numerics": (("--steps", "60", "--batches", "1"), ("--steps", "300"), ()),
    "eager": (
        ("--models", "tiny", "tiny-vit", "tiny-moe", "--repeats", "3"),
        ("--models", "launch", "--repeats", "7"),
        ("--models", "llama", "vit", "moe"),
    ),
    "compile": ((*_TINY, "--vocab", "64"), ("--shape", "launch", "--vocab", "8192", "--repeats", "7"), ()),
    "knob": (_TINY, ("--shape", "launch", "--repeats", "7"), ()),
    "growth": (("--model", "tiny", "--repeats", "3"), ("--model", "launch"), ()),
    "te": (None, ("--shape", "launch", "--repeats", "7"), ()),
    "fit": (None, ("--model", "launch", "--length", "1024", "--memory", "2GB", "--what", "batch"), ()),
}

#: Those that draw a picture.
_PLOTS = frozenset({"eager", "knob"})
# Those that take no device, being for GPUs alone.
_GPU_ALONE = frozenset({"te", "fit"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--out", metavar="DIR", default="bench-results", help="for JSON and PNG (default %(default)s)")
    parser.add_argument("--device", help="cuda, cpu, ... (default: a GPU if there is one)")
    parser.add_argument("--full", action="store_true", help="the sizes of the README's tables; needs a large GPU")
    parser.add_argument("--only", nargs="+", choices=RUNS, metavar="BENCH", help=f"of {', '.join(RUNS)}")


def run(options: argparse.Namespace, console: Console) -> None:
    """Run each, whatever becomes of the others; what can't be measured here is said."""
    device = find_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.full and device.type != "cuda":
        raise ValueError(f"--full: given with --device {device}, a GPU needed")
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    outcome = {}
    for name in options.only or RUNS:
        console.rule(f"bench {name}")
        why = _impossible(name, device)
        if why is None:
            outcome[name] = _run(name, arguments_of(name, device, options.full, folder))
        else:
            outcome[name] = f"not measured: {why}"
        if outcome[name] != "done":
            console.print(outcome[name])
    about = {
        "fp8hooks": fp8hooks.__version__,
        "torch": torch.__version__,
        "device": name_of(device),
        "benches": outcome,
    }
    (folder / "index.json").write_text(json.dumps(about, indent=1))
    console.rule()
    console.print(f"{sum(text == 'done' for text in outcome.values())} of {len(outcome)} done; see {folder}")


def _impossible(name: str, device: torch.device) -> str | None:
    if name in _GPU_ALONE and device.type != "cuda":
        return "it needs a GPU"
    if name == "te" and importlib.util.find_spec("transformer_engine") is None:
        return "TransformerEngine is not installed"
    return None


def arguments_of(name: str, device: torch.device, full: bool, folder: Path) -> list[str]:
    """The command line of a bench."""
    on_cpu, on_gpu, complete = RUNS[name]
    chosen = complete if full else on_gpu if device.type == "cuda" else on_cpu
    assert chosen is not None
    where = [] if name in _GPU_ALONE else ["--device", str(device)]
    picture = ["--plot", str(folder / f"{name}.png")] if name in _PLOTS else []
    return ["bench", name, *chosen, *where, *picture, "--out", str(folder / f"{name}.json")]


def _run(name: str, arguments: list[str]) -> str:
    cli = importlib.import_module("fp8hooks.cli")  # which knows this module
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    except KeyboardInterrupt:
        raise
    except Exception as error:  # the other benches go on
        return f"{name} failed: {type(error).__name__}: {error}"
    return "done" if code == 0 else f"{name} failed: it ended with code {code}"
