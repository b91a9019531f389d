"""Every way to pass inputs, targets, sample dims, losses and parameter filters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import psg_fx
from psg_fx.errors import BadArgument
from psg_fx.step.binding import in_one_block
from support import oracle

DTYPE = torch.float64
B = 4


def check(
    model: nn.Module, loss: Callable[..., Tensor], inputs: Any, targets: Any = None, batch_dim: Any = 0, **options: Any
) -> Any:
    """One call against the oracle; returns the step."""
    step = psg_fx.transform(model, loss, backend="eager", batch_dim=batch_dim, **options)
    compare(step, model, loss, inputs, targets, batch_dim)
    return step


def compare(step: Any, model: nn.Module, loss: Any, inputs: Any, targets: Any = None, batch_dim: Any = 0) -> None:
    out = step(inputs) if targets is None else step(inputs, targets)
    names = list(out.grads)
    losses, grads = oracle.loop_grads(model, loss, inputs, targets, batch_dim=batch_dim, params=names)
    assert oracle.relative_error(out.losses, losses) < 1e-10
    assert oracle.worst_error(out.grads, grads) < 1e-10


def mlp(inputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, 3)).to(DTYPE)


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(1))


def labels(count: int = B) -> Tensor:
    return torch.arange(count) % 3


class TwoInputs(nn.Module):
    """Adds a projection of `second`; `scale` is a number and `deep` any structure."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 3, dtype=DTYPE), nn.Linear(2, 3, dtype=DTYPE)

    def forward(self, first: Tensor, second: Tensor, scale: float = 1.0, deep: Any = None) -> Tensor:
        out = self.one(first) + scale * self.two(second)
        return out if deep is None else out * deep["gate"][0]


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...]


torch.utils._pytree.register_dataclass(Output)


