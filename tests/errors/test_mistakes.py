"""Mistakes people make, and the whole text that each of them gets."""

from __future__ import annotations

import logging
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import BadArgument, CaptureFailed, NotYetSupported, SamplesMixed
from psg_fx.errors import PsgError
from psg_fx.torch_private.quiet import quiet
from support import oracle
from support.small import WithLayer, mlp, step

X, Y = torch.zeros(3, 4), torch.tensor([0, 1, 2])


class OwnLoss(WithLayer):
    """A model that computes its loss itself."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.layer(x)
        return {"logits": out} if labels is None else {"loss": F.cross_entropy(out, labels), "logits": out}


class Several(WithLayer):
    """A model whose one argument is a list."""

    def forward(self, xs: list[Tensor]) -> Tensor:
        return self.layer(xs[0] + xs[1])


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


def misspelt(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, label_smooth=0.1)  # type: ignore[call-arg]


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(4, 3))


def quantised() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear})


def csr() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return X.to_sparse_csr()


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=torch.jagged)


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
QUANTITY_FIX = "use psg_fx.Grads(), Norms(), ClippedSum(max_norm), Gram() or another of psg_fx.Quantity"
PASS_BATCH = (
    "pass the dict itself, whose names are then those of the model's arguments: step(batch), or step(batch, targets)"
)
NO_BLOCK = "a graph reads strided tensors"

Row = tuple[Callable[[], Any], type[PsgError], str, str, str, str]

ROWS: dict[str, Row] = {
    "wrong-shape": (
        lambda: step()(torch.zeros(3, 6), Y), BadArgument, MODEL_FAILS, "in 0 (Linear)",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x6 and 4x5)  (input_0 is float32 [1, 6])", RUN_MODEL,
    ),
    "wrong-shape-at-a-line": (
        lambda: step(Fails())(X, Y), BadArgument, MODEL_FAILS,
        "test_mistakes.py:<line>: return self.layer(x.reshape(32, 4))",
        "RuntimeError: shape '[32, 4]' is invalid for input of size 4  (input_0 is float32 [1, 4])", RUN_MODEL,
    ),
    "wrong-dtype": (
        lambda: step()(X.double(), Y), BadArgument, MODEL_FAILS, "in 0 (Linear)",
        "RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float  (input_0 is float64 [1, 4])",
        RUN_MODEL,
    ),
    "wrong-target-dtype": (
        lambda: step()(X, Y.float()), BadArgument, LOSS_FAILS, "in the loss",
        "RuntimeError: expected target dtype to be Long or Byte, but got Float  (the output is float32 [1, 3]; "
        "target_0 is float32 [1])", RUN_LOSS,
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
        "test_mistakes.py:<line>: lambda: step(loss=lambda out, a, b, c: F.cross_entropy(out, a))(X, [0, 1, 2]), "
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
        "test_mistakes.py:<line>: return F.cross_entropy(out, y, label_smooth=0.1)  # type: ignore[call-arg]",
        "TypeError: cross_entropy() got an unexpected keyword argument 'label_smooth'  (the output is float32 [1, 3]; "
        "target_0 is int64 [1])", RUN_LOSS,
    ),
    "a-loss-class": (
        lambda: step(loss=nn.CrossEntropyLoss), BadArgument, "loss_fn is the class CrossEntropyLoss",
        "transform(model, loss_fn)",
        "it is called as loss_fn(output, *targets), and a class then makes an object, not a loss",
        "make one: transform(model, CrossEntropyLoss())",
    ),
    "a-loss-that-is-no-function": (
        lambda: step(loss="mse"), BadArgument, "loss_fn is a str", "transform(model, loss_fn)",
        "it is called as loss_fn(output, *targets)",
        "pass a function or a module, such as torch.nn.functional.cross_entropy",
    ),
    "a-model-class": (
        lambda: step(OwnLoss), BadArgument,  # type: ignore[arg-type]
        "model is the class OwnLoss, not an nn.Module", "transform(model)", "its parameters are found by name",
        "make one: OwnLoss(...)",
    ),
    "a-quantity-class": (
        lambda: step(quantities=psg_fx.Norms), BadArgument, "Norms (a class: call it) is not a quantity",
        "transform(quantities=...)", "each quantity fills a field of the output", QUANTITY_FIX,
    ),
    "a-quantity-by-name": (
        lambda: step(quantities="norms"), BadArgument, "'norms' is not a quantity",
        "transform(quantities=...)", "each quantity fills a field of the output", QUANTITY_FIX,
    ),
    "a-reduction-with-a-loss": (
        lambda: step(loss_reduction="sum"), BadArgument, "loss_reduction is for steps without a loss",
        "transform(model, loss_fn, loss_reduction=...)",
        "a loss that is given is taken apart into those of its samples, whatever its reduction",
        "leave loss_reduction out, or leave loss_fn out",
    ),
    "accumulation-with-a-loss": (
        lambda: step(accumulate=True), BadArgument, "accumulate is for steps without a loss",
        "transform(model, loss_fn, accumulate=...)", "with a loss nothing is left on the parameters",
        "leave accumulate out, or leave loss_fn out",
    ),
    "a-model-with-a-loss-of-its-own": (
        lambda: step(OwnLoss(), None)(X, Y), SamplesMixed,
        "aten.sum mixes samples, so per-sample gradients do not exist",
        "%sum_2;  test_mistakes.py:<line>: return {\"logits\": out} if labels is None else {\"loss\": "
        "F.cross_entropy(out, labels), \"logits\": out}",
        "the output 'output_0' of the model is reduced over the samples",
        "return one row for each sample; if it is the model's own loss: transform(model, loss_fn=lambda out: out.loss)",
    ),
    "a-loss-of-a-dict": (
        lambda: step(OwnLoss())(X, Y), BadArgument, LOSS_FAILS, "in the loss",
        "TypeError: cross_entropy_loss(): argument 'input' (position 1) must be Tensor, not dict  (the output is a "
        "dict of logits; target_0 is int64 [1])",
        RUN_LOSS + "; if the model computes its loss itself: loss_fn=lambda out: out.loss",
    ),
    "no-mask": (
        lambda: step(Masked())(torch.tensor([[1, 2], [3, 0], [1, 1]]), Y), CaptureFailed,
        "the model and loss could not be captured as one graph",
        "test_mistakes.py:<line>: if attention_mask is None and (ids == 0).any():",
        "the code branches on values of a tensor, so there is no one graph for all batches",
        "pass attention_mask, which the model makes itself where none is given; or replace the branch by torch.where, "
        "or decide it outside the model",
    ),
    "the-batch-as-keywords": (
        lambda: step(OwnLoss(), lambda out: out["loss"])(x=X, labels=Y), BadArgument,
        "step() got no inputs, but labels, x", "step(inputs, targets)",
        "keywords of the call are for quantities: weights=, directions=, out=", PASS_BATCH,
    ),
    "no-inputs": (
        lambda: step()(), BadArgument, "step() got no inputs", "step(inputs, targets)",
        "keywords of the call are for quantities: weights=, directions=, out=", PASS_BATCH,
    ),
    "three-positions": (
        lambda: step(nn.Bilinear(4, 4, 3))(X, X, Y), BadArgument, "step() got 3 positional arguments",
        "step(inputs, targets)", "the first are the inputs, the second the targets",
        "put several into a tuple or a dict: step((x1, x2), y), step(x, (y1, y2)), step({name: x, ...}, y)",
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
    "torchscript": (
        lambda: step(scripted()), NotYetSupported, "the model is TorchScript", "RecursiveScriptModule",
        "torch.export follows Python code, and TorchScript has none",
        "use the module that it was made of: torch.compile does what TorchScript was for",
    ),
    "torchscript-inside": (
        lambda: step(nn.Sequential(nn.Linear(4, 4), scripted())), NotYetSupported,
        "a part of the model is TorchScript", "1 (RecursiveScriptModule)",
        "torch.export follows Python code, and TorchScript has none",
        "use the module that it was made of: torch.compile does what TorchScript was for",
    ),
    "quantised-layers": (
        lambda: step(quantised()), NotYetSupported, "a part of the model is quantised", "0 (Linear)",
        "quantised layers have no gradients, and end those of what lies before them",
        "use the model before torch.ao.quantization.convert or quantize_dynamic",
    ),
    "a-model-without-values": (
        lambda: step(mlp().to("meta"))(X, Y), BadArgument, "0.weight is on the meta device", "transform(model)",
        "it has a shape and no values", "model.to_empty(device=...), then load or initialise the state",
    ),
    "an-input-without-values": (
        lambda: step()(X.to("meta"), Y), BadArgument, "input_0 is on the meta device", "input_0, of shape (3, 4)",
        "it has a shape and no values", "pass a tensor on a device that computes",
    ),
    "a-target-without-values": (
        lambda: step()(X, Y.to("meta")), BadArgument, "target_0 is on the meta device", "target_0, of shape (3,)",
        "it has a shape and no values", "pass a tensor on a device that computes",
    ),
    "sparse": (
        lambda: step()(X.to_sparse(), Y), BadArgument, "input_0 is of the layout sparse coo",
        "input_0, of shape (3, 4)", NO_BLOCK, "pass input_0.to_dense()",
    ),
    "sparse-rows": (
        lambda: step(loss=None)(csr()), BadArgument, "input_0 is of the layout sparse csr", "input_0, of shape (3, 4)",
        NO_BLOCK, "pass input_0.to_dense()",
    ),
    "nested": (
        lambda: step()(nested()), BadArgument, "input_0 is nested", "input_0, 2 samples",
        "its samples differ in size, and a graph is for one size",
        "pad it (torch.nested.to_padded_tensor), and mask the padding in the model and the loss",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_text(name: str) -> None:
    call, kind, what, where, why, fix = ROWS[name]
    with pytest.raises(PsgError) as caught:
        call()
    text = re.sub(r"(\.py):\d+:", r"\1:<line>:", str(caught.value))
    assert text == f"{what}\n  where  {where}\n  why    {why}\n  fix    {fix}"
    assert type(caught.value) is kind


def test_the_cause_is_the_error_of_the_users_code() -> None:
    with pytest.raises(BadArgument) as caught:
        step(loss=misspelt)(X, Y)
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_list_of_inputs_is_positional() -> None:
    torch.manual_seed(0)
    model, a, b = nn.Bilinear(4, 4, 3), torch.randn(3, 4), torch.randn(3, 4)
    made = step(model)
    torch.testing.assert_close(made([a, b], Y).losses, made((a, b), Y).losses)
    assert made.validate([a, b], Y).ok
    assert step(Several()).validate(([a, b],), Y).ok


def test_a_dict_batch_is_passed_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = OwnLoss().double(), torch.randn(3, 4, dtype=torch.float64)
    out = step(model, lambda out: out["loss"])({"x": x, "labels": Y})
    losses, grads = oracle.loop_grads(model, lambda out: out["loss"], {"x": x, "labels": Y})
    torch.testing.assert_close(out.losses, losses)
    torch.testing.assert_close(out.grads["layer.weight"], grads["layer.weight"])


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("loss", [F.cross_entropy, None])
def test_detect_anomaly_changes_nothing(loss: Any) -> None:
    torch.manual_seed(0)
    model, x = mlp().double(), torch.randn(3, 4, dtype=torch.float64)
    _, want = oracle.loop_grads(model, F.cross_entropy, x, Y)
    with torch.autograd.detect_anomaly():
        made = step(model, loss, **({} if loss else {"loss_reduction": "mean"}))
        out = made(x, Y) if loss else made(x)
        if loss is None:
            F.cross_entropy(out, Y).backward()
        assert torch.is_anomaly_enabled()
    for name, parameter in model.named_parameters():
        found = parameter.grad_sample if loss is None else out.grads[name]
        torch.testing.assert_close(found, want[name])


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


class Talks(WithLayer):
    """Logs, warns and prints."""

    def forward(self, x: Tensor) -> Tensor:
        print("printed")
        print("complained", file=sys.stderr)
        logging.getLogger("mine").warning("logged")
        return self.layer(x)


@pytest.mark.parametrize("width", [4, 6])
def test_torch_is_quiet_and_the_model_is_not(width: int, capfd: pytest.CaptureFixture[str], caplog: Any) -> None:
    """Also where the capture fails."""
    made = step(Talks(), progress=False)
    if width == 4:
        made(X, Y)
    else:
        with pytest.raises(BadArgument):
            made(torch.zeros(3, width), Y)
    printed = capfd.readouterr()
    assert set(printed.out.split()) == {"printed"}
    assert set(printed.err.split()) - {"logged"} == {"complained"}
    assert {record.name.partition(".")[0] for record in caplog.records} <= {"mine", "psg_fx"}
    assert "logged" in caplog.messages


def test_torch_is_quiet_in_the_capturing_thread_only(capfd: pytest.CaptureFixture[str], caplog: Any) -> None:
    torch_log, stream = logging.getLogger("torch._subclasses.fake_tensor"), sys.stderr
    with quiet():
        torch_log.error("hidden")
        other = threading.Thread(target=lambda: torch_log.error("of another thread"))
        other.start()
        other.join()
        print("of mine", file=sys.stderr)
    torch_log.error("afterwards")
    assert sys.stderr is stream
    assert caplog.messages == ["of another thread", "afterwards"]
    assert capfd.readouterr().err == "of mine\n"
