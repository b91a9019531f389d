"""The whole text of every refusal that a user can meet through the interface."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import BadArgument, CaptureFailed, ClippedSum, Norms, NotYetSupported, SamplesMixed, WeightedSum
from support.small import WithLayer, mlp, step
from support.texts import Row, check_refusal

X, Y = torch.zeros(3, 4), torch.tensor([0, 1, 2])


MADE = step()


def only_names(name: str) -> bool:
    return bool(name)


def changed_bound(to: float, **options: Any) -> Any:
    """A step whose bound is changed between two calls."""
    bound = torch.tensor(1.0)
    made = step(quantities=ClippedSum(bound, **options))
    made(X, Y)
    bound.fill_(to)
    return made(X, Y)


class Branch(WithLayer):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.layer(x)
        return -self.layer(x)


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


class CustomBackward(WithLayer):
    def forward(self, x: Tensor) -> Tensor:
        return Normalised.apply(self.layer(x))


def without_samples(out: Tensor) -> Tensor:
    return torch.zeros(())


BATCH_DIM_FIX = (
    "give one int for everything, or (inputs_dims, targets_dims), each an int, None, or ints and Nones arranged like "
    "the arguments"
)
BOUND_FIX = 'a float, a 0-d tensor, or with per="parameter" a mapping with every parameter name'
LOSS_WHY = "per-sample gradients are those of a scalar loss or of a [B] tensor of losses"
LOSS_FIX = "return a tensor from loss_fn; if the model computes its loss itself: loss_fn=lambda out: out.loss"
QUANTITY_FIX = "use psg_fx.Grads(), Norms(), ClippedSum(max_norm), Gram() or another of psg_fx.Quantity"

ROWS: dict[str, Row] = {
    "branch": (
        lambda: step(Branch())(X, Y), CaptureFailed, "the model and loss could not be captured as one graph",
        "test_errors.py:<line>: if x.sum() > 0:",
        "the code branches on values of a tensor, so there is no one graph for all batches",
        "replace the branch by torch.where, or decide it outside the model",
    ),
    "numbers-of-a-tensor": (
        lambda: step(loss=lambda out, y: math.exp(out.sum().item()) * out.sum())(X, Y), CaptureFailed,
        "the model and loss could not be captured as one graph",
        "test_errors.py:<line>: lambda: step(loss=lambda out, y: math.exp(out.sum().item()) * out.sum())(X, Y), "
        "CaptureFailed,",
        "what is computed goes by the values of a tensor, so there is no one graph for all batches",
        "compute with tensors in place of their numbers (torch.exp(-0.1 * self.step)), use one mask for all that it "
        "picks (m = t > 0; x[m], t[m]), or compute it outside the model",
    ),
    "step-in-a-loss": (
        lambda: step(loss=lambda out, y: out.sum() * MADE(X, Y).losses.sum())(X, Y), NotYetSupported,
        "the model or the loss calls a step of psg_fx",
        "test_errors.py:<line>: lambda: step(loss=lambda out, y: out.sum() * MADE(X, Y).losses.sum())(X, Y), "
        "NotYetSupported,",
        "a graph is made of torch's ops, and a step runs a graph of its own",
        "call it before, and pass what it returns as inputs or targets; for gradients inside of a model: "
        "torch.autograd.grad(..., create_graph=True)",
    ),
    "misspelt-argument": (
        lambda: step(quantities=WeightedSum())(X, Y, weight=torch.ones(3)), BadArgument, "step() got weight",
        "step(inputs, targets, ...)", "did you mean weights?", "step(inputs, targets, weights=...)",
    ),
    "validate-without-weights": (
        lambda: step(quantities=WeightedSum()).validate(X, Y), BadArgument, "WeightedSum needs weights",
        "step(inputs, targets, weights=...)", "it is Σ_b w_b g_b", "pass a [B] tensor: step(x, y, weights=w)",
    ),
    "validate-without-samples": (
        lambda: step().validate(X[:0], Y[:0]), BadArgument, "there are no samples", "step.validate(inputs, targets)",
        "answers are compared with those of single samples", "pass a batch that is not empty",
    ),
    "dynamic-is-a-text": (
        lambda: psg_fx.transform(nn.Linear(4, 2), dynamic="yes"), BadArgument,
        "dynamic='yes' is neither True nor False", "transform(dynamic=...)", "it is a switch",
        "dynamic=True or dynamic=False",
    ),
    "options-of-no-compiler": (
        lambda: psg_fx.transform(nn.Linear(4, 2), backend="eager", options={"max_autotune": True}), BadArgument,
        "options has 'max_autotune', which has no effect with backend='eager'", "transform(options={...})",
        "it is the compiler's, and none compiles", 'use backend="inductor", or leave it out',
    ),
    "a-function-of-names-alone": (
        lambda: step(params=only_names)(X, Y), BadArgument, "params= cannot be asked of each parameter",
        "transform(params=...)", "only_names() takes 1 positional argument but 2 were given",
        "give a function of a name and a parameter: params=lambda name, parameter: ...",
    ),
    "custom-backward-that-mixes": (
        lambda: step(CustomBackward())(X, Y), SamplesMixed,
        "in a custom autograd.Function: aten.div mixes samples, so per-sample gradients do not exist",
        "%normalised;  test_errors.py:<line>: return Normalised.apply(self.layer(x))",
        "%cotangent_0 carries samples, %linalg_vector_norm is reduced over them by %linalg_vector_norm "
        "(aten.linalg_vector_norm)",
        "a statistic over the batch makes each sample's loss depend on the others; take it within a sample",
    ),
    "batch-dim-too-large": (
        lambda: step(batch_dim=5)(X, Y), BadArgument, "input_0 has no dim 5 for the samples", "input_0 of shape (3, 4)",
        "batch_dim says that its samples lie in dim 5",
        "give its sample dim in batch_dim=(inputs_dims, targets_dims), None if all samples share it",
    ),
    "batch-dim-no-pair": (
        lambda: step(batch_dim="x")(X, Y), BadArgument, "batch_dim='x' does not fit the arguments",
        "transform(batch_dim=...)", "it is neither an int nor a pair (inputs_dims, targets_dims)", BATCH_DIM_FIX,
    ),
    "batch-dim-too-many": (
        lambda: step(batch_dim=((0, 0), 0))(X, Y), BadArgument, "batch_dim=((0, 0), 0) does not fit the arguments",
        "transform(batch_dim=...)", "it has 2 entries for 1 positional argument", BATCH_DIM_FIX,
    ),
    "batch-dim-missing-name": (
        lambda: step(batch_dim=({"x": 0}, 0))({"input": X}, Y), BadArgument,
        "batch_dim=({'x': 0}, 0) does not fit the arguments", "transform(batch_dim=...)", "it has no entry for 'input'",
        BATCH_DIM_FIX,
    ),
    "no-samples-dim": (
        lambda: step(batch_dim=None)(X, Y), BadArgument, "no input carries the samples", "transform(batch_dim=...)",
        "every tensor input has batch_dim None",
        "give the sample dim of at least one input in batch_dim",
    ),
    "sizes-disagree": (
        lambda: step()(X, Y[:2]), BadArgument, "the inputs disagree on the number of samples",
        "input_0: 3, target_0: 2",
        "the size in its sample dim is the batch size, and it must be the same for all",
        "pass batches of one size, or say where the samples lie: batch_dim=(inputs_dims, targets_dims), None for what "
        "all samples share",
    ),
    "unknown-glob": (
        lambda: step(params="fc*")(X, Y), BadArgument, "params='fc*' matches no parameter", "transform(params=...)",
        "the model has 0.weight, 0.bias, 2.weight, 2.bias",
        "use names of model.named_parameters(), with * and ? as in file names",
    ),
    "nothing-to-differentiate": (
        lambda: step(mlp().requires_grad_(False))(X, Y), BadArgument, "no parameter is asked for",
        "transform(params=...)", "no parameter of the model requires gradients",
        "set requires_grad on some parameters, or widen params=; where none is wanted, call the model itself",
    ),
    "negative-bound": (
        lambda: ClippedSum(-1.0), BadArgument, "max_norm=-1.0 is not a bound on norms", "ClippedSum(max_norm=...)",
        "a norm's bound is a number that is not negative", BOUND_FIX,
    ),
    "not-a-number": (
        lambda: ClippedSum(float("nan")), BadArgument, "max_norm=nan is not a bound on norms",
        "ClippedSum(max_norm=...)", "a norm's bound is a number that is not negative", BOUND_FIX,
    ),
    "negative-bound-in-a-tensor": (
        lambda: ClippedSum(torch.tensor(-1.0)), BadArgument, "max_norm=-1.0 is not a bound on norms",
        "ClippedSum(max_norm=...)", "a norm's bound is a number that is not negative", BOUND_FIX,
    ),
    "bound-made-negative": (
        lambda: changed_bound(-0.5), BadArgument, "max_norm=-0.5 is not a bound on norms",
        "ClippedSum(max_norm=...)", "a norm's bound is a number that is not negative", BOUND_FIX,
    ),
    "bound-made-infinite": (
        lambda: changed_bound(float("inf"), style="automatic"), BadArgument, "max_norm=inf is not a bound on norms",
        "ClippedSum(max_norm=...)",
        'style="automatic" divides it by the norm, so all factors would be infinite', BOUND_FIX,
    ),
    "parts-of-a-fraction": (
        lambda: psg_fx.microbatch(step(), 2.5), BadArgument,  # type: ignore[arg-type]
        "size=2.5 is not a number of samples", "microbatch(step, size)", "each part holds so many samples",
        "a positive int",
    ),
    "weights-for-other-samples": (
        lambda: psg_fx.microbatch(step(quantities=WeightedSum()), 1)(X, Y, weights=torch.ones(9)), BadArgument,
        "weights have shape (9,)", "step(inputs, targets, weights=...)",
        f"there is one for each of the {len(X)} samples", "pass a [B] tensor",
    ),
    "bound-of-many": (
        lambda: ClippedSum(torch.ones(2)), BadArgument, "max_norm=tensor([1., 1.]) is not a bound on norms",
        "ClippedSum(max_norm=...)", "a tensor must be a 0-d floating-point one", BOUND_FIX,
    ),
    "bounds-by-name-of-the-model": (
        lambda: step(quantities=ClippedSum({"0.weight": 1.0}))(X, Y), BadArgument,
        "max_norm={'0.weight': 1.0} is not a bound on norms", "ClippedSum(max_norm=...)",
        'a mapping by parameter needs per="parameter"', BOUND_FIX,
    ),
    "bounds-by-wrong-names": (
        lambda: step(quantities=ClippedSum({"0.weight": 1.0}, per="parameter"))(X, Y), BadArgument,
        "max_norm={'0.weight': 1.0} is not a bound on norms", "ClippedSum(max_norm=...)",
        "its names are not those of the parameters: 0.bias, 2.bias, 2.weight", BOUND_FIX,
    ),
    "unknown-per": (
        lambda: Norms(per="layer"), BadArgument, "per='layer' is unknown", "Norms(per=...)",
        "norms are taken over the whole model or per parameter", 'per="model" or per="parameter"',
    ),
    "unknown-style": (
        lambda: ClippedSum(1.0, style="flat"), BadArgument, "style='flat' is unknown", "ClippedSum(style=...)",
        "it says how factors follow from norms", 'style="abadi" or style="automatic"',
    ),
    "quantity-class": (
        lambda: step(quantities=[Norms]), BadArgument, "Norms (a class: call it) is not a quantity",
        "transform(quantities=...)", "each quantity fills a field of the output", QUANTITY_FIX,
    ),
    "quantity-twice": (
        lambda: step(quantities=[Norms(), Norms(squared=True)]), BadArgument, "two quantities fill out.norms",
        "transform(quantities=...)", "each quantity fills a field of its own",
        "ask for each kind once; make a second step for others",
    ),
    "no-quantity": (
        lambda: step(quantities=[]), BadArgument, "no quantity is asked for", "transform(quantities=...)",
        "each quantity fills a field of its own", "ask for one, e.g. Grads()",
    ),
    "quantity-without-a-loss": (
        lambda: step(loss=None, quantities=Norms()), BadArgument, "quantities need a loss", "transform(quantities=...)",
        "without loss_fn the step leaves grad_sample on the parameters, and nothing else",
        "pass loss_fn, or leave quantities out",
    ),
    "not-a-module": (
        lambda: psg_fx.transform(lambda x: x, F.cross_entropy), BadArgument,  # type: ignore[arg-type]
        "model is a function, not an nn.Module", "transform(model)", "its parameters are found by name",
        "wrap the function in an nn.Module",
    ),
    "loss-is-a-number": (
        lambda: step(loss=lambda out: 1.0)(X), BadArgument,
        "the loss is a number of Python's, not a tensor", "loss_fn(output, *targets)", "a number has no gradient",
        "return the tensor that it was taken from, without .item()",
    ),
    "loss-is-a-tuple": (
        lambda: step(loss=lambda out: (out.sum(),))(X), BadArgument, "the loss is a tuple, not a tensor",
        "loss_fn(output, *targets)", LOSS_WHY, LOSS_FIX,
    ),
    "loss-is-a-count": (
        lambda: step(loss=lambda out: (out > 0).sum())(X), BadArgument, "the loss is of int64",
        "loss_fn(output, *targets)", "only a real number that follows the parameters has a gradient",
        "return what is differentiated, and count hits outside of the step",
    ),
    "loss-is-complex": (
        lambda: step(loss=lambda out: (out * 1j).sum())(X), BadArgument, "the loss is of complex64",
        "loss_fn(output, *targets)", "only a real number that follows the parameters has a gradient",
        "return its real part or its absolute value",
    ),
    "loss-has-two-dims": (
        lambda: step(loss=lambda out: out)(X), BadArgument, "the loss is neither a scalar nor [B]",
        "%linear_1;  in 2 (Linear)", "its shape is [B, 3]",
        "reduce it to one number for each sample ([B]) or to one in all (mean or sum)",
    ),
    "loss-without-samples": (
        lambda: step(loss=without_samples)(X), BadArgument, "the loss does not depend on the samples",
        "%zeros;  test_errors.py:<line>: return torch.zeros(())", "no input or target with samples leads to it",
        "compute the loss from the output of the model; check batch_dim",
    ),
    "no-weights": (
        lambda: step(quantities=WeightedSum())(X, Y), BadArgument, "WeightedSum needs weights",
        "step(inputs, targets, weights=...)", "it is Σ_b w_b g_b", "pass a [B] tensor: step(x, y, weights=w)",
    ),
    "too-few-weights": (
        lambda: step(quantities=WeightedSum())(X, Y, weights=torch.ones(2)), BadArgument, "weights have shape (2,)",
        "step(inputs, targets, weights=...)", "there is one for each of the 3 samples", "pass a [B] tensor",
    ),
    "unread-argument": (
        lambda: step()(X, Y, weight=torch.ones(3)), BadArgument, "step() got weight", "step(inputs, targets, ...)",
        "no quantity of this step reads it",
        "WeightedSum() and ClippedSum(weighted=True) read weights=, Dots() reads directions=; what the model reads "
        "goes into a dict of inputs: step({name: value, ...}, targets)",
    ),
    "not-captured-yet": (
        lambda: step().print_graph(), BadArgument, "nothing has been captured yet", "step.print_graph()",
        "a step is captured at its first call", "call the step once on a batch",
    ),
    "unknown-reduction": (
        lambda: step(loss=None, loss_reduction="avg"), BadArgument, "loss_reduction='avg' is unknown",
        "transform(loss_reduction=...)", "known are sum, mean", "use one of those",
    ),
    "unknown-option": (
        lambda: psg_fx.transform(nn.Linear(4, 2), options={"nonsense": True}), BadArgument,
        "options has 'nonsense', which is unknown", "transform(options={...})",
        "inductor has no option of that name", "torch._inductor.list_options() has the names",
    ),
    "no-directions": (
        lambda: step(nn.Linear(4, 2), quantities=psg_fx.Dots())(
            X, torch.tensor([0, 1, 1]), directions={"weight": torch.ones(0, 2, 4), "bias": torch.ones(0, 2)}
        ), BadArgument,
        "Dots needs a direction for every parameter", "step(inputs, targets, directions=...)",
        "there are none: their leading K is 0",
        "pass a mapping from every parameter's name to a tensor of its shape, or of [K, *shape]",
    ),
    "batch-norm": (
        lambda: step(nn.Sequential(nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2)), lambda out: out.square().sum())(X[:, None]),
        SamplesMixed, "aten._native_batch_norm_legit_functional mixes samples, so per-sample gradients do not exist",
        "%_native_batch_norm_legit_functional, sample dim 0;  in 1 (BatchNorm1d)",
        "its mean runs over dims 0, 2; dim 0 holds the samples of %conv1d",
        "use GroupNorm, or model.eval() so that running statistics are used",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_text(name: str) -> None:
    check_refusal(ROWS[name])
    assert issubclass(ROWS[name][1], ValueError)


def test_unknown_backend_lists_what_there_is() -> None:
    text = r"backend='indctor' is unknown\n  where  transform\(backend=...\)\n  why    known are inductor, eager"
    with pytest.raises(BadArgument, match=text):
        step(backend="indctor")


def test_unknown_stage_lists_the_stages() -> None:
    made = step()
    made(X, Y)
    for stage, called in (("final", "'final'"), (["tidied"], r"\['tidied'\]")):
        text = rf"there is no stage {called}\n.*\n  why    stages are captured, batched, unreduced"
        with pytest.raises(BadArgument, match=text):
            made.print_graph(stage)


def test_missing_field_says_how_to_ask_for_it() -> None:
    with pytest.raises(AttributeError, match=r"has no 'norms', only losses, grads; ask for it with quantities=\[...\]"):
        _ = step()(X, Y).norms
