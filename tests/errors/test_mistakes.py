"""Mistakes in what is given, and the whole text that each of them gets."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import psg_fx
from psg_fx import BadArgument, CaptureFailed, NotYetSupported, SamplesMixed
from support import oracle
from support.small import OwnLoss, Several, WithLayer, mlp, step
from support.texts import Row, check_refusal

X, Y = torch.zeros(3, 4), torch.tensor([0, 1, 2])


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        return torch.jit.script(nn.Linear(4, 3))


class Halves(torch.Tensor):
    """A wrapper around another tensor, as weights of few bits are."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Halves:
        made: Halves = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=torch.float32)
        made.held = held
        return made

    def __tensor_flatten__(self) -> Any:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Halves:
        return Halves(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*(a.held.float() if isinstance(a, Halves) else a for a in args), **(kwargs or {}))
        return Halves(found) if op is torch.ops.aten.detach.default else found


def with_a_wrapper() -> nn.Module:
    model = mlp()
    model[0].weight = nn.Parameter(Halves(torch.randn(*model[0].weight.shape).half()), requires_grad=False)
    return model


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


QUANTITY_FIX = "use psg_fx.Grads(), Norms(), ClippedSum(max_norm), Gram() or another of psg_fx.Quantity"
PASS_BATCH = (
    "pass the dict itself, whose names are then those of the model's arguments: step(batch), or step(batch, targets)"
)
PUT_IN = "its graphs and its modules are those of what it was made with"
NO_BLOCK = "a graph reads strided tensors"

