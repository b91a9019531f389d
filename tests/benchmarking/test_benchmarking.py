"""`psg_fx.benchmark` measures what it says, keeps failures in the table and refuses wrong answers."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx import ClippedSum, Grads, Gram, MeanGrad, Projection, Quantity, zoo
from psg_fx.benchmarking import benchmark, contenders, judge
from psg_fx.benchmarking.problem import ORDINARY, Computation, Contender, Problem, by_label, from_grads
from psg_fx.benchmarking.report import BenchmarkReport
from psg_fx.errors import BadArgument
from psg_fx.measure import clock
from psg_fx.quantities.names import spelled
from psg_fx.reference.definitions import Answer
from support.graphs_of_nodes import GIN, batches, losses, made

CPU = torch.device("cpu")
MEGA = 1_000_000
SCALARS = 100  # bytes; the profiler also sees the numbers in `x + 1`


def test_peak_memory_of_one_known_allocation() -> None:
    x = torch.ones(1000, 250)
    assert MEGA <= clock.peak_memory(lambda: x + 1, CPU) <= MEGA + SCALARS


def test_peak_memory_is_the_worst_moment_not_the_sum() -> None:
    x = torch.ones(1000, 250)

    def step() -> Tensor:
        a = x + 1
        del a
        return (x + 2) * 3

    assert 2 * MEGA <= clock.peak_memory(step, CPU) <= 2 * MEGA + SCALARS


def test_peak_memory_does_not_count_what_was_there() -> None:
    held = [torch.ones(1000, 250)]
    assert clock.peak_memory(held.clear, CPU) <= SCALARS


def test_peak_of_events() -> None:
    assert clock.peak_of_events([]) == 0
    assert clock.peak_of_events([5, -5, 3, 4, -7]) == 7


def test_spread() -> None:
    assert clock.spread([2.0]) == (2.0, 0.0)
    assert clock.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0)


def run(*patterns: str, quantities: tuple[str, ...] = ("grads",)) -> BenchmarkReport:
    ex = zoo.example("mlp", batch=3)
    return benchmark.benchmark(
        ex.model,
        ex.loss_fn,
        ex.inputs,
        ex.targets,
        quantities=quantities,
        contenders=patterns,
        backend="eager",
        min_run_time=0.02,
        rounds=2,
        progress=False,
    )


@pytest.mark.slow
def test_every_contender_answers_and_is_measured() -> None:
    report = run("ordinary*", "loop", "vmap", quantities=("grads", "norms", "clipped_sum"))
    assert [r.failure for r in report.rows] == [None] * 9
    assert all(r.median_s and r.peak_bytes and r.first_call_s and r.blocks >= 2 for r in report.rows)
    assert min(r.ratio for r in report.rows[:3] if r.ratio) == 1.0
    assert all(r.error is not None and r.error < 1e-5 for r in report.rows[3:])
    read = json.loads(report.to_json())
    assert read["problem"]["batch"] == 3
    assert read["environment"]["torch"] == torch.__version__
    assert len(read["rows"]) == 9
    assert "ordinary-one-graph" in str(report)
    assert str(report).splitlines()[2].endswith("error")  # and no column for failures


@pytest.mark.rest  # so it does in test_cli.py, test_bench_takes_every_quantity
def test_any_quantity_may_race() -> None:
    ex = zoo.example("mlp", batch=3)
    report = benchmark.benchmark(
        ex.model,
        ex.loss_fn,
        ex.inputs,
        ex.targets,
        quantities=[Gram(), ClippedSum(max_norm=0.5), Projection(rank=2)],
        contenders=["psg-eager", "loop/gram"],
        backend="eager",
        min_run_time=0.02,
        rounds=1,
        progress=False,
    )
    assert [r.quantity for r in report.rows] == ["gram", "gram", "clipped_sum(max_norm=0.5)", "projection(rank=2)"]
    assert all(r.median_s and r.failure is None for r in report.rows)
    assert all(r.error is not None and r.error < 1e-5 for r in report.rows)


@pytest.mark.parametrize(
    ("quantity", "text"),
    [(Gram(), "gram"), (ClippedSum(0.5, per="parameter"), "clipped_sum(max_norm=0.5, per='parameter')")],
)
def test_quantities_are_labelled_by_what_is_unusual(quantity: Quantity, text: str) -> None:
    assert spelled(quantity) == text
    assert by_label([quantity]) == {text: quantity}


class Own(Quantity):
    """A quantity of somebody else."""

    field = "own"


def test_a_quantity_without_a_formula_is_not_compared() -> None:
    with pytest.raises(NotImplementedError, match="own"):
        from_grads(Own(), {"w": torch.ones(2, 3)}, {})


def test_clipping_of_materialised_gradients() -> None:
    grads = {"w": torch.tensor([[3.0, 0.0], [0.3, 0.0]]), "b": torch.tensor([4.0, 0.4])}
    answer = from_grads(ClippedSum(max_norm=1.0), grads, {})
    assert not isinstance(answer, Tensor)
    assert answer["w"].tolist() == pytest.approx([3 / 5 + 0.3, 0.0])
    assert answer["b"].item() == pytest.approx(4 / 5 + 0.4)
    mean = from_grads(MeanGrad(), grads, {})
    assert not isinstance(mean, Tensor)
    assert mean["b"].item() == pytest.approx(2.2)


def test_a_failing_and_a_wrong_contender_keep_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Problem) -> Computation:
        raise RuntimeError("no such thing\nmore")

    def wrong(problem: Problem) -> Computation:
        right = contenders.loop(problem, Grads())

        def step() -> Answer:
            answer = right()
            assert not isinstance(answer, Tensor)
            return {name: 1.1 * g for name, g in answer.items()}

        return step

    racers = [
        Contender("ordinary-eager", ORDINARY, contenders.ordinary_eager),
        Contender("broken", "grads", broken),
        Contender("wrong", "grads", wrong),
    ]
    monkeypatch.setattr(benchmark, "field_of", lambda quantities, patterns, peers: racers)
    report = run("*")
    assert [r.failure for r in report.rows] == [
        None,
        "RuntimeError: no such thing",
        "wrong answer: relative error 1.0e-01 > 0.01",
    ]
    assert report.rows[2].median_s is None
    assert "no such thing" in str(report)


def test_answers_of_a_random_model_are_not_compared() -> None:
    ex = zoo.example("encoder", batch=2, dropout=0.5)
    report = benchmark.benchmark(
        ex.model,
        ex.loss_fn,
        ex.inputs,
        ex.targets,
        contenders=["loop/grads"],
        backend="eager",
        min_run_time=0.01,
        rounds=1,
    )
    assert report.rows[0].failure is None
    assert "not compared" in str(report)


@pytest.mark.parametrize(
    ("got", "error"),
    [
        ({"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2)}, 0.0),
        ({"a": torch.tensor([1.0, 2.5]), "b": torch.zeros(2)}, 0.25),
        ({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0, 0.001])}, 0.5),
        ({"a": torch.tensor([1.0, float("nan")]), "b": torch.zeros(2)}, float("nan")),
    ],
)
def test_answer_error(got: dict[str, Tensor], error: float) -> None:
    want = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2)}
    assert judge.answer_error(got, want) == pytest.approx(error, rel=1e-5, nan_ok=True)


class OneSide(nn.Module):
    """A ReLU whose argument is 2⁻³⁰ for whoever adds up exactly, and zero where 1 + 2⁻³⁰ is rounded first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.weight + x).sub(1) * 2**20).relu() + self.weight.square()


