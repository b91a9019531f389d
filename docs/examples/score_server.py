"""Scores samples by the norms of their gradients, from a file of `step.export`: the server has torch and no psg_fx.

    python docs/examples/score_client.py            makes the file, starts this server, and asks it
    python docs/examples/score_server.py step.pt2 parameters.pt

POST /score with {"inputs": [[..], ..], "targets": [..]} gives {"norms": [..], "losses": [..]}, one for each.
POST /parameters with what `torch.save(model.state_dict())` writes: the model is scored as it is then.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import zipfile
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch


class Scorer:
    """The file, and the parameters that it is asked about."""

    def __init__(self, path: str, parameters: dict[str, torch.Tensor]) -> None:
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith("/extra/psg_fx.json"))
            self.said = json.loads(archive.read(name))
        self.run = torch._inductor.aoti_load_package(path)
        self.parameters = parameters

    def score(self, batch: dict[str, Any]) -> dict[str, list[float]]:
        """Losses and norms `[B]`.  Every input goes where the file's list says; compiled code asks nothing."""
        given = {"input": batch["inputs"], "target": batch["targets"]}
        flat = []
        for entry in self.said["inputs"]:
            value = self.parameters.get(entry["name"])
            if value is None:
                value = torch.tensor(given[entry["kind"]], dtype=getattr(torch, entry["dtype"]))
            wanted = [len(batch["targets"]) if size == "B" else size for size in entry["shape"]]
            if list(value.shape) != wanted:
                raise ValueError(f"{entry['name']} is {list(value.shape)}, not {wanted}")
            flat.append(value.contiguous())
        results = self.run(*flat)
        fields = [entry["field"] for entry in self.said["outputs"]]
        return {name: results[fields.index(name)].tolist() for name in ("losses", "norms")}


class Handler(BaseHTTPRequestHandler):
    """One request at a time: the compiled code uses all threads that torch has."""

    scorer: Scorer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            if self.path == "/parameters":
                self.scorer.parameters = torch.load(io.BytesIO(body), weights_only=True)
                self.answer(200, {"parameters": len(self.scorer.parameters)})
            else:
                self.answer(200, self.scorer.score(json.loads(body)))
        except (ValueError, KeyError, TypeError) as error:
            self.answer(400, {"error": str(error)})

    def answer(self, status: int, value: dict[str, Any]) -> None:
        """Send JSON."""
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the address, and serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", help="what step.export has written")
    parser.add_argument("parameters", help="what torch.save(model.state_dict()) has written")
    args = parser.parse_args(argv)
    Handler.scorer = Scorer(args.file, torch.load(args.parameters, weights_only=True))
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        loaded = "with" if any(name.startswith("psg_fx") for name in sys.modules) else "without"
        print(f"http://127.0.0.1:{server.server_port} {loaded} psg_fx", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
