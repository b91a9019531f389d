"""Packed sequences in a model: recurrent layers over samples of own lengths, exact or refused by name."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, unpack_sequence

import psg_fx
from psg_fx.errors import NotYetSupported, PsgError
from psg_fx.passes.capture.functions.packed import packed_as_padded
from support.rows_of_samples import Batch, Part, check, usual
from support.selection import one_in, selected

CELLS: dict[str, type[nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
T = 5
LENGTHS = [[3, 5, 1, 4], [2, 1], [5, 4, 4], [1]]


def each(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def outputs(module: Model, out: PackedSequence, last: tuple[Tensor, ...]) -> Tensor:
    """All of them, with a value of its own in the padding."""
    padded, lengths = pad_packed_sequence(out, module.first == 0, padding_value=0.25, total_length=T)
    found = (padded if module.first == 0 else padded.transpose(0, 1)).flatten(1)
    return torch.cat([found, lengths.unsqueeze(1).to(found.dtype)], 1)


def states(module: Model, out: PackedSequence, last: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([state.transpose(0, 1).flatten(1) for state in last], 1)


class Model(nn.Module):
    """A recurrent layer over packed sequences, and a head on what `read` takes of its results."""

    def __init__(self, kind: str, read: Callable[..., Tensor], first_states: bool = False, **options: Any) -> None:
        super().__init__()
        self.rnn, self.read = CELLS[kind](3, 4, **options), read
        self.first = 0 if options.get("batch_first") else 1
        rows = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
        sizes = [options.get("proj_size") or 4, 4][: 1 + (kind == "lstm")]
        self.initial = nn.ParameterList([torch.randn(rows, 1, n) for n in sizes if first_states])
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, self.first == 0, enforce_sorted=False)
        hx = [h.expand(-1, lengths.shape[0], -1).contiguous() for h in self.initial]
        out, last = self.rnn(packed, None if not hx else hx[0] if len(hx) == 1 else tuple(hx))
        return self.head(self.read(self, out, last if isinstance(last, tuple) else (last,)))


def batch(lengths: list[int], first: int = 0, rest: float = float("nan")) -> Batch:
    """Padded with `rest`: what is there has no part in anything."""
    generator = torch.Generator().manual_seed(sum(lengths))
    x = torch.randn(len(lengths), T, 3, generator=generator, dtype=torch.float64)
    for row, n in zip(x, lengths, strict=True):
        row[n:] = rest
    sizes, y = torch.tensor(lengths), torch.arange(len(lengths)) % 3
    x = x.transpose(0, first).contiguous()
    alone = (Part((x.narrow(first, b, 1), sizes[b : b + 1]), (y[b : b + 1],)) for b in range(len(lengths)))
    return Batch(Part((x, sizes), (y,)), tuple(alone), ((first, 0), 0))


def made(kind: str, read: Callable[..., Tensor], **options: Any) -> Model:
    torch.manual_seed(0)
    model = Model(kind, read, **options).double()
    model(*batch([3, 2], model.first).whole.inputs)
    return model


READS = {f.__name__: f for f in (outputs, states)}


@pytest.mark.parametrize(("cell", "read"), one_in(6, itertools.product(CELLS, READS)))
def test_every_quantity(cell: str, read: str) -> None:
    check(made(cell, READS[read], **two_ways(cell, read)), each, [batch(lengths) for lengths in LENGTHS])


@pytest.mark.parametrize(("cell", "read"), [("gru", "states"), ("rnn", "outputs")])
def test_the_usual_quantities(cell: str, read: str) -> None:
    many = [batch(lengths) for lengths in LENGTHS]
    check(made(cell, READS[read], **two_ways(cell, read)), each, many, quantities=usual())


def two_ways(cell: str, read: str) -> dict[str, Any]:
    return {"batch_first": True, "first_states": read == "states", "bidirectional": cell != "rnn"}


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "projected": ("lstm", {"num_layers": 2, "bidirectional": True, "proj_size": 2, "first_states": True}),
    "no bias": ("lstm", {"num_layers": 2, "bias": False, "batch_first": True}),
    "two ways": ("gru", {"num_layers": 2, "bidirectional": True, "first_states": True}),
    "relu": ("rnn", {"nonlinearity": "relu", "bidirectional": True, "num_layers": 2}),
}


@pytest.mark.rest  # the options of layers are those of tests/rules/test_recurrent.py
@pytest.mark.parametrize("name", selected(OPTIONS, {"projected"}))
def test_options(name: str) -> None:
    cell, options = OPTIONS[name]
    model = made(cell, outputs if name in ("no bias", "relu") else states, **options)
    check(model, each, [batch(LENGTHS[0], model.first)], quantities=[psg_fx.Grads(), psg_fx.Norms()])


def test_states_of_a_growing_layer_do_not_overflow_in_the_padding() -> None:
    model = made("rnn", states, nonlinearity="relu")
    with torch.no_grad():
        model.rnn.weight_hh_l0.fill_(1e80)
        model.rnn.bias_hh_l0.fill_(1e200)
    check(model, lambda out, y: (out * 1e-220).square().sum(1), [batch([1, 1, 1], 1)], quantities=[psg_fx.Grads()])


@pytest.mark.inductor
def test_compiled() -> None:
    model = made("lstm", states, batch_first=True)
    check(model, each, [batch(LENGTHS[0])], backend="inductor", quantities=[psg_fx.ClippedSum(0.5)])


def test_without_a_loss() -> None:
    model = made("gru", outputs, batch_first=True)
    given = batch(LENGTHS[0])
    (x, lengths), (y,) = given.whole.inputs, given.whole.targets
    F.cross_entropy(psg_fx.transform(model, backend="eager")(x, lengths), y, reduction="sum").backward()
    for b, part in enumerate(given.alone):
        found = torch.autograd.grad(part.losses(model, each).sum(), list(model.parameters()))
        for p, g in zip(model.parameters(), found, strict=True):
            torch.testing.assert_close(p.grad_sample[b], g, atol=1e-10, rtol=1e-10)  # type: ignore[attr-defined]


# --- lengths ----------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Reads of its lengths from the tokens; `pad` is how it goes on."""

    def __init__(self, pad: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.token, self.rnn = nn.Embedding(7, 3, padding_idx=0), nn.LSTM(3, 4, batch_first=True, **options)
        self.head, self.pad = nn.Linear(4, 3), pad

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1).cpu()
        packed = pack_padded_sequence(self.token(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.pad(*pad_packed_sequence(self.rnn(packed)[0], batch_first=True)))


def text(lengths: list[int], size: int = T) -> Tensor:
    tokens = torch.arange(1, len(lengths) * size + 1).reshape(-1, size) % 6 + 1
    return torch.where(torch.arange(size) < torch.tensor(lengths).unsqueeze(1), tokens, 0)


def tokens_of(lengths: list[int], size: int = T) -> Batch:
    tokens, y = text(lengths, size), torch.arange(len(lengths)) % 3
    alone = (Part((tokens[b : b + 1],), (y[b : b + 1],)) for b in range(len(lengths)))
    return Batch(Part((tokens,), (y,)), tuple(alone), 0)


TRIMMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean over own steps": lambda out, n: out.sum(1) / n.unsqueeze(1),
    "last step": lambda out, n: out.gather(1, (n - 1).reshape(-1, 1, 1).expand(-1, 1, 4))[:, 0],
    "masked": lambda out, n: torch.where(
        (torch.arange(out.shape[1]) < n.unsqueeze(1)).unsqueeze(-1), out, -torch.inf
    ).amax(1),
}
LONGER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda out, n: out.mean(1),
    "max": lambda out, n: out.amax(1),
    "last": lambda out, n: out[:, -1],
}


