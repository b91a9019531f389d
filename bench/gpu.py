"""All that a CUDA device can say of this version, in under 25 minutes and without network: `make gpu`.

    python bench/gpu.py [--parts tests,kernels,weighted_sums,gram_dots,calibrate,moved,compare] [--again]

The parts run one after the other, each in a process of its own with a limit of its own. What a part leaves under
`bench/results/` names the device; a part that has left it is passed over, unless told `--again`. Run by any Python
that has torch with CUDA, pytest and tabulate; the package need not be installed for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _results import RESULTS, device_tag, options, require_cuda

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {
    "tests": 330, "kernels": 330, "weighted_sums": 50, "gram_dots": 50, "calibrate": 60, "moved": 150, "compare": 520,
}  # fmt: skip
"""Seconds."""
RACED = "gpt-large-bf16,vit-base-bf16"
"""What 16 cores compile in the time of `compare`; others are among the models of `kernels`."""


def main() -> int:
    parser = options(__doc__, tag=False)
    parser.add_argument("--parts", default=",".join(LIMITS), help=f"separated by commas, from {', '.join(LIMITS)}")
    parser.add_argument("--again", action="store_true", help="also parts whose results are there")
    args = parser.parse_args()
    require_cuda()
    ended = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = as_installed(Path(folder))
        sys.path.insert(0, folder)  # this process, too, has psg_fx of this checkout
        tag = device_tag("cuda")
        for part in args.parts.split(","):
            result = RESULTS / (f"tests-{tag}.txt" if part == "tests" else f"{part}-{tag}.json")
            if result.exists() and not args.again:
                print(f"== {part}: {result} is there", flush=True)
                continue
            start = time.monotonic()
            ended[part] = run(part, tag, result, environment)
            print(f"== {part}: {ended[part]} after {time.monotonic() - start:.0f} s", flush=True)
    return int(any(how != "done" for how in ended.values()))


def as_installed(folder: Path) -> dict[str, str]:
    """Environment variables with which `psg_fx` is that of this checkout: links in the installed shape; and with which
    JAX, a contender beside torch in one process, does not take three quarters of the device's memory at once.
    """
    place = folder / "psg_fx"
    place.mkdir()
    for path in [*(ROOT / "psg_fx").iterdir(), ROOT / "passes"]:
        (place / path.name).symlink_to(path)
    paths = [str(folder), str(ROOT / "tests"), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}
    return os.environ | own | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def run(part: str, tag: str, result: Path, environment: dict[str, str]) -> str:
    """One part; how it ended."""
    if part == "tests":
        told = ["-m", "pytest", "-q", "-m", "cuda", "tests/cuda", "--tb=short", "-W", "default", "-n", "12"]
        with result.open("w", encoding="utf-8") as out:
            return limited(part, told, environment | {"OMP_NUM_THREADS": "1"}, out)
    script = [str(ROOT / "bench" / f"{part}.py"), "--tag", tag]
    race = ["--device", "cuda", "--models", RACED, "--together", "440", "--seconds", "0.5"]
    more = {"compare": race, "calibrate": ["--device", "cuda"], "kernels": ["--together", "240"]}
    return limited(part, script + more.get(part, []), environment)


def limited(part: str, told: list[str], environment: dict[str, str], out: object = None) -> str:
    try:
        done = subprocess.run(
            [sys.executable, *told], check=False, cwd=ROOT, env=environment, timeout=LIMITS[part], stdout=out
        )  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return f"stopped at its limit of {LIMITS[part]} s"
    return f"exit code {done.returncode}" if done.returncode else "done"


if __name__ == "__main__":
    sys.exit(main())
