"""What the scripts share: their options, processes of their own, and how results are kept.

Imports of torch are inside functions: `first_answer.py` measures what they cost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def options(description: str | None, *, device: bool = False, tag: bool = True) -> argparse.ArgumentParser:
    """A parser with the options that scripts have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if device:
        import torch

        default = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", default=default, choices=("cpu", "cuda"))
    if tag:
        parser.add_argument("--tag", help="names the result files (default: the device)")
    return parser


def device_tag(device: str) -> str:
    """`cpu-amd-epyc-2-threads` or `cuda-nvidia-...`."""
    import torch

    from psg_fx.machine import cpu_model

    name = torch.cuda.get_device_name() if device == "cuda" else f"{cpu_model()} {torch.get_num_threads()} threads"
    return f"{device}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"


def about(device: str = "cpu") -> dict[str, Any]:
    """Versions and hardware."""
    import torch

    from psg_fx.machine import environment

    return environment(torch.device(device))


def bullets(facts: Mapping[str, Any]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {key}: {value}" for key, value in facts.items())


def keep(name: str, data: Any, *paragraphs: str) -> Path:
    """Write `results/<name>.json` and, of the paragraphs, `.md`; their path without an ending."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if paragraphs:
        path.with_suffix(".md").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    return path.with_suffix("")


def written_by(command: Sequence[str], out: Path) -> dict[str, Any]:
    """The JSON that a process of its own leaves in a file, or why it did not."""
    done = subprocess.run([sys.executable, *command], check=False)
    if done.returncode or not out.exists():
        return {"failure": f"the process ended with exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def printed_by(script: str, *arguments: str, **environ: str) -> dict[str, Any]:
    """The JSON that a process of its own prints last."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, env=os.environ | environ, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
