"""Why a capture failed, in plain words: torch.export's exception -> what, where, why, fix."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psg_fx.errors import CaptureFailed, NotYetSupported, first_line
from psg_fx.program.code import is_theirs, origin, source
from psg_fx.source import TORCH
from psg_fx.torch_private.fakes import UnsupportedOperatorException

NOT_ONE_GRAPH = "the model and loss could not be captured as one graph"
"""What is wrong, where nothing more is known than that a capture failed."""

TAKEN_FOR_A_CONSTANT = "torch takes a tensor that the code computes for a constant"
"""Why a capture failed, where `vmap(out_dims=d)` may be the reason."""

COMMUNICATES = "the code communicates with other processes"
"""Then it must not be run to see why it fails: the others would not take part."""

_PROCESSES = os.path.join(TORCH, "distributed", "")
_SIZES = (
    "take sizes from the input (x.shape[0], -1) where the code has a number; what is kept for each sample from call to "
    "call (a hidden state, a buffer with B rows) becomes an input"
)
_WITH_GRAPHS = os.path.join(TORCH, "_higher_order_ops", "")
_FUNCTORCH = os.path.join(TORCH, "_functorch", "")
_TRANSFORMS = tuple(_FUNCTORCH + file for file in ("apis.py", "eager_transforms.py", "vmap.py"))
_BRANCHES = re.compile(r"\b(if|elif|while|assert|and|or|not)\b")
"""What decides, in a line of code."""
_NUMBER = re.compile(r"\b(int|float)\(")
"""What makes a number of Python."""


@dataclass(frozen=True)
class _Failure:
    """An exception of export's.  first: the first line of its text.  line: the user's.  files: that it came through."""

    kind: str
    text: str
    first: str
    line: str
    files: tuple[str, ...]

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        kind, files = type(error).__name__, tuple(f.filename for f in traceback.extract_tb(error.__traceback__))
        return cls(kind, str(error), first_line(error) or kind, user_line(error), files)

    def says(self, *words: str) -> bool:
        return any(each in self.text for each in words)

    def passed(self, *paths: str) -> bool:
        return any(file.startswith(paths) for file in self.files)

    def goes_by_values(self) -> bool:
        asks = "data-dependent" in self.text.lower() or "DataDependent" in self.kind
        return asks or re.search(r"\bu\d+\b", self.first) is not None

    def makes_a_number(self) -> bool:
        return bool(_NUMBER.search(self.line)) and not _BRANCHES.search(self.line)

    def constraint(self) -> str:
        """The sentence of export's report that says what was fixed."""
        for line in self.text.splitlines():
            if "specialized it to be a constant" in line or "satisfy the generated guard" in line:
                return line.strip(" -").rstrip(".")
        return self.first


