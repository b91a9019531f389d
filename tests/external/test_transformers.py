"""Hugging Face and PEFT models are exact against the loop, or refused for the reason that holds."""

from __future__ import annotations

import pytest
import torch
import transformers

import psg_fx
from external import transformers_zoo as zoo
from external.program import Program, check, drop_in, truth
from psg_fx.errors import NotYetSupported

PROGRAMS = zoo.programs()
OUTSIDE = [p for p in PROGRAMS if "outside" in p.name]
INSIDE = [p for p in PROGRAMS if p not in OUTSIDE]


@pytest.mark.slow
@pytest.mark.parametrize("program", INSIDE, ids=str)
def test_loss_of_the_model(program: Program) -> None:
    check(program)


@pytest.mark.slow
@pytest.mark.parametrize("program", OUTSIDE, ids=str)
def test_loss_outside(program: Program) -> None:
    check(program, drop_in)


@pytest.mark.parametrize("name", ["bert/outside", "llama/outside-sdpa"])
def test_loss_of_all_outputs_in_the_step(name: str) -> None:
    check(next(p for p in PROGRAMS if p.name == name))


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_every_model_learns(program: Program) -> None:
    """A zero gradient agrees with anything: nearly all parameters of a program have another."""
    grads = truth(program.problem()).values()
    assert sum(bool(g.any()) for g in grads) > 0.9 * len(grads)


def test_grouped_experts_are_refused() -> None:
    """They sort the tokens of all samples; the grouped product of torch does not run in float64."""
    config = {**zoo.GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config))
    model.set_experts_implementation("grouped_mm")
    step = psg_fx.transform(model, lambda out: out.loss, backend="eager")
    with torch.random.fork_rng(devices=[]), pytest.raises(NotYetSupported) as error:
        step(zoo.labelled(zoo.padded, labels=zoo.token_labels)())
    assert "it sorts the rows of all samples by an integer" in error.value.why
    assert "gather" in error.value.fix
