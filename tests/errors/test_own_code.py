"""Code of the user's that fails: the whole text that it gets, and that trying it out leaves no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import BadArgument, CaptureFailed, NotYetSupported
from psg_fx.passes.compile.compile import _not_compiled
from psg_fx.torch_private.inductor import InductorError
from support.small import OwnLoss, Several, WithLayer, step
from support.texts import Row, check_refusal

X, Y = torch.zeros(3, 4), torch.tensor([0, 1, 2])


class Fails(WithLayer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(32, 4))


class Masked(nn.Module):
    """A model that makes its mask of values where none is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = self.embedding(ids)
        if attention_mask is None and (ids == 0).any():
            attention_mask = ids != 0
        return h.sum(1) if attention_mask is None else (h * attention_mask[..., None]).sum(1)


class Skipped(nn.Linear):
    layerdrop = 0.1

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < self.layerdrop:
            return x
        return super().forward(x)


class Dropped(nn.Module):
    """A layer that is left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Skipped(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def misspelt(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, label_smooth=0.1)  # type: ignore[call-arg]


MODEL_FAILS = "the model does not run on a batch of one sample"
LOSS_FAILS = "the loss does not run on a batch of one sample"
RUN_MODEL = "the error is that of your code: make model(x[:1]) run by itself"
RUN_LOSS = "the error is that of your code: make loss_fn(model(x[:1]), y[:1]) run by itself"
TARGETS = (
    "step(inputs, targets): targets may be a tensor, a tuple (loss_fn(output, *targets)), a dict "
    "(loss_fn(output, **targets)), or left out"
)
INPUTS = (
    "a tuple or list of inputs holds positional arguments, a dict keyword arguments; one argument that is a list goes "
    "into a tuple: step(([x1, x2],), y)"
)

OF_DTYPE = (
    "expected target dtype to be Long or Byte, but got Float" if torch.__version__ >= "2.12"
    else "expected scalar type Long but found Float"
)  # fmt: skip

ADDMM = "addmm: " if torch.__version__ >= "2.15" else ""
"""As torch begins its message."""

ROWS: dict[str, Row] = {
    "wrong-shape": (
        lambda: step()(torch.zeros(3, 6), Y), BadArgument, MODEL_FAILS, "in 0 (Linear)",
        f"RuntimeError: {ADDMM}mat1 and mat2 shapes cannot be multiplied (1x6 and 4x5)  (input_0 is float32 [1, 6])",
        RUN_MODEL,
    ),
    "wrong-shape-at-a-line": (
        lambda: step(Fails())(X, Y), BadArgument, MODEL_FAILS,
        "test_own_code.py:<line>: return self.layer(x.reshape(32, 4))",
        "RuntimeError: shape '[32, 4]' is invalid for input of size 4  (input_0 is float32 [1, 4])", RUN_MODEL,
    ),
    "wrong-dtype": (
        lambda: step()(X.double(), Y), BadArgument, MODEL_FAILS, "in 0 (Linear)",
        "RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float  (input_0 is float64 [1, 4])",
        RUN_MODEL,
    ),
    "wrong-target-dtype": (
        lambda: step()(X, Y.float()), BadArgument, LOSS_FAILS, "in the loss",
        f"RuntimeError: {OF_DTYPE}  (the output is float32 [1, 3]; target_0 is float32 [1])", RUN_LOSS,
    ),
    "wrong-target-shape": (
        lambda: step(loss=nn.MSELoss())(X, torch.zeros(3, 5)), BadArgument, LOSS_FAILS, "in the loss",
        "RuntimeError: The size of tensor a (3) must match the size of tensor b (5) at non-singleton dimension 1  "
        "(the output is float32 [1, 3]; target_0 is float32 [1, 5])", RUN_LOSS,
    ),
    "a-target-that-is-no-class": (
        lambda: step()(X, Y + 1), BadArgument, "the loss does not run on this batch, though on one sample",
        "in the loss", "IndexError: Target 3 is out of bounds.  (the output is float32 [3, 3]; target_0 is int64 [3])",
        "the error is that of your code: make loss_fn(model(x), y) run by itself",
    ),
    "targets-in-a-list": (
        lambda: step(loss=lambda out, a, b, c: F.cross_entropy(out, a))(X, [0, 1, 2]), BadArgument, LOSS_FAILS,
        "test_own_code.py:<line>: lambda: step(loss=lambda out, a, b, c: F.cross_entropy(out, a))(X, [0, 1, 2]), "
        "BadArgument, LOSS_FAILS,",
        "TypeError: cross_entropy_loss(): argument 'target' (position 2) must be Tensor, not int  (the output is "
        "float32 [1, 3]; target_0 is 0; target_1 is 1; target_2 is 2)", RUN_LOSS,
    ),
    "an-unknown-word": (
        lambda: step(nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)))(
            torch.tensor([[1, 2], [3, 9], [1, 1]]), Y
        ), BadArgument, "the model does not run on this batch, though on one sample", "in 0 (Embedding)",
        "IndexError: index out of range in self  (input_0 is int64 [3, 2])",
        "the error is that of your code: make model(x) run by itself",
    ),
    "no-target": (
        lambda: step()(X), BadArgument, "the loss does not take these targets", "cross_entropy(input, target, ...)",
        "it is called with 1 positional argument: missing a required argument: 'target'", TARGETS,
    ),
    "no-target-of-a-module": (
        lambda: step(loss=nn.CrossEntropyLoss())(X), BadArgument, "the loss does not take these targets",
        "CrossEntropyLoss.forward(input, target)",
        "it is called with 1 positional argument: missing a required argument: 'target'", TARGETS,
    ),
    "a-target-too-many": (
        lambda: step(loss=lambda out: out.sum())(X, Y), BadArgument, "the loss does not take these targets",
        "<lambda>(out)", "it is called with 2 positional arguments: too many positional arguments", TARGETS,
    ),
    "a-typo-in-the-loss": (
        lambda: step(loss=misspelt)(X, Y), BadArgument, LOSS_FAILS,
        "test_own_code.py:<line>: return F.cross_entropy(out, y, label_smooth=0.1)  # type: ignore[call-arg]",
        "TypeError: cross_entropy() got an unexpected keyword argument 'label_smooth'  (the output is float32 [1, 3]; "
        "target_0 is int64 [1])", RUN_LOSS,
    ),
    "a-loss-of-a-dict": (
        lambda: step(OwnLoss())(X, Y), BadArgument, LOSS_FAILS, "in the loss",
        "TypeError: cross_entropy_loss(): argument 'input' (position 1) must be Tensor, not dict  (the output is a "
        "dict of logits; target_0 is int64 [1])",
        RUN_LOSS + "; if the model computes its loss itself: loss_fn=lambda out: out.loss",
    ),
    "no-mask": (
        lambda: step(Masked())(torch.tensor([[1, 2], [3, 0], [1, 1]]), Y), NotYetSupported,
        "a mask picks something in this batch, and the arm that runs then is not in the graph",
        "test_own_code.py:<line>: if attention_mask is None and (ids == 0).any():",
        "the code branches on values of a tensor, whether a mask picks anything; it is not seen that the arm changes "
        "nothing where it does not, so the graph serves batches in which it picks nothing",
        "pass attention_mask, which the model makes itself where none is given; or leave the branch out, and loop over "
        "all (what is read by a mask that picks nothing has no rows; a mean is x[m].sum() / m.sum().clamp(min=1)), "
        "replace it by torch.where, or leave such samples out of the batch",
    ),
    "layerdrop": (
        lambda: step(Dropped())(X, Y), CaptureFailed,
        "the model and loss could not be captured as one graph",
        "test_own_code.py:<line>: if self.training and torch.rand([]) < self.layerdrop:",
        "the code branches on values of a tensor, so there is no one graph for all batches",
        "model.layer.layerdrop = 0.0: whether a layer runs is drawn for all samples together; or replace the branch by "
        "torch.where, or decide it outside the model",
    ),
    "a-list-that-is-one-argument": (
        lambda: step(Several())([X, X], Y), BadArgument, "the model does not take these inputs", "Several.forward(xs)",
        "it is called with 2 positional arguments: too many positional arguments", INPUTS,
    ),
    "unknown-keywords-of-the-model": (
        lambda: step()({"x": X}, Y), BadArgument, "the model does not take these inputs", "Sequential.forward(input)",
        "it is called with the keyword x: missing a required argument: 'input'", INPUTS,
    ),
    "unknown-keywords-without-a-loss": (
        lambda: step(Several(), None)(x=X), BadArgument, "the model does not take these inputs", "Several.forward(xs)",
        "it is called with the keyword x: missing a required argument: 'xs'",
        "a step without a loss is called as the model is: step(*args, **kwargs)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_text(name: str) -> None:
    check_refusal(ROWS[name])


def test_the_cause_is_the_error_of_the_users_code() -> None:
    with pytest.raises(BadArgument) as caught:
        step(loss=misspelt)(X, Y)
    assert isinstance(caught.value.__cause__, TypeError)


class Restless(nn.Module):
    """Changes whatever a forward can reach, and fails where it is tried out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 3), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():  # what a capture does is another matter
            self.count += 1
            self.new = x
            self.seen += 1.0
            with torch.no_grad():
                self.layer.weight.mul_(2.0)
            x.add_(torch.rand(()) + random.random() + float(np.random.rand()))
        raise RuntimeError("never mind")


