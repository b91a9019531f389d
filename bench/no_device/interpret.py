"""Execute what inductor generated for CUDA on CPU tensors, and hold it against the graph that it was made of.

    TRITON_INTERPRET=1 python -m no_device.interpret FILE

FILE: what `keep_for` wrote.  Prints a line of JSON: launches, outputs, and the worst relative error of an output.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from no_device import pretend
from no_device.retarget import Compiled


def keep_for(path: Path, found: Compiled) -> None:
    """Write the code of a step that was also run on the CPU, its arguments and what it should answer."""
    kept = {"wrapper": found.wrapper, "arguments": without_gradients(found.arguments)}
    torch.save(kept | {"results": without_gradients(found.results)}, path)


def without_gradients(values: Sequence[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, torch.Tensor) else value for value in values]


def executed(wrapper: str, arguments: list[Any]) -> list[Any]:
    """What the generated code answers: products and the like by torch on the CPU, kernels by the interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
    space: dict[str, Any] = {"__name__": "wrapper"}
    with pretend.interpreted():
        exec(compile(wrapper, "wrapper", "exec"), space)
        space["device"] = lambda *args, **kwargs: torch.device("cpu")  # where an op that torch executes names one
        return list(space["call"](list(arguments)))


def worst_error(found: list[Any], wanted: list[Any]) -> float:
    """The largest error of an element, relative to the largest element of its tensor."""
    worst = 0.0
    for answer, right in zip(found, wanted, strict=True):
        if isinstance(right, torch.Tensor) and right.numel():
            error = (answer.double() - right.double()).abs().max() / right.double().abs().max().clamp_min(1e-30)
            worst = max(worst, float(error.nan_to_num(torch.inf)))
    return worst


if __name__ == "__main__":
    torch.set_num_threads(1)
    kept = torch.load(sys.argv[1], weights_only=False)
    answers = executed(kept["wrapper"], kept["arguments"])
    error = worst_error(answers, kept["results"])
    print(json.dumps({"launches": pretend.Interpreted.launched, "outputs": len(answers), "error": error}))
