"""What may be another program for a batch of one sample: `x.squeeze()` takes the sample dim too, and later dims have
other numbers; `x.contiguous().relu_()` writes into x where that is contiguous as it lies; `pad_packed_sequence(packed)`
pads to the longest sample.

The graph keeps the sample dim, has the copy, and keeps the padding as it was given.  The loss of a sample is by
definition what the code computes for it alone, so where the two could differ the code is run on single samples, and
must give what the graph gives.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.strides import laid_out_as_read
from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.packed import kept_in
from psg_fx.program.program import Program
from psg_fx.reference.state import called_with
from psg_fx.source import locate
from psg_fx.torch_private.modes import autocast_now

Packed = Callable[[bool], contextlib.AbstractContextManager[Any]]

NOISE = 0.1
_FAR = 3.0
_LOOKED_AT, _SHORTER, _STATES = 64, 3, 4
"""Samples of a batch among which some are looked for that are shorter than their padding; with how many parameters."""


@dataclass(frozen=True)
class Doubt:
    """Why a graph could give something else than the code for one sample, in the words of a refusal and of a note."""

    what: str
    where: str
    why: str
    fix: str
    note: str


def squeezed(node: Node) -> Doubt:
    """An op of the graph keeps the sample dim where the code drops it."""
    return Doubt(
        "squeeze", locate(node), "takes the sample dim of a batch of one, and what follows then means something else",
        "name the dim: x.squeeze(1), or x.flatten(1)", "takes the sample dim of a batch of one",
    )  # fmt: skip


def copied(where: str) -> Doubt:
    """The code writes into what is a copy for some batch sizes only."""
    return Doubt(
        "a write in place", where, "writes into a copy, which `contiguous` or `reshape` makes of a batch, but into the "
        "value itself for a batch of one, whose memory needs no copy",
        "write it without the underscore: x.contiguous().relu()", "writes into a copy of a batch of several",
    )  # fmt: skip


def trimmed(where: str) -> Doubt:
    """The code pads to the longest sample, the graph as far as the input was padded."""
    return Doubt(
        "pad_packed_sequence", where, "pads to the longest sample, which alone is the sample itself, and what follows "
        "depends on how long the padding is",
        "say to what length: pad_packed_sequence(.., total_length=x.shape[1]), which is the same for each sample; or "
        "mask what is beyond the lengths", "pads a batch of one to its own length",
    )  # fmt: skip


class Alone:
    """Compares a graph with its program on single samples, under the autocast of the capture."""

    def __init__(self, program: Program, call: Call, packed: Packed) -> None:
        """packed: opens what packed sequences are in a capture, with paddings as they were or trimmed (True)."""
        self.program, self.call, self.packed = program, call, packed
        self.asked = False  # whether the code has been run
        self.casts = autocast_now()

    def __call__(self, gm: GraphModule, squeezes: Sequence[Node]) -> str:
        """Refuse a graph that gives something else than the code for one sample; a note where the code does not run so.

        squeezes: the ops of the graph that keep the sample dim where the code drops it.
        """
        self.asked, info = True, facts.graph_facts(gm)
        asked: list[tuple[Callable[[GraphModule, Doubt], str], Doubt]] = []
        if squeezes or info.written_copy:
            asked.append((self.single, squeezed(squeezes[0]) if squeezes else copied(info.written_copy)))
        if info.trims:
            asked.append((self.shorter, trimmed(info.trims)))
        if self.call.axes:
            _, first = asked[0]
            raise NotYetSupported(
                f"{first.what} may treat a batch of one sample differently", where=first.where,
                why=f"it {first.why}; of samples that are rows the code is not run on one alone", fix=first.fix,
            )  # fmt: skip
        return "; ".join(filter(None, (ask(gm, doubt) for ask, doubt in asked)))

    def single(self, gm: GraphModule, doubt: Doubt) -> str:
        """The graph beside the code, on the first and the last sample alone; and on these with ones for masks, labels
        and other whole numbers: what a mask hides of the first batch, it may show of another.
        """
        state = _perturbed(gm, self.program)
        for index in sorted({0, max(self.call.batch_size() - 1, 0)}):
            inputs = [_one(t, d, index) for t, d in zip(self.call.tensors, self.call.dims, strict=True)]
            error = self._compare(gm, state, inputs, doubt)
            if error is not None:
                return _not_said(doubt, error)
            self._compare(gm, state, [t if facts.is_differentiable(t) else torch.ones_like(t) for t in inputs], doubt)
        return ""

    def _compare(
        self, gm: GraphModule, state: Mapping[str, Tensor], inputs: Sequence[Tensor], doubt: Doubt
    ) -> Exception | None:
        """Refuse what the graph gives otherwise than the code; the error of code that does not run on these inputs, by
        which nothing is said.
        """
        try:
            with _undisturbed(inputs):
                found = _results(gm, state, inputs)
            with _undisturbed(inputs), self.packed(True):
                expected = self.run(dict(state), inputs)[: len(found)]
        except Exception as error:
            return error
        _require_equal(found, expected, doubt)
        return None

    def shorter(self, gm: GraphModule, doubt: Doubt) -> str:
        """The code with paddings as they are given, as the graph has them, beside the code as it is, on samples alone
        that are shorter.  With several parameters: a padding may win a maximum for some of them only.
        """
        chosen: list[list[Tensor]] = []
        count = sum(spec.kind in ("loss", "output") for spec in facts.graph_facts(gm).outputs)
        state = _perturbed(gm, self.program)
        for inputs, is_cut in self.samples():
            if len(chosen) == _SHORTER or (is_cut and chosen):
                break
            try:
                (found, _), (expected, shorter) = (self.padded(state, inputs, trims) for trims in (False, True))
            except Exception as error:
                if is_cut:  # other inputs are as long as it was
                    break
                return _not_said(doubt, error)
            if shorter:
                _require_equal(found[:count], expected[:count], doubt)
                chosen.append(inputs)
        for seed in range(1, _STATES):
            state = _perturbed(gm, self.program, seed)
            for inputs in chosen:
                try:
                    (found, _), (expected, _) = (self.padded(state, inputs, trims) for trims in (False, True))
                except Exception:  # such parameters are not in its domain
                    continue
                _require_equal(found[:count], expected[:count], doubt)
        if chosen:
            return f"{doubt.where} {doubt.note}; that this does not matter was found by trying it out"
        raise NotYetSupported(
            f"{doubt.what} without a total_length, and no sample of the first batch is shorter", where=doubt.where,
            why="alone, a sample is padded to its own length, and whether that matters is seen of a shorter one only",
            fix=doubt.fix,
        )  # fmt: skip

    def samples(self) -> Iterator[tuple[list[Tensor], bool]]:
        """Some samples of the batch, each alone; then those that are packed inputs with half of their steps (True)."""
        size, some = self.call.batch_size(), []
        for index in range(0, size, max(-(-size // _LOOKED_AT), 1)):
            some.append([_one(t, d, index) for t, d in zip(self.call.tensors, self.call.dims, strict=True)])
            yield some[-1], False
        for inputs in some:
            lengths = {id(kept.lengths) for kept in kept_in(self.call.rebuild(inputs))}
            if lengths:
                yield [(t + 1) // 2 if id(t) in lengths else t for t in inputs], True

    def padded(self, state: dict[str, Tensor], inputs: Sequence[Tensor], trims: bool) -> tuple[list[Tensor], bool]:
        """What the program returns without dropout, which draws by places, and whether it trimmed a padding."""
        with _undisturbed(inputs), self.packed(trims) as padding, _WithoutDropout():
            return self.run(state, inputs), padding.shorter

    def run(self, state: dict[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the program returns; what is known of it stays what its capture has found."""
        program, given = self.program.like(), ([t.clone() for t in inputs],)
        with contextlib.ExitStack() as stack:
            stack.enter_context(program.stand_ins.expected(program))
            for kind, dtype in self.casts.items():
                stack.enter_context(torch.autocast(kind, dtype))
            found = called_with(program, state, given, tie_weights=False)
        return [t for t in pytree.tree_leaves(found) if isinstance(t, Tensor)]