def test_where_rounding_passes_a_kink_float64_decides() -> None:
    problem = Problem(OneSide(), lambda out: out.sum(), torch.full((4, 3), 2.0**-30), None, backend="eager")
    decides = judge.Judge(problem, {"grads": Grads()})
    exact = {"weight": torch.full((4, 3), 2.0**20 + 2)}
    rounded = {"weight": torch.full((4, 3), 2.0)}
    assert decides.error("grads", rounded) == 0
    assert not decides.asked_again
    assert decides.error("grads", exact) == 0
    assert decides.asked_again
    error = decides.error("grads", {"weight": torch.full((4, 3), 3.0)})
    assert error is not None
    assert error >= 0.5
    assert decides.error("norms", torch.ones(4)) is None


def test_float64_says_nothing_of_half_precision() -> None:
    problem = Problem(OneSide(), lambda out: out.sum(), torch.full((4, 3), 2.0**-30), None, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        decides = judge.Judge(problem, {"grads": Grads()})
        assert decides.error("grads", {"weight": torch.full((4, 3), 2.0**20 + 2)}) == 2.0**19
    assert not decides.asked_again


def test_unknown_names_are_refused() -> None:
    with pytest.raises(BadArgument, match="no contender computes 'gram'"):
        contenders.field_of(["gram"])
    with pytest.raises(BadArgument, match="no contender matches 'psg_fx'"):
        contenders.field_of(["grads"], ["psg_fx"])


@pytest.mark.rest  # those of ordinary steps answer above, and each compiles for seconds
@pytest.mark.inductor
@pytest.mark.parametrize(
    "contender",
    ["ordinary-one-graph", "ordinary-compiled", "vmap-compiled"],
)
def test_compiled_contenders(contender: str) -> None:
    report = benchmark.benchmark(
        nn.Linear(4, 3),
        F.mse_loss,
        torch.randn(3, 4),
        torch.randn(3, 3),
        quantities=("grads",),
        contenders=[contender],
        min_run_time=0.02,
        rounds=1,
    )
    assert [r.failure for r in report.rows] == [None]


@pytest.mark.rest  # problems of rows are those of tests/ragged
def test_samples_that_are_rows() -> None:
    """All but what takes samples for slices of the batch, with answers compared."""
    given = batches()[0]
    report = benchmark.benchmark(
        made(GIN), losses, given.whole.inputs, given.whole.targets, batch_dim=given.batch_dim, quantities=("norms",),
        contenders=["ordinary-eager", "ordinary-one-graph", "loop", "vmap", "psg-eager"], backend="eager",
        min_run_time=0.01, rounds=1, progress=False,
    )  # fmt: skip
    assert report.problem["batch"] == given.count
    assert [row.contender for row in report.rows if row.failure] == ["vmap"]
    assert "samples that are rows" in (report.rows[3].failure or "")
    assert "the loop over samples" in report.notes[0]
    assert (report.row("psg-eager", "norms") or report.rows[0]).error is not None
