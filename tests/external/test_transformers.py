"""Hugging Face and PEFT models are exact against the loop, or refused for the reason that holds.

`make test-all` runs the whole list; what is left out otherwise has a near relative in it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers

import psg_fx
from external import transformers_rows as rows
from external import transformers_zoo as zoo
from external.program import Problem, Program, check, check_learns, drop_in, with_loss
from psg_fx.errors import PsgError, SamplesMixed
from support.selection import one_in, selected

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:one graph for each batch size"),
]

CHOSEN = {"wav2vec2/ctc", "mixtral/eager", "bert/outside", "llava/outside"}


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


GROUPED = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "DeepseekV3": {
        "n_routed_experts": 4, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        "n_shared_experts": 1, "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
}  # fmt: skip
"""Mixtures of experts of the library, and what their configs need beside `rows.GROUPED`."""


def experts(kind: str, way: str, **options: Any) -> Any:
    config = {**rows.GROUPED, "num_experts_per_tok": 2, **GROUPED[kind], **options}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config))
    model.set_experts_implementation(way)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_in(len(GROUPED), GROUPED))
def test_grouped_experts(kind: str) -> None:
    """They sort the tokens of all samples.  In float32, since the grouped product of torch has no float64 on a CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs = experts(kind, "grouped_mm"), rows.labelled(rows.padded, labels=rows.token_labels)()
    step = psg_fx.transform(model, lambda out: out.loss, quantities=psg_fx.Grads(), backend="eager")
    found = step(inputs).grads
    assert "psg_fx.expert_mm" in step.explain()
    for i in range(len(inputs["input_ids"])):
        loss = model(**{name: value[i : i + 1] for name, value in inputs.items()}).loss
        alone = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for (name, p), g in zip(model.named_parameters(), alone, strict=True):
            expected = torch.zeros_like(p) if g is None else g
            torch.testing.assert_close(found[name][i], expected, rtol=1e-4, atol=1e-5)


def test_refusals_of_experts_name_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psg_fx.passes.capture.nothing_picked.MOST", 3)
    inputs = rows.labelled(rows.padded, labels=rows.token_labels)()
    step = psg_fx.transform(experts("Mixtral", "eager"), lambda out: out.loss, backend="eager")
    with torch.random.fork_rng(devices=[]), pytest.raises(PsgError, match=r"set_experts_implementation"):
        step(inputs)
    balanced = experts("Mixtral", "grouped_mm", output_router_logits=True)
    step = psg_fx.transform(balanced, lambda out: out.loss, backend="eager")
    with torch.random.fork_rng(devices=[]), pytest.raises(SamplesMixed, match=r"output_router_logits = False"):
        step(inputs)


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
def test_a_mask_that_the_model_makes_itself() -> None:
    """It expands the positions where there are several samples, which is the same for one."""
    program = next(p for p in zoo.programs() if p.name == "gpt2/checkpointed")

    def without_mask() -> Problem:
        problem = program.problem()
        inputs = {name: value for name, value in problem.inputs.items() if name != "attention_mask"}
        return dataclasses.replace(problem, inputs=inputs)

    check(Program("gpt2/its own mask", without_mask), with_loss)
