"""Hugging Face and PEFT models are exact against the loop, or refused for the reason that holds.

`make test-all` runs the whole list; what is left out otherwise has a near relative in it.
"""

from __future__ import annotations

import pytest
import torch
import transformers

import psg_fx
from external import transformers_zoo as zoo
from external.program import Program, check, check_learns, drop_in, with_loss
from psg_fx.errors import NotYetSupported
from support.selection import selected

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")

CHOSEN = {"t5/lm", "wav2vec2/ctc", "peft/lora-llama", "mixtral/eager", "bert/outside"}


@pytest.mark.slow
@pytest.mark.parametrize("program", selected(zoo.programs(), CHOSEN))
def test_exact_or_refused(program: Program) -> None:
    """With the loss that the model computes; without one, where its outputs are asked ("outside")."""
    check(program, drop_in if "/outside" in program.name or program.name.endswith("-outside") else with_loss)


@pytest.mark.rest
@pytest.mark.slow
def test_loss_of_all_outputs_in_the_step() -> None:
    check(next(p for p in zoo.programs() if p.name == "bert/outside"))


@pytest.mark.parametrize("program", selected(zoo.programs(), CHOSEN))
def test_every_model_learns(program: Program) -> None:
    check_learns(program)


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


def test_a_mask_that_the_model_makes_itself_is_named() -> None:
    """And the model is answered once the mask is passed."""
    problem = next(p for p in zoo.programs() if p.name == "gpt2/checkpointed").problem()
    step = psg_fx.transform(problem.model, problem.loss, backend="eager")
    inputs = {name: value for name, value in problem.inputs.items() if name != "attention_mask"}
    with pytest.raises(NotYetSupported) as error:
        step(inputs)
    assert error.value.fix.startswith("pass attention_mask, which the model makes itself where none is given; or ")
    step({**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])})