@pytest.mark.parametrize(("longest", "read"), one_in(6, itertools.product((T, T - 1), TRIMMED)))
def test_without_a_total_length(read: str, longest: int) -> None:
    """Torch pads to the longest sample of the batch, and a sample alone to its own length."""
    torch.manual_seed(0)
    asked = [psg_fx.Grads(), psg_fx.Norms()]
    step = check(
        Tagger(TRIMMED[read]).double(), each, [tokens_of([3, longest, 1, 4]), tokens_of([2, 3])], quantities=asked
    )
    assert "that this does not matter was found by trying it out" in " ".join(step.explain().split())


@pytest.mark.parametrize("read", LONGER)
def test_what_depends_on_the_padding_is_refused(read: str) -> None:
    torch.manual_seed(0)
    step = psg_fx.transform(Tagger(LONGER[read]).double(), each, backend="eager")
    with pytest.raises(
        NotYetSupported, match=r"pad_packed_sequence(.|\n)*test_packed_sequences.py(.|\n)*total_length="
    ):
        step((text([20, 5, 12], 24),), torch.tensor([0, 1, 2]))


FIRST_STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda out, n: out[:, :2].mean(1),
    "narrow": lambda out, n: out.narrow(1, 0, min(out.shape[1], 2)).mean(1),
    "softmax": lambda out, n: out[:, :3].softmax(1)[:, 0],
}


