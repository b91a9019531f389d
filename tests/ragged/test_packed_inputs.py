"""Packed sequences as inputs and targets: the truth is each sample's own sequence through torch's own layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

import psg_fx
from psg_fx.errors import BadArgument, NotYetSupported, PsgError
from support.rows_of_samples import Batch, Part, check
from support.selection import selected

LENGTHS = [[2, 3, 1, 3], [3, 2], [1, 2, 2]]
"""Of which the last are for another graph: their longest is shorter."""


def each(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def sequences(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) + seed)
    return [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in lengths]


def packed(steps: list[Tensor]) -> PackedSequence:
    return rnn.pack_sequence(steps, enforce_sorted=False)


class FromStates(nn.Module):
    """A recurrent layer over packed inputs, from states that are inputs, too."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: PackedSequence, h: Tensor, c: Tensor) -> Tensor:
        _, states = self.rnn(x, (h, c))
        return self.head(torch.cat(states).transpose(0, 1).flatten(1))


def with_states(lengths: list[int]) -> Batch:
    steps, size = sequences(lengths), len(lengths)
    h, c = (torch.randn(2, size, 4, generator=torch.Generator().manual_seed(k)).double() for k in (1, 2))
    y = torch.arange(size) % 3
    alone = (
        Part((packed([s]), h[:, b : b + 1].contiguous(), c[:, b : b + 1].contiguous()), (y[b : b + 1],))
        for b, s in enumerate(steps)
    )
    return Batch(Part((packed(steps), h, c), (y,)), tuple(alone), ((0, 1, 1), 0))


def test_every_quantity_and_a_graph_for_each_longest_length() -> None:
    torch.manual_seed(0)
    step = check(FromStates().double(), each, [with_states(lengths) for lengths in LENGTHS], captures=2)
    assert step.captures[1].why.startswith("changed: the shapes")


class Tagger(nn.Module):
    """Takes packed tokens and packed features, pads both to the longest sample as torch does, and has an output for
    each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token, self.rnn, self.head = nn.Embedding(6, 3), nn.GRU(6, 4), nn.Linear(4, 3)

    def forward(self, tokens: PackedSequence, features: PackedSequence) -> Tensor:
        assert isinstance(tokens, PackedSequence)
        ids, lengths = pad_packed_sequence(tokens)
        x = torch.cat([self.token(ids), pad_packed_sequence(features)[0]], -1)
        out, _ = self.rnn(rnn.pack_padded_sequence(x, lengths, enforce_sorted=False))
        return self.head(pad_packed_sequence(out)[0])


def of_tags(output: Tensor, tags: PackedSequence) -> Tensor:
    wanted, _ = pad_packed_sequence(tags, padding_value=-100)
    return F.cross_entropy(output.flatten(0, 1), wanted.flatten())


def tagged(lengths: list[int]) -> Batch:
    """Two inputs and the target are packed; those of one are said to be in order, or are not."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens, tags = ([torch.randint(k, (n,), generator=generator) for n in lengths] for k in (6, 3))
    features = sequences(lengths)
    parts = [
        Part({"tokens": pack(a), "features": packed(b)}, packed(c))
        for pack, a, b, c in (
            (lambda s: rnn.pack_sequence(s, enforce_sorted=lengths == sorted(lengths, reverse=True)), tokens, features,
             tags),
            *((packed, [a], [b], [c]) for a, b, c in zip(tokens, features, tags, strict=True)),
        )
    ]  # fmt: skip
    parts = [Part(p.inputs, {"tags": p.targets}) for p in parts]
    return Batch(parts[0], tuple(parts[1:]), 0)


@pytest.mark.slow
def test_tokens_and_targets_that_are_packed() -> None:
    torch.manual_seed(0)
    check(Tagger().double(), of_tags, [tagged(n) for n in ([3, 2, 1], [2, 3, 1])], quantities=[psg_fx.Grads()])