class Structured(nn.Module):
    """Returns a dataclass or a dict; computes its own loss where labels are given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.kind = nn.Linear(4, 5, dtype=DTYPE), nn.Linear(5, 3, dtype=DTYPE), kind

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        hidden = torch.tanh(self.one(features))
        logits = self.two(hidden)
        if labels is not None:
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}
        return Output(logits, (hidden,)) if self.kind == "dataclass" else {"logits": logits, "hidden": [hidden]}


# --- how inputs and targets are given -------------------------------------------------------------------------------


def test_tensor_and_tensor() -> None:
    check(mlp(), F.cross_entropy, x(B, 4), labels())


def test_tuple_inputs() -> None:
    check(TwoInputs(), F.cross_entropy, (x(B, 4), x(B, 2)), labels())


def test_dict_inputs() -> None:
    check(TwoInputs(), F.cross_entropy, {"first": x(B, 4), "second": x(B, 2)}, labels())


def test_numbers_and_nested_inputs() -> None:
    deep = {"gate": [x(B, 1)], "name": "gate"}
    check(TwoInputs(), F.cross_entropy, {"first": x(B, 4), "second": x(B, 2), "scale": 0.5, "deep": deep}, labels())


def test_a_changed_number_is_seen() -> None:
    step = check(TwoInputs(), F.cross_entropy, (x(B, 4), x(B, 2), 0.5), labels())
    compare(step, step.model, F.cross_entropy, (x(B, 4), x(B, 2), -2.0), labels())


def test_tuple_targets() -> None:
    def loss(out: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return (weight * F.cross_entropy(out, target, reduction="none")).mean()

    check(mlp(), loss, x(B, 4), (labels(), x(B)))


def test_dict_targets() -> None:
    def loss(out: Tensor, *, target: Tensor, weight: Tensor) -> Tensor:
        return weight * F.cross_entropy(out, target, reduction="none")

    check(mlp(), loss, x(B, 4), {"target": labels(), "weight": x(B)})


def test_no_targets() -> None:
    check(mlp(), lambda out: out.square().sum(), x(B, 4))


def test_model_computes_its_loss() -> None:
    check(Structured("dict"), lambda out: out["loss"], {"features": x(B, 4), "labels": labels()})


@pytest.mark.parametrize("kind", ["dataclass", "dict"])
def test_structured_outputs(kind: str) -> None:
    def loss(out: Any, target: Tensor) -> Tensor:
        logits = out.logits if kind == "dataclass" else out["logits"]
        hidden = out.hidden if kind == "dataclass" else out["hidden"]
        return F.cross_entropy(logits, target) + hidden[0].square().mean()

    check(Structured(kind), loss, x(B, 4), labels())


# --- where the samples lie ------------------------------------------------------------------------------------------


def test_batch_dim_int() -> None:
    model = nn.Linear(4, 3, dtype=DTYPE)
    check(model, lambda out: out.sin().sum((0, 2)), x(5, B, 4), batch_dim=1)


def test_negative_batch_dim() -> None:
    model = nn.Linear(4, 3, dtype=DTYPE)
    check(model, lambda out: out.sin().sum((0, 2)), x(5, B, 4), batch_dim=-2)


def test_batch_dim_pair() -> None:
    model = nn.Linear(4, 3, dtype=DTYPE)
    check(model, lambda out, y: F.cross_entropy(out.mean(0), y), x(5, B, 4), labels(), batch_dim=(1, 0))


def test_shared_input() -> None:
    check(TwoInputs(), F.cross_entropy, (x(B, 4), x(1, 2)), labels(), batch_dim=((0, None), 0))


def test_shared_input_by_name() -> None:
    dims = ({"first": 0, "second": None, "scale": None}, 0)
    check(TwoInputs(), F.cross_entropy, {"first": x(B, 4), "second": x(1, 2), "scale": 2.0}, labels(), batch_dim=dims)


def test_shared_target() -> None:
    def loss(out: Tensor, target: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(out, target, weight=classes)

    check(mlp(), loss, x(B, 4), (labels(), torch.tensor([0.2, 1.0, 3.0], dtype=DTYPE)), batch_dim=(0, (0, None)))


# --- what the loss returns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_reductions(reduction: str) -> None:
    check(mlp(), lambda out, y: F.cross_entropy(out, y, reduction=reduction), x(B, 4), labels())


def test_token_losses_are_means_over_a_samples_own_tokens() -> None:
    targets = torch.tensor([[0, 1, -100, 2], [1, -100, -100, -100], [2, 2, 1, 0], [0, -100, 1, 1]])

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100, label_smoothing=0.1)

    check(nn.Linear(4, 3, dtype=DTYPE), loss, x(B, 4, 4), targets)


# --- which parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (None, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("0.*", ["0.weight", "0.bias"]),
        (["*.bias", "2.weight"], ["0.bias", "2.weight", "2.bias"]),
        (lambda name, p: p.ndim == 2, ["0.weight", "2.weight"]),
    ],
    ids=["all", "glob", "globs", "predicate"],
)
def test_params(params: Any, names: list[str]) -> None:
    step = check(mlp(), F.cross_entropy, x(B, 4), labels(), params=params)
    assert list(step(x(B, 4), labels()).grads) == names


def test_tied_parameters_come_under_their_first_name() -> None:
    model = mlp()
    model.append(nn.Linear(3, 5, dtype=DTYPE))
    model[3].weight = nn.Parameter(model[2].weight.detach().t().contiguous())
    model[2].bias = nn.Parameter(torch.zeros(3, dtype=DTYPE))
    model.append(model[2])
    step = check(model, F.cross_entropy, x(B, 4), labels())
    assert [n for n in step(x(B, 4), labels()).grads if n.startswith("4")] == []


# --- batch sizes and layouts ----------------------------------------------------------------------------------------


def test_other_batch_sizes_need_no_new_capture() -> None:
    model = mlp()
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for size in (1, 3, 8, 2, 1):
        compare(step, model, F.cross_entropy, x(size, 4), labels(size))
    assert len(step.captures) == 1


def test_static_batch_sizes() -> None:
    model = mlp()
    step = psg_fx.transform(model, F.cross_entropy, backend="eager", dynamic=False)
    for size in (3, 2, 3):
        compare(step, model, F.cross_entropy, x(size, 4), labels(size))
    assert len(step.captures) == 2


def test_no_samples() -> None:
    model = mlp()
    asked = [psg_fx.Grads(), psg_fx.Norms(), psg_fx.ClippedSum(1.0)]
    out = psg_fx.transform(model, F.cross_entropy, quantities=asked, backend="eager")(x(0, 4), labels(0))
    assert out.losses.shape == out.norms.shape == out.clip_factors.shape == (0,)
    assert out.grads["0.weight"].shape == (0, 5, 4)
    sums = zip(out.clipped_sum.values(), model.parameters(), strict=True)
    assert all(not g.any() and g.shape == p.shape for g, p in sums)


def test_channels_last() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Conv2d(3, 2, 3, stride=2)).to(DTYPE)

    def loss(out: Tensor) -> Tensor:
        return (out * torch.arange(out.shape[-1], dtype=DTYPE)).sin().sum()

    images = x(B, 2, 6, 6)
    step = check(model, loss, images.to(memory_format=torch.channels_last))
    compare(step, model, loss, images)
    check(model.to(memory_format=torch.channels_last), loss, images.to(memory_format=torch.channels_last))


def test_strides_of_dims_of_one_element_are_those_of_a_new_tensor() -> None:
    """What is compiled for one channel is compiled for its strides: a convolution takes them for a memory format."""
    images = torch.randn(4, 1, 6, 6)
    last = images.to(memory_format=torch.channels_last)
    found = in_one_block(last)
    assert last.stride() != images.stride()
    assert found.stride() == images.stride()
    assert found.data_ptr() == last.data_ptr()


def test_inputs_with_gaps_in_memory() -> None:
    model = nn.Linear(4, 3, dtype=DTYPE)

    def loss(out: Tensor) -> Tensor:
        return out.sin().sum((0, 2))

    whole = x(5, 2 * B, 4)
    step = check(model, loss, whole[:, :B].contiguous(), batch_dim=1)
    compare(step, model, loss, whole[:, ::2], batch_dim=1)
    compare(step, model, loss, whole[:, :1].expand(5, B, 4), batch_dim=1)


def test_inputs_conjugated_lazily() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3, dtype=DTYPE)

        def forward(self, z: Tensor) -> Tensor:
            return self.layer(z.real) * self.layer(z.imag)

    z = torch.complex(x(B, 4), x(4, B).T)
    step = check(Parts(), F.cross_entropy, z.conj(), labels())
    for given in (z, z.conj(), z.mT.mH, z.mH):
        compare(step, step.model, F.cross_entropy, given, labels())


def test_sizes_beside_the_batch_may_change() -> None:
    model = nn.Linear(4, 3, dtype=DTYPE)
    step = psg_fx.transform(model, lambda out: out.sin().sum(), backend="eager")
    for tokens in (2, 5):
        compare(step, model, step.loss_fn, x(B, tokens, 4))
    assert len(step.captures) == 2


def test_inputs_are_left_alone() -> None:
    model, inputs = mlp(), x(B, 4)
    before = inputs.clone()
    psg_fx.transform(model, F.cross_entropy, backend="eager")(inputs, labels())
    assert torch.equal(inputs, before)


# --- what a loss reaches through its closure ------------------------------------------------------------------------


def test_parameter_in_the_closure_counts() -> None:
    model = mlp()
    weight = model[0].weight
    check(model, lambda out, y: F.cross_entropy(out, y) + weight.square().sum(), x(B, 4), labels())


def test_detached_parameter_in_the_closure_does_not() -> None:
    model = mlp()
    weight, anchor = model[0].weight, model[0].weight.detach()
    step = check(model, lambda out, y: F.cross_entropy(out, y) + (weight * anchor).sum(), x(B, 4), labels())
    with torch.no_grad():
        weight.mul_(3.0)
    compare(step, model, step.loss_fn, x(B, 4), labels())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:A model attribute .* requires gradient:UserWarning")
def test_view_made_outside_is_refused() -> None:
    model = mlp()
    view = model[0].weight.t()
    step = psg_fx.transform(model, lambda out: out.sum() + view.sum(), backend="eager")
    with pytest.raises(psg_fx.NotYetSupported, match="computed outside of it and requires gradients"):
        step(x(B, 4))


@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
def test_inputs_of_forward_mode_are_refused(before: bool) -> None:
    step = psg_fx.transform(mlp(), F.cross_entropy, quantities=psg_fx.Norms(), backend="eager")
    plain, y = x(B, 4), labels()
    expected = step(plain, y).norms if before else None
    with forward_ad.dual_level():
        with pytest.raises(psg_fx.NotYetSupported, match=r"a tensor of torch\.autograd\.forward_ad"):
            step(forward_ad.make_dual(plain, torch.ones_like(plain)), y)
        found = step(plain, y).norms
    assert expected is None or torch.equal(found, expected)


def test_a_loss_with_trainable_parameters_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, out: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(out * self.scale, targets)

    model, loss = mlp(), Scaled()
    with pytest.raises(psg_fx.NotYetSupported, match="the loss has a trainable parameter of its own, scale"):
        psg_fx.transform(model, loss, backend="eager")(x(3, 4), labels(3))
    loss.requires_grad_(False)
    check(model, loss, x(3, 4), labels(3))


def test_wrappers_around_other_tensors_are_refused() -> None:
    """At the first call, and when a plain one has been captured."""
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, backend="eager")
    x, y = torch.randn(2, 4), torch.tensor([0, 1])
    for _ in range(2):
        with pytest.raises(BadArgument, match="input_0 is a TwoTensor, a wrapper around other tensors"):
            step(TwoTensor(x, x.clone()), y)
        step(x, y)