@pytest.mark.parametrize("read", FIRST_STEPS)
def test_samples_that_are_shorter_than_any_of_the_first_batch_are_tried(read: str) -> None:
    step = psg_fx.transform(Tagger(FIRST_STEPS[read]).double(), each, backend="eager")
    with pytest.raises(NotYetSupported, match="pads to the longest sample"):
        step((text([T, 3, 4]),), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("lengths", [[T, T], []], ids=str)
def test_nothing_is_said_by_samples_that_fill_the_padding(lengths: list[int]) -> None:
    step = psg_fx.transform(Tagger(TRIMMED["last step"]), each, backend="eager")
    with pytest.raises(NotYetSupported, match=r"no sample of the first batch is shorter(.|\n)*total_length="):
        step((text(lengths),), torch.arange(len(lengths)))


class Particular(Tagger):
    """Runs for its own parameters alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and self.head.weight.abs().max() > 2:
            raise ValueError("not in its domain")
        return super().forward(tokens)


def test_code_that_does_not_run_with_other_parameters() -> None:
    torch.manual_seed(0)
    check(Particular(TRIMMED["last step"]).double(), each, [tokens_of([3, T])], quantities=[psg_fx.Norms()])


@pytest.mark.rest  # test_without_a_total_length has it without dropout
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"num_layers": 2, "dropout": 0.5}, marks=pytest.mark.rest)], ids=str
)
def test_dropout_does_not_hide_that_the_padding_matters_or_not(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Tagger(lambda out, n: F.dropout(out, 0.5).sum(1), **options)
    step = psg_fx.transform(model, each, backend="eager", quantities=psg_fx.Norms())
    assert step((text([2, 3, 1], 3),), torch.tensor([0, 1, 2])).norms.isfinite().all()
    model.pad = lambda out, n: F.dropout(out, 0.5).mean(1)
    with pytest.raises(NotYetSupported, match="total_length="):
        step((text([2, 3, 1], 3),), torch.tensor([0, 1, 2]))


def test_dropout_of_a_keyword_hides_nothing_either() -> None:
    model = Tagger(lambda out, n: torch.dropout(input=out, p=0.5, train=True).mean(1))
    step = psg_fx.transform(model, each, backend="eager", quantities=psg_fx.Norms())
    with pytest.raises(NotYetSupported, match="total_length="):
        step((text([2, 3, 1], 3),), torch.tensor([0, 1, 2]))


def test_lengths_out_of_range_are_refused_at_every_call() -> None:
    step = psg_fx.transform(made("gru", states, batch_first=True), each, backend="eager")
    step(batch([3, 2]).whole.inputs, torch.tensor([0, 1]))
    x, _ = batch([3, 2]).whole.inputs
    for lengths in ([0, 2], [6, 2]):
        with pytest.raises(PsgError, match=r"refuses these values(.|\n)*pack_padded_sequence"):
            step((x, torch.tensor(lengths)), torch.tensor([0, 1]))


class Sorted(nn.Module):
    """Packs as torch does by default: in the order of the lengths, which are numbers or a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Any = 4) -> Tensor:
        if not isinstance(lengths, Tensor):
            lengths = torch.full((x.shape[0],), lengths)
        return self.rnn(pack_padded_sequence(x, lengths, batch_first=True))[1][0]


def squares(output: Tensor, *_: Any) -> Tensor:
    return output.square().sum(1)


