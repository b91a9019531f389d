"""Other ways to per-sample gradients answer what a loop over samples does, or say why not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx import ClippedSum, Grads, Gram, Norms, Quantity, zoo
from psg_fx.benchmarking.contenders import field_of, loop
from psg_fx.benchmarking.judge import answer_error
from psg_fx.benchmarking.peers import adapters, peers_for
from psg_fx.benchmarking.peers.adapters import CannotBeAsked, Own
from psg_fx.benchmarking.problem import Contender, Problem
from psg_fx.measure.clock import peak_memory
from psg_fx.reference.by_vmap import quiet_vmap
from psg_fx.reference.definitions import Answer

TINY = {
    "mlp": {},
    "simplecnn": {"image": 8, "width": 4, "hidden": 8},
    "gpt": {"layers": 1, "width": 16, "heads": 2, "tokens": 6, "vocabulary": 20},
    "resnet18gn": {"width": 8, "blocks": (1, 1), "groups": 4},
    "lstm": {"vocabulary": 20, "tokens": 5, "width": 6, "hidden": 7},
}
QUANTITIES: dict[str, Quantity] = {"grads": Grads(), "norms": Norms(), "clipped_sum": ClippedSum(max_norm=0.3)}
REFUSED = {
    ("expanded-weights", "gpt"): "cannot handle function __getitem__",
    ("backpack", "gpt"): "parameters were given nothing",
    ("backpack", "resnet18gn"): "parameters were given nothing",
    ("backpack", "lstm"): "only num_layers = 1 is supported",
    ("backpack-norms", "gpt"): "parameters were given nothing",
    ("backpack-norms", "resnet18gn"): "parameters were given nothing",
    ("backpack-norms", "lstm"): "only num_layers = 1 is supported",
    ("jax", "resnet18gn"): "is not written in JAX",
    ("jax", "lstm"): "is not written in JAX",
}
PACKAGES = {"jax": "jax", "fastdp": "fastDP"}
"""Peers that no extra of the development environment installs."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """As `psg_fx.benchmark` calls them: Opacus runs `vmap` where it has no formula of its own."""
    with quiet_vmap():
        yield


def problem(name: str, batch: int = 3) -> Problem:
    ex = zoo.example(name, batch, **TINY[name])
    return Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets, backend="eager")


def truth(asked: Problem, quantity: Quantity) -> Answer:
    return loop(asked, quantity)()


def peers() -> list[Contender]:
    return [c for label, quantity in QUANTITIES.items() for c in peers_for(label, quantity)]


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("peer", peers(), ids=lambda c: c.label)
def test_every_peer_is_right_or_says_why_not(peer: Contender, model: str) -> None:
    if peer.name in PACKAGES and importlib.util.find_spec(PACKAGES[peer.name]) is None:
        pytest.skip(f"{PACKAGES[peer.name]} is not installed")
    asked = problem(model)
    if reason := REFUSED.get((peer.name, model)):
        with pytest.raises(Exception, match=reason):
            peer.build(asked)()
        return
    step = peer.build(asked)
    expected = truth(asked, QUANTITIES[peer.quantity])
    for _ in range(2):  # the second call must not see what the first one left
        assert answer_error(step(), expected) < 1e-5
    assert not any(hasattr(p, "grad_sample") or p.grad is not None for p in asked.model.parameters())


def test_a_peer_holds_no_answer_between_calls() -> None:
    """Or the memory of its next answer would count as given back first."""
    asked = problem("simplecnn", batch=8)
    answer = 4 * asked.batch.size * sum(p.numel() for p in asked.wanted.values())
    for name in ("opacus-hooks", "expanded-weights", "backpack"):
        step = next(c for c in peers() if (c.name, c.quantity) == (name, "grads")).build(asked)
        step()
        assert peak_memory(step, torch.device("cpu")) >= answer


def test_other_quantities_are_made_of_gradients() -> None:
    asked = problem("mlp")
    hooks = next(c for c in peers_for("gram", Gram()) if c.name == "opacus-hooks")
    assert answer_error(hooks.build(asked)(), truth(asked, Gram())) < 1e-5
    assert {c.name for c in peers_for("gram", Gram())} == {"opacus-hooks", "expanded-weights", "backpack"}


def test_who_clips_otherwise_is_not_asked() -> None:
    plain = {c.name for c in peers_for("c", ClippedSum(max_norm=0.5))}
    other = {c.name for c in peers_for("c", ClippedSum(max_norm=0.5, per="parameter"))}
    assert plain - other == {"opacus-ghost", "fastdp", "jax"}


def test_peers_race_only_when_asked() -> None:
    assert not any(c.name.startswith("opacus") for c in field_of())
    assert {c.name for c in field_of(peers=True)} > {"opacus-ghost", "backpack", "jax", "vmap"}
    assert [c.label for c in field_of(patterns=["opacus-hooks/norms"])] == ["opacus-hooks/norms"]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (F.cross_entropy, "mean"),
        (lambda z, y: F.cross_entropy(z, y, reduction="sum"), "sum"),
        (lambda z, y: F.cross_entropy(z, y, reduction="none"), "mean"),
    ],
)
def test_how_losses_are_joined_is_found_out(loss: object, expected: str) -> None:
    ex = zoo.example("mlp", 3)
    own = Own.of(Problem(ex.model, loss, ex.inputs, ex.targets))  # type: ignore[arg-type]
    assert own.reduction == expected
    outputs = ex.model(ex.inputs)
    torch.testing.assert_close(own.losses(outputs), F.cross_entropy(outputs, ex.targets, reduction="none"))


def test_a_weighted_mean_is_not_asked_by_its_own_reduction() -> None:
    """`reduction="none"` would weight each sample, the loss of one sample alone does not."""
    ex = zoo.example("mlp", 3)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    with pytest.raises(CannotBeAsked, match="neither the sum nor the mean"):
        Own.of(Problem(ex.model, loss, ex.inputs, torch.tensor([0, 1, 3])))


def test_a_loss_that_reads_parameters_is_not_asked() -> None:
    ex = zoo.example("mlp", 3)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y) + ex.model.fc1.weight.square().sum()  # type: ignore[union-attr, operator]

    with pytest.raises(CannotBeAsked, match="reads parameters"):
        Own.of(Problem(ex.model, loss, ex.inputs, ex.targets))


def test_fastdp_is_asked_for_the_clipped_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fastDP itself: how it is called, and that its answer is taken from the parameters each time."""
    found: list[dict[str, object]] = []

    def engine(model: nn.Module, **options: object) -> None:
        found.append(options)

        def mark(module: nn.Module, *ignored: object) -> None:
            for p in module.parameters():
                assert not hasattr(p, "private_grad")
                p.private_grad = torch.ones_like(p)  # type: ignore[attr-defined]

        model.register_full_backward_hook(mark)

    module = ModuleType("fastDP")
    module.PrivacyEngine = engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastDP", module)
    asked = problem("mlp")
    peer = next(c for c in peers_for("c", ClippedSum(max_norm=0.3)) if c.name == "fastdp")
    step = peer.build(asked)
    for _ in range(2):
        answer = step()
        assert not isinstance(answer, Tensor)
        assert {name: g.shape for name, g in answer.items()} == {n: p.shape for n, p in asked.wanted.items()}
    (options,) = found
    told = SimpleNamespace(**options)
    assert (told.max_grad_norm, told.clipping_fn, told.loss_reduction) == (0.3, "Abadi", "mean")
    assert told.noise_multiplier == 0.0


def test_outputs_that_are_not_one_tensor_are_not_asked() -> None:
    ex = zoo.example("mlp", 3)
    with pytest.raises(CannotBeAsked, match="not one tensor"):
        adapters.outputs_of(Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets), lambda x: (x, x))