ROWS: dict[str, Row] = {
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
    "a-loss-put-in-the-place-of-another": (
        lambda: setattr(step(), "loss_fn", F.mse_loss), BadArgument, "the loss_fn of a step is replaced",
        "step.loss_fn = ...", PUT_IN,
        "make another step, psg_fx.transform(model, loss_fn, ...); or change step.loss_fn itself",
    ),
    "a-model-put-in-the-place-of-another": (
        lambda: setattr(step(), "model", nn.Linear(4, 3)), BadArgument, "the model of a step is replaced",
        "step.model = ...", PUT_IN,
        "make another step, psg_fx.transform(model, loss_fn, ...); or change step.model itself",
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
    "a-mode-of-no-compiler": (
        lambda: psg_fx.transform(nn.Linear(4, 3), backend="eager", mode="max-autotune"), BadArgument,
        "mode='max-autotune' has no effect with backend='eager'", "transform(mode=...)",
        "it is the compiler's, and none compiles", 'use backend="inductor", or leave it out',
    ),
    "an-unknown-mode": (
        lambda: step(mode="none"), BadArgument, "mode='none' is unknown", "transform(mode=...)",
        "known are default, lite, reduce-overhead, max-autotune-no-cudagraphs, max-autotune", "use one of those",
    ),
    "a-switch-that-is-text": (
        lambda: psg_fx.transform(nn.Linear(4, 3), accumulate="no"), BadArgument,  # type: ignore[arg-type]
        "accumulate='no' is neither True nor False", "transform(accumulate=...)", "it is a switch",
        "accumulate=True or accumulate=False",
    ),
    "kernels-that-are-text": (
        lambda: step(options={"psg_fx.fused_kernels": "off"}), BadArgument,
        "psg_fx.fused_kernels='off' is neither True nor False", "transform(options={'psg_fx.fused_kernels': ...})",
        "it is a switch", "options={'psg_fx.fused_kernels': True} or False, or leave it out",
    ),
    "an-empty-reduction": (
        lambda: step(None, None, loss_reduction=""), BadArgument, "loss_reduction='' is unknown",
        "transform(loss_reduction=...)", "known are sum, mean", "use one of those",
    ),
    "nothing-to-explain-yet": (
        lambda: step().explain(), BadArgument, "nothing has been captured yet", "step.explain()",
        "a step is captured at its first call", "call the step once on a batch",
    ),
    "results-to-compare-and-keep": (
        lambda: step().validate(X, Y, out=None), BadArgument, "validate() got out",
        "step.validate(inputs, targets, out=...)", "it compares results, and keeps none", "leave it out",
    ),
    "a-report-in-no-folder": (
        lambda: step().report("no/folder/a.html"), BadArgument, "there is no folder no/folder", "step.report(path)",
        "a file is written into it", "make it first: os.makedirs; or name another file",
    ),
    "a-report-in-no-file": (
        lambda: step().report(""), BadArgument, "'' is no file", "step.report(path)", "one is written",
        'name one: "report.html"',
    ),
    "a-step-of-no-file": (
        lambda: psg_fx.load(None), BadArgument, "None is no file of a step", "psg_fx.load(path)",
        "TypeError: expected str, bytes or os.PathLike object, not NoneType", "pass what step.export has written",
    ),
    "rates-of-no-device": (
        lambda: psg_fx.calibrate("meta"), BadArgument, "the device 'meta' cannot be measured",
        "psg_fx.calibrate(device)", "rates of meta are not measured", '"cpu", or "cuda" where there is one',
    ),
    "a-model-with-a-loss-of-its-own": (
        lambda: step(OwnLoss(), None)(X, Y), SamplesMixed,
        "aten.sum mixes samples, so per-sample gradients do not exist",
        "%sum_2;  small.py:<line>: return {\"logits\": out} if labels is None else {\"loss\": "
        "F.cross_entropy(out, labels), \"logits\": out}",
        "the output 'output_0' of the model is reduced over the samples",
        "return one row for each sample; if it is the model's own loss: transform(model, loss_fn=lambda out: out.loss)",
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
    "a-weight-of-other-tensors": (
        lambda: step(with_a_wrapper())(X, Y), NotYetSupported, "0.weight is a Halves, a wrapper around other tensors",
        "0.weight", "a graph has torch's ops on plain tensors, and a wrapper has no memory of its own",
        "keep the tensors that it wraps as parameters or buffers, and compute the weight of them in the forward pass",
    ),
    "a-lazy-layer": (
        lambda: step(nn.Sequential(nn.LazyLinear(3)))(X, Y), BadArgument, "0.weight is not initialised",
        "transform(model)", "a lazy layer has its shape from the first inputs that it sees",
        "call the model once on a batch before the step",
    ),
    "a-model-without-values": (
        lambda: step(mlp().to("meta"))(X, Y), BadArgument, "0.weight is on the meta device", "transform(model)",
        "it has a shape and no values",
        "take off what offloads the model; or model.to_empty(device=...), and load its state",
    ),
    "a-model-of-inference-mode": (
        lambda: step(under_inference_mode())(X, Y), BadArgument, "0.weight was made under torch.inference_mode()",
        "transform(model)", "torch lets no tensor of that mode have a gradient",
        "make the model outside of the mode (a copy by copy.deepcopy has tensors of its own)",
    ),
    "an-input-without-values": (
        lambda: step()(X.to("meta"), Y), BadArgument, "input_0 is on the meta device", "input_0, of shape (3, 4)",
        "it has a shape and no values", "pass a tensor on a device that computes",
    ),
    "a-target-without-values": (
        lambda: step()(X, Y.to("meta")), BadArgument, "target_0 is on the meta device", "target_0, of shape (3,)",
        "it has a shape and no values", "pass a tensor on a device that computes",
    ),
    "a-fake-input": (
        lambda: step()(FakeTensorMode().from_tensor(X), Y), BadArgument, "input_0 is a fake tensor",
        "input_0, of shape (3, 4)", "it has a shape and no values", "make it outside of FakeTensorMode",
    ),
    "a-fake-model": (
        lambda: step(fake_mlp())(X, Y), BadArgument, "0.weight is a fake tensor", "transform(model)",
        "it has a shape and no values", "make the model outside of FakeTensorMode",
    ),
    "sparse": (
        lambda: step()(X.to_sparse(), Y), BadArgument, "input_0 is of the layout sparse coo",
        "input_0, of shape (3, 4)", NO_BLOCK, "pass input_0.to_dense()",
    ),
    "sparse-rows": (
        lambda: step(loss=None)(csr()), BadArgument, "input_0 is of the layout sparse csr", "input_0, of shape (3, 4)",
        NO_BLOCK, "pass input_0.to_dense()",
    ),
    "other-tensors-for-one-call": (
        lambda: torch.func.functional_call(step(), {"2.weight": torch.zeros(3, 5)}, (X, Y)), NotYetSupported,
        "in the place of the parameter 2.weight is a plain tensor", "2.weight",
        "a step reads the model's own parameters, and torch.func.functional_call puts others there",
        "write the values into the parameters before the call, as model.load_state_dict(...) does",
    ),
    "options-in-a-list": (
        lambda: step(options=[1]), BadArgument, "options is [1]", "transform(options={...})",
        "it has the values of options by name", "a dict: options={'psg_fx.fused_kernels': True}",
    ),
    "options-by-number": (
        lambda: step(options={1: 2}), BadArgument, "options is {1: 2}", "transform(options={...})",
        "it has the values of options by name", "a dict: options={'psg_fx.fused_kernels': True}",
    ),
    "gradients-in-a-list": (
        lambda: psg_fx.distributed.set_grad(mlp(), [1]), BadArgument,  # type: ignore[arg-type]
        "values is a list", "psg_fx.distributed.set_grad(model, values)", "parameters are found by name",
        "pass a field of a step's output, such as out.clipped_sum",
    ),
    "a-number-for-a-gradient": (
        lambda: psg_fx.distributed.set_grad(mlp(), {"0.bias": 1}), BadArgument,  # type: ignore[dict-item]
        "the value of 0.bias does not fit the model", "psg_fx.distributed.set_grad(model, values)",
        "it is of type int, and the parameter is plain [5] on cpu",
        "pass sums of a step of this model, and the model itself",
    ),
    "sums-of-no-processes": (
        lambda: psg_fx.distributed.reduce(step()(X, Y)), BadArgument, "there is no group of processes",
        "psg_fx.distributed.reduce(out)",
        "processes find one another by torch.distributed.init_process_group, which was not called",
        "call it first; in a single process leave reduce out: its output is that of all samples",
    ),
    "nested": (
        lambda: step()(nested()), BadArgument, "input_0 is nested", "input_0, 2 samples",
        "its samples differ in size, and a graph is for one size",
        "pad it (torch.nested.to_padded_tensor), and mask the padding in the model and the loss; or pass its rows and "
        "where samples begin, x.values() and x.offsets() of the layout torch.jagged, with "
        "batch_dim=((psg_fx.Rows.from_offsets(1), None), 0)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_text(name: str) -> None:
    check_refusal(ROWS[name])


def test_samples_in_an_object_that_pytrees_do_not_know() -> None:
    class Batch:
        __slots__ = ("x",)

        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Reading(WithLayer):
        def forward(self, batch: Batch) -> Tensor:
            out: Tensor = self.layer(batch.x)
            return out

    with pytest.raises(
        CaptureFailed, match=r"fix    pass the tensors of the Batch themselves, or .*pytree_node\(Batch"
    ):
        step(Reading())(Batch(X), Y)


def test_targets_that_are_said_to_be_shared() -> None:
    with pytest.raises(CaptureFailed, match=r"fix    say in batch_dim that target_0 has a row for each sample; or "):
        step(batch_dim=(0, None))(X, Y)


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


def fake_mlp() -> nn.Module:
    with FakeTensorMode():
        return mlp()


def under_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return mlp()
