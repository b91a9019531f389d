"""Runs of a program and of its graph on given values, side by side and without a trace."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter
from torch.overrides import TorchFunctionMode

from psg_fx.graph import facts
from psg_fx.graph.strides import laid_out_as_read

NOISE = 0.1
_FAR = 3.0


def perturbed(gm: GraphModule, program: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """The program's tensors, parameters moved at random (zeros would hide differences), but for those that the loss
    reaches through its closure.  With another seed they are moved far, vectors most: then features have one sign.
    """
    held, generator = facts.graph_facts(gm).held, _generator(seed)

    def moved(p: Tensor) -> Tensor:
        noise = torch.randn(p.shape, generator=generator if seed else _generator()).to(p)
        return p + (_FAR / max(math.prod(p.shape[1:]), 1) ** 0.5 if seed else NOISE) * noise

    made: dict[int, Tensor] = {}
    for name, p in program.named_parameters(remove_duplicate=False):
        moves = p.is_floating_point() and name.removeprefix("model.") not in held
        with torch.no_grad():
            made.setdefault(id(p), moved(p) if moves else p)
    for _, b in program.named_buffers():
        made[id(b)] = b.clone()
    named = (program.named_parameters, program.named_buffers)
    return {name: made[id(t)] for tensors in named for name, t in tensors(remove_duplicate=False)}


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_of(tensor: Tensor, dim: int | None, index: int, noise: float) -> Tensor:
    """Sample `index` of an input, with so much noise; any values for an empty batch."""
    if dim is None:
        return tensor.detach()
    one = tensor.detach().narrow(dim, index, 1) if tensor.shape[dim] else tensor.new_zeros(
        [1 if d == dim else n for d, n in enumerate(tensor.shape)]
    )  # fmt: skip
    if not (noise and one.is_floating_point()):
        return one
    return one + noise * torch.randn(one.shape, generator=_generator()).to(one)


@contextlib.contextmanager
def undisturbed(inputs: Sequence[Tensor]) -> Iterator[None]:
    """The same random draws in each run, and none taken from the user's."""
    devices = list({t.device for t in inputs if t.device.type == "cuda"})
    with (
        torch.no_grad(), torch.inference_mode(False), torch.random.fork_rng(devices), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def results(gm: GraphModule, state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The losses or outputs of the graph."""
    info, rest = facts.graph_facts(gm), iter(inputs)
    arguments: list[Any] = []
    for node in facts.placeholders(gm):
        spec = facts.input_spec(node)
        if spec.kind in ("input", "target"):
            arguments.append(next(rest).clone())
        else:
            arguments.append(info.constants[spec.name] if spec.kind == "constant" else state[spec.target])
    device = inputs[0].device.type
    with torch.autocast(device, enabled=False):
        results = Interpreter(laid_out_as_read(gm)).run(*arguments)
    return [r for r, spec in zip(results, info.outputs, strict=True) if spec.kind in ("loss", "output")]


class WithoutDropout(TorchFunctionMode):
    """While open, dropout returns its input."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _DROPOUTS:
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


_DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_, torch.alpha_dropout,
    torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
)  # fmt: skip
"""What layers and code call: a mode is not told of what is called inside of what it is told of."""


def equal(found: Tensor, expected: Tensor) -> bool:
    """Whether two results hold the same numbers; the sample dim, of size 1, may be missing."""
    if found.numel() != expected.numel() or found.dtype != expected.dtype:
        return False
    first, second = (t.flatten() for t in (found, expected))
    if not facts.is_differentiable(found):
        return torch.equal(first, second)
    tolerance = max(1e-8, 1e3 * torch.finfo(found.dtype).eps)
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True)


def all_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether results are as many, and equal."""
    return len(found) == len(expected) and all(map(equal, found, expected))


def same_beginning(padded: Tensor, shorter: Tensor) -> bool:
    """Whether two results hold the same numbers, up to where the shorter one ends."""
    if padded.dim() != shorter.dim() or any(a < b for a, b in zip(padded.shape, shorter.shape, strict=True)):
        return False
    return equal(padded[tuple(map(slice, shorter.shape))], shorter)


__all__ = [
    "NOISE", "WithoutDropout", "all_equal", "equal", "one_of", "perturbed", "results", "same_beginning", "undisturbed",
]  # fmt: skip
