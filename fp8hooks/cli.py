"""The console command `fp8hooks`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console

import fp8hooks
from fp8hooks.demo import main as demo


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all went well, 2 after one line on bad input."""
    parser = _Parser(prog="fp8hooks", description=fp8hooks.__doc__)
    parser.add_argument("--version", action="version", version=fp8hooks.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    demo_parser = commands.add_parser("demo", help="train a small model on real text, exact and compressed")
    demo.add_arguments(demo_parser)
    options = parser.parse_args(arguments)
    try:
        demo.run(options, Console())
    except ValueError as error:
        demo_parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