@pytest.mark.parametrize("many", selected([[[2, 2]], [[1]], [[2, 2], [4, 4]]], {"[[2, 2]]", "[[1]]"}))
def test_a_batch_of_samples_that_are_equally_long(many: list[list[int]]) -> None:
    """What follows from a shorter one is seen of samples that are cut."""
    torch.manual_seed(0)
    given = [tagged(lengths) for lengths in many]
    check(Tagger().double(), of_tags, given, quantities=[psg_fx.Grads()], captures=len(many))


# --- ways to run a step -----------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, 3)

    def forward(self, x: PackedSequence) -> Tensor:
        return self.head(self.rnn(x)[1][0])


def made(seed: int = 0) -> Encoder:
    torch.manual_seed(seed)
    return Encoder().double()


def alone(model: nn.Module, steps: list[Tensor], y: Tensor) -> dict[str, Tensor]:
    """The loop over samples."""
    named = dict(model.named_parameters())
    found = [
        torch.autograd.grad(each(model(packed([s])), y[b : b + 1]).sum(), list(named.values()))
        for b, s in enumerate(steps)
    ]
    return {name: torch.stack(rows) for name, rows in zip(named, zip(*found, strict=True), strict=True)}


def close(found: Any, expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(found), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.slow
def test_parts_groups_and_loops_over_batches() -> None:
    model, steps, y = made(), sequences(LENGTHS[0]), torch.tensor([0, 1, 2, 0])
    want, x = alone(model, steps, y), packed(steps)
    step = psg_fx.transform(model, each, quantities=psg_fx.Grads(), backend="eager")
    close(psg_fx.microbatch(step, 3)(x, y).grads, want)
    ids = torch.tensor([1, 0, 1, -1])
    groups = {name: torch.stack([g[1], g[0] + g[2]]) for name, g in want.items()}
    close(step(x, y, groups=ids, num_groups=2).grads, groups)
    close(psg_fx.microbatch(step, 3)(x, y, groups=ids, num_groups=2).grads, groups)
    norms = psg_fx.transform(model, each, quantities=psg_fx.Norms(), backend="eager")
    other = sequences(LENGTHS[2])
    expected = torch.cat([
        torch.stack([g.flatten(1).square().sum(1) for g in alone(model, s, torch.arange(len(s)) % 3).values()]).sum(0)
        for s in (steps, other)
    ]).sqrt()  # fmt: skip
    found = psg_fx.over([(packed(s), torch.arange(len(s)) % 3) for s in (steps, other)], norms)
    torch.testing.assert_close(found.norms, expected)
    small = psg_fx.transform(model, each, quantities=psg_fx.WeightedSum(), backend="eager", memory_budget=4000)
    close(small(x, y, weights=torch.ones(4)).weighted_sum, {name: g.sum(0) for name, g in want.items()})
    assert small.captures[0].step.part in (1, 2, 3)


def test_validation_is_by_sequences_of_torch_and_sees_what_is_wrong() -> None:
    model, x, y = made(), packed(sequences(LENGTHS[0])), torch.tensor([0, 1, 2, 0])
    step = psg_fx.transform(model, each, backend="eager")
    report = step.validate(x, y)
    assert report.ok
    assert "vmap does not take packed sequences" in report.vmap
    other = psg_fx.transform(made(1), each, backend="eager")
    assert not psg_fx.reference.validate.validate(other, model, each, x, y).ok
    rows = psg_fx.benchmark(
        model, each, x, y, quantities=["grads"], contenders=["loop", "psg-eager"], rounds=1, min_run_time=0.001
    ).rows
    assert [row.failure for row in rows if row.contender in ("loop", "psg-eager")] == [None, None]


def test_without_a_loss_gradients_reach_what_was_packed() -> None:
    model, steps, y = made(), sequences(LENGTHS[0]), torch.tensor([0, 1, 2, 0])
    want, inputs = alone(model, steps, y), [s.requires_grad_() for s in steps]
    each(psg_fx.transform(model, backend="eager")(packed(inputs)), y).sum().backward()
    close({name: p.grad_sample for name, p in model.named_parameters()}, want)  # type: ignore[attr-defined]
    found = [s.grad for s in inputs]
    for s in inputs:
        s.grad = None
    each(model(packed(inputs)), y).sum().backward()
    torch.testing.assert_close(found, [s.grad for s in inputs], atol=1e-10, rtol=1e-10)


@pytest.mark.rest  # tests/step/test_warm.py has other inputs
@pytest.mark.inductor
def test_compiled_in_the_background() -> None:
    model, steps, y = made(), sequences(LENGTHS[0]), torch.tensor([0, 1, 2, 0])
    step = psg_fx.transform(model, each, warm="eager")
    for _ in range(2):
        close(step(packed(steps), y).grads, alone(model, steps, y))
        step.wait()


@pytest.mark.inductor
@pytest.mark.rest
def test_a_file_is_for_one_longest_length(tmp_path: Path) -> None:
    model, y = made(), torch.tensor([0, 1])
    step = psg_fx.transform(model, each)
    loaded = psg_fx.load(step.export(tmp_path / "step.pt2", packed(sequences([3, 5, 4])), torch.tensor([0, 1, 2])))
    for lengths in ([2, 5], [5, 5]):
        steps = sequences(lengths)
        close(loaded(model.state_dict(), packed(steps), y).grads, alone(model, steps, y))
    with pytest.raises(BadArgument, match=r"input_0_padded is \[6, 2, 3\](.|\n)*the file takes float64 \[5, 2, 3\]"):
        loaded(model.state_dict(), packed(sequences([6, 2])), y)


# --- refused ----------------------------------------------------------------------------------------------------------

USES: dict[str, tuple[Callable[..., Any], str]] = {
    "data": (lambda x: x.data.sum(), "a packed sequence is asked for .data"),
    "longest": (lambda x: pad_packed_sequence(x)[0].amax(0), "pads to the longest sample"),
    "squeezed": (
        lambda x: pad_packed_sequence(x, total_length=20)[0].sum(0).unsqueeze(2).squeeze().unsqueeze(1).sum(-1),
        "squeeze treats a batch of one sample differently",
    ),
    "returned": (lambda x: x, "the model returns a packed sequence"),
}


@pytest.mark.parametrize("name", USES)
def test_what_is_refused_of_one(name: str) -> None:
    class Model(Encoder):
        def forward(self, x: PackedSequence) -> Any:
            use, out = USES[name][0], self.rnn(x)[0]
            return use(out)

    step = psg_fx.transform(Model().double(), backend="eager")
    for lengths in ([4, 20, 3], [20, 20]):
        with pytest.raises(NotYetSupported, match=rf"{USES[name][1]}(.|\n)*fix"):
            step(packed([-s.abs() for s in sequences(lengths)]))


@pytest.mark.parametrize(
    ("batch_dim", "what"),
    [((None, 0), "a PackedSequence has batch_dim None"), ((psg_fx.Rows(0), 0), "a PackedSequence has batch_dim Rows"),
     ((((1, 0),), 0), "several entries for a PackedSequence")],
)  # fmt: skip
def test_batch_dims_that_a_packed_sequence_does_not_have(batch_dim: Any, what: str) -> None:
    with pytest.raises(PsgError, match=what):
        psg_fx.transform(made(), each, backend="eager", batch_dim=batch_dim)(packed(sequences([2, 3])), torch.arange(2))


def test_errors_of_the_users_own_code_are_those_of_torch() -> None:
    step = psg_fx.transform(nn.GRU(5, 4).double(), lambda out: out[1].sum(), backend="eager")
    with pytest.raises(BadArgument, match=r"input_0 is a PackedSequence of float64 \[2, 3\]"):
        step(packed(sequences([2, 3])))


def test_other_inputs_are_of_as_many_samples() -> None:
    step = psg_fx.transform(made(), lambda out: out.logsumexp(-1), backend="eager", batch_dim=1)
    assert step(packed(sequences([2, 3]))).losses.shape == (2,)
    step = psg_fx.transform(made(), each, backend="eager")
    with pytest.raises(BadArgument, match=r"input_0_padded: 2, input_0_lengths: 2, target_0: 3"):
        step(packed(sequences([2, 3])), torch.arange(3))