def _perturbed(gm: GraphModule, program: nn.Module, seed: int = 0) -> dict[str, Tensor]:
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


def _one(tensor: Tensor, dim: int | None, index: int) -> Tensor:
    """Sample `index` of an input, with a little noise; any values for an empty batch."""
    if dim is None:
        return tensor.detach()
    one = tensor.detach().narrow(dim, index, 1) if tensor.shape[dim] else tensor.new_zeros(
        [1 if d == dim else n for d, n in enumerate(tensor.shape)]
    )  # fmt: skip
    if not one.is_floating_point():
        return one
    return one + NOISE * torch.randn(one.shape, generator=_generator()).to(one)


@contextlib.contextmanager
def _undisturbed(inputs: Sequence[Tensor]) -> Iterator[None]:
    """The same random draws in each run, and none taken from the user's."""
    devices = list({t.device for t in inputs if t.device.type == "cuda"})
    with (
        torch.no_grad(), torch.inference_mode(False), torch.random.fork_rng(devices), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def _results(gm: GraphModule, state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
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


def _not_said(doubt: Doubt, error: Exception) -> str:
    return f"{doubt.where} {doubt.note}, on which the code does not run ({type(error).__name__}); it is kept"


def _require_equal(found: Sequence[Tensor], expected: Sequence[Tensor], doubt: Doubt) -> None:
    if len(found) != len(expected) or not all(map(_equal, found, expected)):
        raise NotYetSupported(
            f"{doubt.what} treats a batch of one sample differently", where=doubt.where,
            why=f"it {doubt.why}: the loss of a sample is that of a batch of one", fix=doubt.fix,
        )  # fmt: skip


class _WithoutDropout(TorchFunctionMode):
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


def _equal(found: Tensor, expected: Tensor) -> bool:
    """Whether two results hold the same numbers; the sample dim, of size 1, may be missing."""
    if found.numel() != expected.numel() or found.dtype != expected.dtype:
        return False
    first, second = (t.flatten() for t in (found, expected))
    if not facts.is_differentiable(found):
        return torch.equal(first, second)
    tolerance = max(1e-8, 1e3 * torch.finfo(found.dtype).eps)
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True)
