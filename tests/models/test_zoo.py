"""Every example of the zoo runs, is reproducible, and has per-sample gradients whose mean is the ordinary gradient."""

from typing import Any

import pytest
import torch

from psg_fx import zoo
from support import oracle

TINY: dict[str, dict[str, Any]] = {
    "simplecnn": {"image": 10, "width": 4, "hidden": 8},
    "resnet18gn": {"width": 8, "groups": 2, "blocks": (1, 1)},
    "gpt": {"layers": 1, "width": 16, "heads": 2, "tokens": 6, "vocabulary": 20},
    "vit": {"layers": 1, "width": 12, "image": 8},
    "lstm": {"tokens": 4, "vocabulary": 20, "width": 8, "hidden": 8},
    "encoder": {"tokens": 5, "width": 8, "heads": 2, "layers": 1},
    "mlp": {},
}


@pytest.mark.parametrize("name", zoo.names())
def test_mean_of_per_sample_gradients_is_the_ordinary_gradient(name: str) -> None:
    ex = zoo.example(name, batch=3, dtype=torch.float64, **TINY[name])
    losses, grads = oracle.loop_grads(ex.model, ex.loss_fn, ex.inputs, ex.targets, batch_dim=ex.batch_dim)
    ordinary = oracle.loss_of(ex.model, ex.loss_fn, ex.inputs, ex.targets)
    ordinary.backward()
    assert oracle.relative_error(losses.mean(), ordinary) < 1e-12
    expected = {n: p.grad for n, p in ex.model.named_parameters() if p.grad is not None}
    assert oracle.worst_error(oracle.mean_grad(grads), expected) < 1e-12


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("encoder", {"batch_first": False}),
        ("gpt", {"tied": True, "max_tokens": 9}),
        ("resnet18gn", {"stem": "cifar"}),
    ],
)
def test_variants_agree_with_vmap(name: str, variant: dict[str, Any]) -> None:
    ex = zoo.example(name, batch=3, dtype=torch.float64, **TINY[name], **variant)
    call = (ex.model, ex.loss_fn, ex.inputs, ex.targets)
    losses, grads = oracle.loop_grads(*call, batch_dim=ex.batch_dim)
    again, by_vmap = oracle.vmap_grads(*call, batch_dim=ex.batch_dim)
    assert oracle.relative_error(again, losses) < 1e-12
    assert oracle.worst_error(by_vmap, grads) < 1e-12


def test_same_seed_same_example_and_global_random_state_untouched() -> None:
    before = torch.get_rng_state()
    first, second = (zoo.example("mlp", batch=2, seed=3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.model.fc1.weight, second.model.fc1.weight)
    assert not torch.equal(first.inputs, zoo.example("mlp", batch=2, seed=4).inputs)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nope", {}, "no example is called 'nope'; there are: simplecnn, "),
        ("mlp", {"depth": 3}, "mlp has no size called 'depth'; it has: inputs, hidden, classes"),
        ("mlp", {"batch": 0}, "batch must be at least 1, got 0"),
        ("gpt", {"width": 10, "heads": 3}, "heads=3 must divide width=10"),
        ("resnet18gn", {"stem": "other"}, "stem must be 'imagenet' or 'cifar', got 'other'"),
    ],
)
def test_wrong_sizes_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zoo.example(name, **options)