def test_an_order_that_is_promised_is_checked() -> None:
    step = check(Sorted().double(), squares, [batch([4, 3, 3]), batch([2, 1])], quantities=[psg_fx.Norms()])
    x, _ = batch([1, 2]).whole.inputs
    with pytest.raises(PsgError, match=r"refuses these values(.|\n)*pack_padded_sequence"):
        step((x, torch.tensor([1, 2])), torch.tensor([0, 1]))


def test_lengths_as_numbers() -> None:
    x = torch.randn(3, T, 3, dtype=torch.float64)
    alone = tuple(Part((x[b : b + 1],), ()) for b in range(3))
    check(Sorted().double(), squares, [Batch(Part((x,), ()), alone, 0)], quantities=[psg_fx.Norms()])


# --- refused ----------------------------------------------------------------------------------------------------------


class Inside(nn.Module):
    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.rnn, self.use = nn.GRU(3, 4, batch_first=True), use

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.use(self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0], lengths)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "data": (lambda p, _: p.data.sum(), "asked for .data"),
    "order": (lambda p, _: p.unsorted_indices, "asked for .unsorted_indices"),
    "unpacked": (lambda p, _: unpack_sequence(p)[0].sum(), "unpacked into a tensor for each sample"),
    "tuple": (lambda p, _: next(iter(p)), "taken apart"),
    "index": (lambda p, _: p[0], "indexed"),
    "list": (
        lambda p, n: pack_padded_sequence(pad_packed_sequence(p, True, 0.0, T)[0], [3, 2], True), "as a list",
    ),
    "tolist": (
        lambda p, n: pack_padded_sequence(pad_packed_sequence(p, True, 0.0, T)[0], n.tolist(), True), "as a list",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_lies_in_the_order_of_lengths_is_refused(name: str) -> None:
    use, what = REFUSED[name]
    step = psg_fx.transform(Inside(use).double(), lambda out, y: out.sum(), backend="eager")
    with pytest.raises(NotYetSupported, match=rf"a packed sequence .*{what}(.|\n)*fix"):
        step(batch([3, 2]).whole.inputs, torch.tensor([0, 1]))


def test_a_packed_output_is_refused() -> None:
    with pytest.raises(NotYetSupported, match="the model returns a packed sequence"):
        psg_fx.transform(Inside(lambda p, _: p).double(), backend="eager")(*batch([3, 2]).whole.inputs)


def test_a_packed_sequence_is_one_and_can_be_moved() -> None:
    def use(packed: PackedSequence, lengths: Tensor) -> Tensor:
        assert isinstance(packed, PackedSequence)
        return pad_packed_sequence(packed.double(), total_length=T)[0].transpose(0, 1).sum((1, 2))

    check(Inside(use).double(), lambda out, y: out, [batch([3, 2])])


def test_torch_is_as_it_was_afterwards_and_in_other_threads() -> None:
    x, lengths = torch.randn(2, T, 3), torch.tensor([3, 2])
    before, found = rnn.pack_padded_sequence.__code__, []

    def other() -> None:
        found.append(pack_padded_sequence(x, lengths, batch_first=True).batch_sizes.tolist())

    with packed_as_padded():
        assert type(pack_padded_sequence(x, lengths, batch_first=True)) is not PackedSequence
        with packed_as_padded():
            pass
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert type(rnn.pack_padded_sequence(x, lengths, batch_first=True)) is not PackedSequence
    other()
    assert found == [[2, 2, 1]] * 2
    assert rnn.pack_padded_sequence.__code__ is before


def test_a_task_without_labels_hides_no_padding() -> None:
    """What is a mean over the padding, too, is multiplied by zero in the first batch."""
    model = Tagger(lambda out, n: torch.stack([out.sum(1), out.mean(1)])).double()

    def loss(out: Tensor, labelled: Tensor) -> Tensor:
        return out[0].square().sum(1) + labelled * out[1].square().sum(1)

    given = tokens_of([2, 5, 3])
    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")
    with pytest.raises(NotYetSupported, match=r"pad_packed_sequence treats[^\0]*where mean [^\0]*gives another value"):
        step(given.whole.inputs, torch.zeros(3, dtype=torch.int64))