def test_trying_the_code_out_changes_nothing() -> None:
    model, x = Restless(), torch.zeros(3, 4)
    weight = model.layer.weight.detach().clone()
    place = model.layer.weight.data_ptr()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(BadArgument, match="RuntimeError: never mind"):
        step(model)(x, Y)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    assert torch.equal(model.layer.weight, weight)
    assert model.layer.weight.data_ptr() == place
    assert not x.any()
    assert model.seen == 0
    assert (model.count, hasattr(model, "new")) == (0, False)


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_out_of_memory_is_raised_as_it_is(kind: type[Exception]) -> None:
    """Who looks for a batch size that fits waits for it."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            raise kind("no room")

    with pytest.raises(kind, match="no room"):
        psg_fx.transform(Large(), F.cross_entropy, backend="eager")(X, Y)


def test_a_full_folder_of_kernels_is_named() -> None:
    error = _not_compiled(InductorError(OSError(28, "No space left on device"), None))
    assert isinstance(error, BadArgument)
    assert (error.where, error.why) == ("TORCHINDUCTOR_CACHE_DIR", "OSError: [Errno 28] No space left on device")
    assert isinstance(_not_compiled(InductorError(AssertionError("of its own"), None)), NotYetSupported)


class Counts(nn.Module):
    """Counts its calls in Python, and reads the number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls  # type: ignore[no-any-return]


def test_a_count_in_python_is_refused_by_a_class_that_is_known() -> None:
    with pytest.raises(psg_fx.NotYetSupported, match="reads the number that it changes") as error:
        psg_fx.transform(Counts(), F.cross_entropy, backend="eager")(torch.zeros(2, 4), torch.tensor([0, 1]))
    assert type(error.value) is psg_fx.NotYetSupported
