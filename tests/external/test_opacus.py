"""The layers and argument grids of Opacus' own gradient tests, through psg_fx with and without its loss."""

from __future__ import annotations

import pkgutil

import pytest

pytest.importorskip("opacus")
pytest.importorskip("hypothesis")

from external import opacus_cases
from external.program import Contender, check, drop_in, with_loss

FEW, MORE = 1, 6
"""Cases of each file that are tested, spread over all of them, by the ordinary run and by `make test-all`."""


IN_TURN = {(file, (with_loss, drop_in)[k % 2]) for k, file in list(enumerate(opacus_cases.FILES))[::3]}
"""A third of the files, with both contenders: the rows have every layer of Opacus, too."""


@pytest.mark.parametrize(
    ("file", "contender"),
    [
        pytest.param(file, contender, marks=[] if (file, contender) in IN_TURN else pytest.mark.rest)
        for file in opacus_cases.FILES
        for contender in (with_loss, drop_in)
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("count", [FEW, pytest.param(MORE, marks=pytest.mark.rest)])
def test_cases_of_opacus(file: str, contender: Contender, count: int) -> None:
    programs = opacus_cases.programs_of(file)[:: 1 if contender is with_loss else -1]
    assert len(programs) >= FEW
    for program in programs[:: -(-len(programs) // count)]:
        check(program, contender)


@pytest.mark.parametrize(
    ("file", "contender"),
    [
        ("embedding_test", with_loss),
        ("group_norm_test", drop_in),
        ("sequence_bias_test", drop_in),
        ("conv2d_test", with_loss),
        ("conv2d_test", drop_in),
    ],
)
def test_an_empty_batch_has_gradients_without_rows(file: str, contender: Contender) -> None:
    call = next(call for call in opacus_cases.record(file) if call.empty)
    problem = call.problem()
    expected = {name: (0, *p.shape) for name, p in problem.model.named_parameters()}
    assert {name: tuple(g.shape) for name, g in contender(problem).items()} == expected


def test_every_file_that_checks_gradients_is_read() -> None:
    from opacus.tests import grad_samples

    others = {"common", "embedding_norm_sample_test"}
    assert {found.name for found in pkgutil.iter_modules(grad_samples.__path__)} - others == set(opacus_cases.FILES)
