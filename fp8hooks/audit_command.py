"""`fp8hooks audit`: the audit of a model that the user names."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

import fp8hooks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("factory", metavar="MODULE:FUNCTION", help="a function that gives (model, batch, loss_fn)")
    parser.add_argument("--sites", action="store_true", help="measure each site by itself too")
    parser.add_argument("--format", default="square8", help="codec of activations (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    parser.add_argument("--plot", metavar="PNG", help="draw the worst parameters and sites")


def run(options: argparse.Namespace, console: Console) -> None:
    """Audit and print.

    Raises:
        ValueError: the factory can't be found, or gives something else than three things.
    """
    config = fp8hooks.CompressConfig(format=options.format)
    made = load(options.factory)()
    if not isinstance(made, tuple) or len(made) != 3:
        raise ValueError(f"MODULE:FUNCTION: {options.factory!r} gave {made!r:.80}, (model, batch, loss_fn) allowed")
    result = fp8hooks.audit(*made, config, sites=options.sites)
    console.print(result)
    if options.json:
        Path(options.json).write_text(result.to_json())
    if options.plot:
        result.plot(options.plot)


def load(name: str) -> Callable[[], Any]:
    """The function that `package.module:function` names; modules are looked for in the current folder too."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"MODULE:FUNCTION: {name!r} given, package.module:function allowed")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"MODULE:FUNCTION: can't import {module_name!r}: {error}") from error
    try:
        function: Callable[[], Any] = getattr(module, function_name)
    except AttributeError:
        raise ValueError(f"MODULE:FUNCTION: {module_name!r} has no {function_name!r}") from None
    return function
