"""A service that scores samples by the norms of their gradients, in another process: a step as a file.

    python docs/examples/score_client.py

It trains a classifier with a few labels turned, writes the step that scores a sample (`step.export`) and the model's
parameters, and starts `score_server.py`, which has torch and no psg_fx. It then asks for the scores before and after
training, holds them against those of the step itself, and prints how many of the samples with the largest norms are
those whose labels were turned.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx

SAMPLES, TURNED, FEATURES, CLASSES = 300, 15, 20, 4


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs around the centres of their classes, labels, and which of these are turned."""
    draw = torch.Generator().manual_seed(0)
    truth = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    x = 2 * torch.randn(CLASSES, FEATURES, generator=draw)[truth] + torch.randn(SAMPLES, FEATURES, generator=draw)
    turned = torch.randperm(SAMPLES, generator=draw)[:TURNED]
    y = truth.clone()
    y[turned] = (y[turned] + 1) % CLASSES
    return x, y, turned


def post(url: str, body: bytes) -> dict[str, Any]:
    """The answer of the server."""
    with urllib.request.urlopen(url, data=body, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def scores(address: str, x: Tensor, y: Tensor) -> Tensor:
    """Norms `[B]`, asked for in requests of different sizes."""
    found = []
    for part in torch.arange(len(x)).split(64):
        answer = post(
            f"{address}/score", json.dumps({"inputs": x[part].tolist(), "targets": y[part].tolist()}).encode()
        )
        found += answer["norms"]
    return torch.tensor(found)


def saved(model: nn.Module) -> bytes:
    """The model's parameters as torch.save writes them."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.getvalue()


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, serves, asks; prints and returns what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps (default 60)")
    parser.add_argument("--backend", default="inductor", help="of the step that the file is held against")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    x, y, turned = data()
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Norms(), backend=args.backend)
    with tempfile.TemporaryDirectory() as folder:
        path, parameters = Path(folder) / "step.pt2", Path(folder) / "parameters.pt"
        step.export(path, x[:8], y[:8])
        parameters.write_bytes(saved(model))
        command = [sys.executable, str(Path(__file__).with_name("score_server.py")), str(path), str(parameters)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                address, how = server.stdout.readline().strip().split(" ", 1)
                print(f"{path.stat().st_size >> 10} KiB served {how}")
                found = ask(address, model, step, x, y, turned, args.steps)
            finally:
                server.terminate()
    return found | {"psg_fx in the server": float(how == "with psg_fx")}


def ask(
    address: str, model: nn.Module, step: Any, x: Tensor, y: Tensor, turned: Tensor, steps: int
) -> dict[str, float]:
    """Scores before and after training, against those of the step."""
    before = (scores(address, x, y) - step(x, y).norms).abs().max().item()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    post(f"{address}/parameters", saved(model))
    norms = scores(address, x, y)
    after = (norms - step(x, y).norms).abs().max().item()
    hits = len(set(norms.topk(TURNED).indices.tolist()) & set(turned.tolist()))
    print(f"norms of the file and of the step differ by {before:.1e} before training, {after:.1e} after")
    print(f"of the {TURNED} samples with the largest norms, {hits} have a turned label")
    return {"before": before, "after": after, "hits": float(hits)}


if __name__ == "__main__":
    main()
