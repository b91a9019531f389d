"""What NAME means: an example of the zoo, or what a function of the user's returns."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import inspect
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from psg_fx import zoo
from psg_fx.cli.usage import UsageError, raised
from psg_fx.errors import first_line

RETURNS = "it must return (model, loss_fn, inputs, targets[, batch_dim]) or a psg_fx.zoo.Example"


def load(args: argparse.Namespace) -> zoo.Example:
    """The example that NAME means."""
    if ":" in args.name:
        if args.set or args.device != "cpu":
            raise UsageError("--set and --device are for examples of the zoo: a factory decides for itself")
        return from_factory(args.name, args.batch)
    sizes = dict(_size(text) for text in args.set)
    require_device(args.device)
    try:
        return zoo.example(args.name, args.batch, args.device, **sizes)
    except (RuntimeError, TypeError, ValueError) as error:
        hint = "" if args.name in zoo.names() else "; or name your own as MODULE:FACTORY"
        raise UsageError(f"{first_line(error)}{hint}") from error


def require_device(device: str) -> None:
    """Refuses a CUDA device that is not there."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: this torch sees no CUDA device")


def _size(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise UsageError(f"--set needs KEY=VALUE, got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, value


def from_factory(name: str, batch: int | None = None) -> zoo.Example:
    """The example that `MODULE:FACTORY` returns; the current folder is searched for MODULE first.

    batch: passed to a factory that has an argument of this name.
    """
    given = {} if batch is None else {"batch": batch}
    factory = imported(name)
    if not callable(factory):
        raise UsageError(f"{name} is no function, but of type {type(factory).__name__}; {RETURNS}")
    try:
        with contextlib.suppress(ValueError):  # some built-in functions have no signature
            inspect.signature(factory).bind(**given)
    except TypeError as error:
        how = "with batch=N, for --batch" if given else "with no arguments"
        raise UsageError(f"{name} must be callable {how}: {error}") from error
    try:
        made = factory(**given)
    except (Exception, SystemExit) as error:  # whatever the user's code does
        raise UsageError(f"{name} {raised(error)}") from error
    return checked(name, made)


def imported(name: str) -> Any:
    """The object that `MODULE:ATTRIBUTE` names."""
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise UsageError(f"{name!r} is not of the form MODULE:FACTORY, as in my_package.models:tiny")
    if module_name.endswith(".py") or not all(map(str.isidentifier, module_name.split("."))):
        meant = f"{Path(module_name.removesuffix('.py')).name}:{attribute}"
        raise UsageError(f"{module_name!r} is no name of a module: of a file in the current folder, give {meant}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    arguments, sys.argv = sys.argv, [module_name]  # ours are not for what it parses
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            text = f"there is no module {error.name!r} in the current folder or on Python's path"
            raise UsageError(text) from error
        raise UsageError(f"importing {module_name} {raised(error)}") from error
    except (Exception, SystemExit) as error:  # whatever the user's code does
        raise UsageError(f"importing {module_name} {raised(error)}") from error
    finally:
        sys.argv = arguments
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        close = get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"module {module_name} has no {attribute!r}{hint}") from error


def checked(name: str, made: Any) -> zoo.Example:
    """What a factory returned as an example; anything else is refused with what came."""
    if isinstance(made, zoo.Example):
        ex = made
    elif isinstance(made, (tuple, list)) and len(made) in (4, 5):
        ex = zoo.Example(name, *made)
    else:
        came = f"{len(made)} values" if isinstance(made, (tuple, list)) else f"a {type(made).__name__}"
        raise UsageError(f"{name} returned {came}; {RETURNS}")
    if not isinstance(ex.model, nn.Module):
        raise UsageError(f"{name} returned a {type(ex.model).__name__} as model, not a torch.nn.Module; {RETURNS}")
    if not callable(ex.loss_fn):
        raise UsageError(f"{name} returned a {type(ex.loss_fn).__name__} as loss_fn, not a function; {RETURNS}")
    return ex
