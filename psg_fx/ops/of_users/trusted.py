"""Custom operators of which the user says that they keep samples apart: psg_fx cannot look inside one."""

from __future__ import annotations

from typing import TypeVar

from torch._ops import OpOverload, OpOverloadPacket

from psg_fx import op_table
from psg_fx.errors import BadArgument
from psg_fx.torch_private.ops import custom_op_name

Operator = TypeVar("Operator")
_OWN = ("aten", "prims", "prim")


def trust(op: Operator) -> Operator:
    """Say that a custom operator keeps samples apart: row i of what it returns is computed from row i alone, at every
    batch size and for all values, and so is the gradient that its backward gives.

    op: a `torch.library.custom_op`, or one or all overloads of an operator (`torch.ops.mylib.myop`,
    `torch.ops.mylib.myop.default`).  Returned as it is, so that `trust` can be a decorator.

    Without this word, a model that passes samples through an operator which is neither of torch's own nor composed of
    those is refused.  With it, the operator is still tried out on random values, and refused where samples mix; the
    ops that its backward runs are proven or tried out like all others, so another custom operator among them needs
    `trust` as well.

    Raises `BadArgument` for what is no custom operator.
    """
    op_table.enter(_name(op), trusted=True)
    return op


def is_trusted(op: OpOverload) -> bool:
    """Whether the user has vouched for the operator."""
    return op_table.known(op).trusted


def _name(op: object) -> str:
    """`mylib::myop`, with `.overload` for a single one."""
    if isinstance(op, OpOverload):
        name = f"{op._schema.name}.{op._schema.overload_name or 'default'}"
    elif isinstance(op, OpOverloadPacket):
        name = op._qualified_op_name
    else:
        name = custom_op_name(op) or ""
    if not name or name.partition("::")[0] in _OWN:
        raise BadArgument(
            f"trust() takes a custom operator, not {op if name else type(op).__name__}", where="psg_fx.trust(op)",
            why="torch's own ops have rules, and functions and autograd.Functions are looked into" if name
            else "only an operator is one op of a captured graph; what other code computes is looked into",
            fix="give what torch.library.custom_op returned, or torch.ops.<library>.<op>",
        )  # fmt: skip
    return name


__all__ = ["is_trusted", "trust"]
