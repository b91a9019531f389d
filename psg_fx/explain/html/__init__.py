"""A report on a step as one HTML file that needs nothing else: the graph at every stage, the plan, time and memory."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from psg_fx.explain.html.content import content
from psg_fx.graph.history import History

VENDOR = ("cytoscape", "dagre")
SCRIPTS = ("data", "layout", "seen", "graph", "panel", "charts", "views", "compare", "minimap", "main")
"""In the order in which they run."""

_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def write_report(
    path: str | PathLike[str], model: torch.nn.Module, loss_fn: Any, history: History, measure: bool = False
) -> Path:
    """Write the page to `path`; measure: with measured times beside the predicted ones."""
    path = Path(path)
    path.write_text(page(content(model, loss_fn, history, measure)), encoding="utf-8")
    return path


def page(data: dict[str, Any]) -> str:
    """The page with its data, styles, scripts and the licences of what it embeds.

    The browser is told to run these scripts, known by their hashes, and to load nothing.
    """
    licences = "\n\n".join(f"{name}\n\n{_read(f'vendor/{name}.LICENSE')}" for name in VENDOR)
    scripts = [_vendored(name) for name in VENDOR] + [_read(f"{name}.js") for name in SCRIPTS]
    scripts = [f"\n{script}\n" for script in scripts]
    parts = {
        "STYLE": _read("page.css"),
        "LICENCES": as_json(licences),
        "DATA": as_json(data),
        "SCRIPTS": "\n".join(f"<script>{script}</script>" for script in scripts),
        "HASHES": " ".join(f"'sha256-{_hash(script)}'" for script in scripts),
    }
    return re.sub("@([A-Z]+)@", lambda mark: parts[mark[1]], _read("page.html"))


def as_json(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end the element or begin a comment."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _hash(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


def _vendored(name: str) -> str:
    """A library as published, but for the pointer to its source map, which is not there."""
    lines = _read(f"vendor/{name}.min.js").splitlines()
    return "\n".join(line for line in lines if not line.startswith("//# sourceMappingURL"))


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