_REASONS: Sequence[tuple[Callable[[_Failure], bool], str, str]] = (
    (
        lambda failure: failure.goes_by_values() and "len(" in failure.line and not _BRANCHES.search(failure.line),
        "len() makes an integer of Python of how many rows there are, which depends on values",
        "x.shape[0] in place of len(x), which a graph follows",
    ),
    (
        lambda failure: failure.goes_by_values() and failure.makes_a_number(),
        "int() and float() make a number of Python of a value, so there is no one graph for all batches",
        "the tensor itself, or .item() in place of int() and float(): a graph follows what is computed of it",
    ),
    (
        lambda failure: failure.goes_by_values() and bool(failure.line) and not _BRANCHES.search(failure.line),
        "what is computed goes by the values of a tensor, so there is no one graph for all batches",
        "compute with tensors in place of their numbers (torch.exp(-0.1 * self.step)), use one mask for all that it "
        "picks (m = t > 0; x[m], t[m]), or compute it outside the model",
    ),
    (
        _Failure.goes_by_values, "the code branches on values of a tensor, so there is no one graph for all batches",
        "replace the branch by torch.where, or decide it outside the model",
    ),
    (
        lambda failure: failure.says(".numpy() is not supported"),
        "the code takes the values of a tensor out of torch, as a NumPy array, where no graph follows",
        "compute with torch's own functions, or outside the model",
    ),
    (
        lambda failure: failure.says("Cannot access data pointer of Tensor"),
        "the code reads the memory of a tensor, as copy.deepcopy and kernels do, where no graph follows",
        "copy a tensor by .detach().clone(); make an op of a kernel by torch.library.custom_op",
    ),
    (
        lambda failure: failure.says("torch.fx.proxy.Proxy"),
        "the smaller or the larger of a number that is read out of a tensor and another one is a size",
        "keep every place (x[:, :lengths.max().item()] is x), and mask those that do not count by torch.where",
    ),
    (
        lambda failure: failure.text.startswith("node: sym_"),
        "how many rows a mask picks is compared with another size, which no graph records",
        "keep every row, and mask what is computed of them by torch.where",
    ),
    (
        lambda failure: failure.says("is mutated in the forward method"),
        "the code writes into a tensor that is no buffer of the model or the loss, by a view or inside of torch",
        "register it by self.register_buffer(..), or put a new tensor in its place (self.x = self.x * 0.9)",
    ),
    (
        lambda failure: failure.says("expected compiled_fn to be GraphModule"),
        "two buffers share memory (self.b = self.a, or a view of it), and the code writes into it",
        "register one of them, and read it in the place of both",
    ),
    (
        lambda failure: "DynamicOutputShape" in failure.kind,
        "what shapes {first} returns goes by the values of a tensor, so there is no one graph for all batches",
        "keep all entries, and mask some by torch.where; for least squares: torch.linalg.pinv(a) @ b",
    ),
    (
        lambda failure: failure.passed(_WITH_GRAPHS),
        "torch.cond, while_loop, scan and map hold graphs of their own, which are not looked into",
        "write a loop in Python, and a branch by torch.where, where both arms are finite",
    ),
    (
        lambda failure: failure.says(
            "fake tensor in the exported program constant", "'Tensor' object has no attribute 'constant'"
        ),
        TAKEN_FOR_A_CONSTANT,
        "compute in front of a vmap what all its calls share; slice by no number that a tensor gives (n.max())",
    ),
    (
        lambda failure: failure.passed(*_TRANSFORMS),
        "a transformation of torch.func (vmap, grad, jvp) in the code fails on fake tensors: {kind}: {first}",
        "write batched ops for vmap; for a derivative take torch.func.grad, vjp or jvp, or torch.autograd.grad",
    ),
    (
        lambda failure: failure.says("Constraints violated", "specializ", "is invalid for input of size"),
        "the code ties the batch size to a fixed number: {constraint}", _SIZES,
    ),
    (
        lambda failure: bool(failure.line), "{kind}: {first}",
        "make the forward pass and loss run under torch.export.export(strict=False)",
    ),
    (
        lambda _: True, "{kind}: {first}",
        "make the forward pass and loss run under torch.export.export(strict=False); if another thread used the model "
        "meanwhile: let it wait for the first call",
    ),
)  # fmt: skip
"""Which failures, why, and the way out; the first that fits."""


def capture_failed(error: Exception) -> CaptureFailed:
    """Export's failure in plain words, with the user's line."""
    failure = _Failure.of(error)
    where = failure.line or "the model or loss"
    if failure.says("c10d") or failure.passed(_PROCESSES):
        return CaptureFailed(
            COMMUNICATES, where=where, why=f"{failure.kind}: {failure.first}",
            fix="leave that out of the model and loss; a step reads whole parameters: shard the model by "
            "torch.distributed.fsdp.fully_shard, and add up over processes afterwards, by psg_fx.distributed.reduce",
        )  # fmt: skip
    why, fix = next((why, fix) for fits, why, fix in _REASONS if fits(failure))
    why = why.format(kind=failure.kind, first=failure.first, constraint=failure.constraint())
    return CaptureFailed(NOT_ONE_GRAPH, where=where, why=why, fix=fix)


def without_shapes(error: UnsupportedOperatorException) -> NotYetSupported:
    """An op that no fake tensor can run."""
    return NotYetSupported(
        f"{error.func} is known to torch by its kernels alone", where=user_line(error) or str(error.func),
        why="what shape it returns for a batch of any size is not said anywhere",
        fix="write it with other ops; for a custom operator: torch.library.register_fake",
    )  # fmt: skip


def failure_at(error: CaptureFailed, size: int, wanted: int) -> CaptureFailed:
    """The program runs with `wanted` samples and not with `size`."""
    samples = "one sample" if size == 1 else f"{size} samples"
    return CaptureFailed(
        f"the model and loss run on {wanted} samples and not on {samples}", where=error.where,
        why=error.why if size != 1 else f"the loss of a sample is that of a batch of one, and there {error.why}",
        fix=_SIZES,
    )  # fmt: skip


def user_line(error: Exception) -> str:
    """`model.py:17: x = self.fc(x)`: the innermost line of the user's code that an exception came through, or ""."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in lines if is_theirs(origin(file))]
    return source(*own[-1]) if own else ""
