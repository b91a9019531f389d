"""Every row of the test matrix as a program: one way each in which a parameter can meet the samples."""

from __future__ import annotations

from external.program import Problem, Program
from support.cases import CASES, Case


def programs() -> list[Program]:
    """One for each row; the loss is the sum over all outputs, but for rows with a loss of their own."""
    return [Program(case.name, Row(case), refused=case.refused, family="traps") for case in CASES]


class Row:
    """Makes the problem of a row."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __call__(self) -> Problem:
        model = self.case.model()
        loss = self.case.loss_fn(model) if self.case.penalty or self.case.criterion else None
        return Problem(model, self.case.data(), loss_fn=loss, batch_dim=self.case.dims, out_dim=self.case.out_dim)
