"""What else Opacus' PrivacyEngine offers, with psg_fx as its module: clipping, ε, parts, checkpoints, evaluation."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("opacus")

from opacus.validators.errors import UnsupportedModuleError

import psg_fx
from support.selection import one_in
from support.training import MAX_NORM, Private, Training, engine, quietly, same, trained

CLIPPING: dict[str, dict[str, Any]] = {
    "per_layer": {"max_grad_norm": [0.1, 0.05, 0.3, 0.1]},
    "adaptive": {
        "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "unclipped_num_std": 5.0,
        "min_clipbound": 0.01, "max_clipbound": 10.0,
    },
}  # fmt: skip


@pytest.mark.parametrize(("clipping", "part"), one_in(3, itertools.product(CLIPPING, [None, 3])))
@quietly
def test_other_ways_of_clipping(clipping: str, part: int | None) -> None:
    options = {"clipping": clipping, **CLIPPING[clipping]}
    mine, theirs = trained(engine("no_op", **options), 3, part), trained(engine("hooks", **options), 3, part)
    assert mine[0].sizes == theirs[0].sizes
    same(mine, theirs)
    flat, _ = trained(engine("hooks"), 3)
    assert (mine[0].weights() - flat.weights()).norm() > 1e-2 * flat.weights().norm()


@quietly
def test_adaptive_clipping_moves_its_bound() -> None:
    bounds = []
    for mode in ("no_op", "hooks"):
        t = Training()
        private = Private(t, mode, clipping="adaptive", **CLIPPING["adaptive"])
        t.run(private.loader, private.step, 3)
        bounds.append(float(private.optimizer.max_grad_norm))
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-5)
    assert bounds[0] > 1.5 * MAX_NORM


@pytest.mark.parametrize(
    ("seed", "first", "clipping"), one_in(3, [(*start, c) for start in [(1, 1), (9, 0)] for c in ("flat", "per_layer")])
)
@quietly
def test_parts_of_batches_some_of_which_are_empty(seed: int, first: int, clipping: str) -> None:
    few: dict[str, Any] = {"batch": 2, "count": 8, "seed": seed}
    options = {"clipping": clipping, **CLIPPING.get(clipping, {})}
    mine, theirs = trained(engine("no_op", **options), 3, 2, **few), trained(engine("hooks", **options), 3, **few)
    assert mine[0].sizes[0] == first
    assert set(mine[0].sizes) == {0, 1, 2}
    assert max(theirs[0].sizes) > 2
    same(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("accountant", one_in(2, ["rdp", "prv"]))
@quietly
def test_a_target_epsilon_is_met(accountant: str) -> None:
    """Opacus looks for the noise until ε is within 0.01 of the target."""
    target = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 3, "accountant": accountant}
    t = Training()
    private = Private(t, "no_op", **target)
    t.run(private.loader, private.step, 3)
    epsilon = float(private.engine.get_epsilon(1e-3))
    assert 3.0 - 0.01 <= epsilon <= 3.0
    same((t, epsilon), trained(engine("hooks", **target), 3))
    t.run(private.loader, private.step, 1)
    assert private.engine.get_epsilon(1e-3) > 3.05


@pytest.mark.parametrize(("before", "after"), one_in(2, [("no_op", "no_op"), ("no_op", "hooks"), ("hooks", "no_op")]))
@quietly
def test_a_run_goes_on_from_a_checkpoint(before: str, after: str, tmp_path: Path) -> None:
    """Loaded into a run that went elsewhere.  The states of the generators are the caller's to save."""
    whole, first, second = Training(), Training(), Training(seed=1)
    unstopped, a, b = Private(whole, after), Private(first, before), Private(second, after)
    whole.run(unstopped.loader, unstopped.step, 3)

    first.run(a.loader, a.step, 1)
    states = {"noise": first.noise.get_state(), "batches": first.loader.generator.get_state()}
    a.engine.save_checkpoint(path=tmp_path / "run.pt", module=a.module, optimizer=a.optimizer, checkpoint_dict=states)

    second.run(b.loader, b.step, 2)
    found = b.engine.load_checkpoint(path=tmp_path / "run.pt", module=b.module, optimizer=b.optimizer)
    assert torch.equal(second.weights(), first.weights())
    second.noise.set_state(found["noise"])
    second.loader.generator.set_state(found["batches"])
    second.run(b.loader, b.step, 2)

    assert b.engine.accountant.history == unstopped.engine.accountant.history
    same((second, b.engine.get_epsilon(1e-3)), (whole, unstopped.engine.get_epsilon(1e-3)))
    assert before != after or torch.equal(second.weights(), whole.weights())


def dropping() -> Training:
    t = Training()
    t.model.insert(3, nn.Dropout(0.5))
    return t


@pytest.mark.parametrize("wrapped", one_in(2, [True, False]))
@quietly
def test_evaluation_between_steps_changes_nothing(wrapped: bool) -> None:
    held_out = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(3))
    evaluated = dropping()
    private = Private(evaluated, "no_op", wrapped)

    def step(images: Tensor, labels: Tensor) -> None:
        private.step(images, labels)
        private.module.eval()
        with torch.no_grad():
            outputs = private.module(held_out)
        assert not any(m.training for m in evaluated.model.modules())
        torch.testing.assert_close(outputs, evaluated.model(held_out))
        private.module.train()
        assert all(m.training for m in evaluated.model.modules())

    evaluated.run(private.loader, step, 3)
    for mode in ("no_op", "hooks"):
        t = dropping()
        other = Private(t, mode, wrapped)
        t.run(other.loader, other.step, 3)
        epsilons = private.engine.get_epsilon(1e-3), other.engine.get_epsilon(1e-3)
        same((evaluated, epsilons[0]), (t, epsilons[1]))
        assert mode == "hooks" or torch.equal(evaluated.weights(), t.weights())
    without = trained(engine("hooks"), 3)[0].weights()
    assert (evaluated.weights() - without).norm() > 1e-2 * without.norm()


@quietly
def test_a_model_in_evaluation_mode_is_refused_by_opacus() -> None:
    t = Training()
    t.model.eval()
    assert not psg_fx.transform(t.model).training
    with pytest.raises(UnsupportedModuleError, match="training mode"):
        Private(t, "no_op")
