"""The command line: `psg-fx explain|validate|bench|report|graph NAME`, `psg-fx ops [OP]`, `psg-fx calibrate`.

NAME is an example of `psg_fx.zoo`, or `MODULE:FACTORY` where the factory takes nothing and returns
`(model, loss_fn, inputs, targets)`, the same with a `batch_dim` as fifth, or a `psg_fx.zoo.Example`.

Exit codes: 0 fine, 1 refused or wrong, 2 wrong usage.  Standard output holds the answer and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

import torch

from psg_fx.cli.options import build_parser
from psg_fx.cli.usage import UsageError
from psg_fx.errors import PsgError

__all__ = ["build_parser", "main"]

FAILED, USAGE, CLOSED = 1, 2, 141
"""CLOSED: what a shell says of a program whose reader went away."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        if args.run is None:
            parser.print_help(sys.stderr)
            return USAGE
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        with contextlib.redirect_stdout(sys.stderr):  # what the user's own code prints
            code, text = args.run(args)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # what its encoding has no letters for
        print(text, flush=True)
    except UsageError as error:
        print(f"psg-fx: {error}", file=sys.stderr)
        return USAGE
    except PsgError as error:
        print(error, file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return CLOSED
    return int(code)
