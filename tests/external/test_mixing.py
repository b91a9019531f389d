"""psg_fx refuses every program whose samples mix."""

from __future__ import annotations

import pytest

from external.mixing import LAYERS, programs
from external.program import Contender, Program, drop_in, with_loss
from psg_fx.errors import NotYetSupported, SamplesMixed
from support.selection import one_in


def refused(program: Program, contender: Contender) -> None:
    with pytest.raises((SamplesMixed, NotYetSupported)) as error:
        contender(program.problem())
    assert all(line in str(error.value) for line in ("\n  where  ", "\n  why    ", "\n  fix    "))


@pytest.mark.parametrize("program", one_in(3, programs()))
def test_samples_that_mix_are_refused(program: Program) -> None:
    refused(program, with_loss)


@pytest.mark.parametrize("program", one_in(3, [p for p in programs() if p.name.split("/")[1] in LAYERS]))
def test_samples_that_mix_in_the_model_are_refused_without_a_loss(program: Program) -> None:
    refused(program, drop_in)
