"""The console command `fp8hooks`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from rich.console import Console

import fp8hooks
from fp8hooks import audit_command, doctor
from fp8hooks.bench import (
    compile,
    convergence,
    eager,
    everything,
    fit,
    growth,
    host,
    kernels,
    knob,
    numerics,
    te,
    te_training,
)  # fmt: skip
from fp8hooks.demo import main as demo


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all went well, 2 after one line on bad input."""
    parser = _Parser(prog="fp8hooks", description=fp8hooks.__doc__)
    parser.add_argument("--version", action="version", version=fp8hooks.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add(commands, "demo", "train a small model on real text, exact and compressed", demo.add_arguments, demo.run)
    _add(commands, "audit", "the gradient's error of a model of yours", audit_command.add_arguments, audit_command.run)
    _add(commands, "doctor", "what is installed here, and what will be used", doctor.add_arguments, doctor.run)
    bench = commands.add_parser("bench", help="measure").add_subparsers(metavar="BENCH", required=True)
    _add(bench, "numerics", "the gradient's error by format", numerics.add_arguments, numerics.run)
    _add(bench, "convergence", "where training ends", convergence.add_arguments, convergence.run)
    _add(bench, "kernels", "the speed of encoding and decoding", kernels.add_arguments, kernels.run)
    _add(bench, "host", "what a save costs the host", host.add_arguments, host.run)
    _add(bench, "eager", "time, memory and error of a step, beside every other way", eager.add_arguments, eager.run)
    _add(bench, "compile", "the same of a compiled model", compile.add_arguments, compile.run)
    _add(bench, "knob", "what memory costs, by the share given back", knob.add_arguments, knob.run)
    _add(bench, "growth", "how our cost grows with the model", growth.add_arguments, growth.run)
    _add(bench, "fit", "the largest batch and length that fit", fit.add_arguments, fit.run)
    _add(bench, "all", "all that can be measured here, into a folder", everything.add_arguments, everything.run)
    _add(bench, "te", "the same of TransformerEngine's layers", te.add_arguments, te.run)
    _add(bench, "te-training", "where training with it in FP8 ends", te_training.add_arguments, te_training.run)
    options = parser.parse_args(arguments)
    try:
        # Piped, tables keep a width that they can be read in.
        options.run(options, Console(width=None if sys.stdout.isatty() else 120))
    except ValueError as error:
        options.parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


def _add(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    text: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace, Console], None],
) -> None:
    parser = commands.add_parser(name, help=text)
    add_arguments(parser)
    parser.set_defaults(run=run, parser=parser)


if __name__ == "__main__":
    sys.exit(main())
