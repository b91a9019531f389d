"""Arms that run only where a mask picks something: `if m.any(): out[m] = f(x[m])`, experts that nobody has chosen.

A graph holds what the program computes if every mask picks something (`program/decisions/emptiness.py`).  It serves
where some pick nothing, too, if the arms that are then left out change nothing.  To see that, the program is captured
again with some of the masks picking nothing, and compared with the graph as it then is (`emptied.py`).  An arm may
prepare for another one, or count; so masks are taken in groups, of any two either, both and none, and of many sizes.

Arms of which it is not seen are left out of the graph, which serves batches in which their masks pick nothing: those of
each sample pick nothing then, either.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from psg_fx.errors import CaptureFailed, PsgError
from psg_fx.graph import facts
from psg_fx.graph.nodes import call, written_before
from psg_fx.graph.same_op import draws
from psg_fx.ops.of_users.custom_call import custom_call
from psg_fx.program.code import is_theirs, origin
from psg_fx.program.decisions.emptiness import Branch, Branches, Place
from psg_fx.program.program import Program
from psg_fx.tensors import same_values
from psg_fx.torch_private.functional import Functional
from psg_fx.torch_private.tracer import READING

from ..independence.arguments import op_name
from .emptied import LISTING, PICKS, Emptied, said
from .reasons import NOT_ONE_GRAPH
from .safe_means import divide_by_one_for_none

aten = torch.ops.aten
MOST = 64
"""Branches that are looked at: each group of them is a capture, 17 for so many."""
_ALL = 4
"""Of so many, every group."""
FEW = 8
"""Of so many, groups of every size."""

Found = TypeVar("Found", bound=Functional)


def require_same_without(found: Found, program: Program, capture: Callable[[Program], Found]) -> Found:
    """The program without its masks among the outputs, once it is shown that it serves where some pick nothing."""
    branches = program.branches.found
    found, masks = _without_masks(found, branches)
    if len(branches) > MOST:
        raise _refused(branches, f"{len(branches)} times, of which {MOST} would be looked at")
    every = dict(enumerate(masks))
    divide_by_one_for_none(found.graph_module, masks)

    def checks_without(group: frozenset[int]) -> set[int] | None:
        """The checks of the arms of a group, if the program without these computes the same."""
        other = program.like()
        other.branches = Branches(branches, group, program.left_out)
        try:
            again, met = _without_masks(capture(other), other.branches.found)
        except PsgError:
            return None
        left = dict(zip(other.branches.numbers, met, strict=True))
        divide_by_one_for_none(again.graph_module, [left[k] for k in sorted(left.keys() - group)])
        empty = Emptied(found.graph_module, _of(every, group), _zeros(found))
        left_out = _checks_left_out(empty, found.graph_module, program, other)
        rest = Emptied(again.graph_module, _of(left, left.keys() & group), _zeros(again))
        return None if left_out is None or not _same((empty, found), (rest, again)) else left_out

    of_arms: set[int] = set()
    for group in _groups(len(branches)):
        left_out = checks_without(group)
        if left_out is None:
            alike = _by_place(branches, group)
            alone = [k for k in alike if checks_without(k) is None] if len(alike) > 1 else alike
            raise _refused([branches[k] for of_place in alone or alike for k in sorted(of_place)])
        of_arms |= left_out
    _only_where_picked(found.graph_module, program, masks, of_arms)
    without_unread_numbers(found.graph_module)
    return found


class ArmCounts(CaptureFailed):
    """It is not seen that arms change nothing where their masks pick nothing.  places: where these are asked for."""

    places: frozenset[Place] = frozenset()


def without_arms(program: Program, capture: Callable[[], Found]) -> Found:
    """The program as it is captured, without the arms of which it is not seen that they change nothing."""
    first, before = None, program.left_out
    while True:
        try:
            found = capture()
            if first is None or not _by_draws(found.graph_module, program):
                return found
            places: frozenset[Place] = frozenset()
        except CaptureFailed as failure:
            last = frozenset(branch.place for branch in program.branches.found[-1:])  # perhaps it ends in a failure
            places = failure.places if isinstance(failure, ArmCounts) else last if first is None else frozenset()
            first = first or failure
        if places <= program.left_out:
            program.leave_out(before)
            raise first  # that of the code itself, all arms in place
        program.leave_out(program.left_out | places)


def _by_draws(gm: GraphModule, program: Program) -> bool:
    """Whether random numbers say which of the arms run that are left out."""
    checks = zip(_checks(gm, program).values(), program.output.assumed, strict=True)
    return any(map(draws, facts.ancestors(check for check, (_, of) in checks if of == facts.ARM)))


def arm_fails(program: Program, error: Exception) -> CaptureFailed | None:
    """The user's code raises, after it has been told that masks pick something: `if x.isnan().any(): return None`."""
    branches, frames = program.branches.found, traceback.extract_tb(error.__traceback__)
    if not branches or not frames or not is_theirs(origin(frames[-1].filename)):
        return None
    return _refused(branches[-1:])


def _groups(count: int) -> Iterator[frozenset[int]]:
    """Of any two numbers below this, both, either and none are in some group; and groups of few and of nearly all, for
    code that counts arms.
    """
    every = frozenset(range(count))
    if count <= _ALL:
        yield from (frozenset(k for k in every if bits >> k & 1) for bits in range(1, 1 << count))
        return
    halves = [frozenset(k for k in every if k >> bit & 1) for bit in range(max(count - 1, 0).bit_length())]
    sizes = range(1, count) if count <= FEW else (1, 2, count - 2, count - 1)
    groups = [*(group for half in halves for group in (half, every - half)), *(frozenset(range(n)) for n in sizes)]
    yield from dict.fromkeys(group for group in groups if group)
    yield every


_NOT_SEEN = "and it is not seen that the arm changes nothing where it does not"


def _by_place(branches: Sequence[Branch], group: Iterable[int]) -> list[frozenset[int]]:
    """The numbers of a group that are of one place each."""
    places = dict.fromkeys(branches[k].place for k in sorted(group))
    return [frozenset(k for k, branch in enumerate(branches) if branch.place == place) for place in places]


def _refused(branches: Sequence[Branch], reason: str = _NOT_SEEN) -> CaptureFailed:
    failure = ArmCounts(
        NOT_ONE_GRAPH, where="; ".join(dict.fromkeys(branch.line for branch in branches)),
        why=f"the code branches on values of a tensor, whether a mask picks anything, {reason}",
        fix="leave the branch out, and loop over all (what is read by a mask that picks nothing has no rows; a mean is "
        "x[m].sum() / m.sum().clamp(min=1)), replace it by torch.where, or decide it outside the model",
    )  # fmt: skip
    failure.places = frozenset(branch.place for branch in branches)
    return failure


def _of(masks: Mapping[int, list[Node]], numbers: Iterable[int]) -> list[Node]:
    """The masks of these branches."""
    return [mask for k in sorted(numbers) for mask in masks[k]]


def _without_masks(found: Found, branches: Sequence[Branch]) -> tuple[Found, list[list[Node]]]:
    """Without the last outputs, the masks, and what these say of each branch."""
    if not branches:
        return found, []
    count = sum(len(branch.masks) for branch in branches)
    results: Any = facts.outputs(found.graph_module)
    found.graph_module.graph.output_node().args = (tuple(results[:-count]),)
    signature = replace(found.graph_signature, output_specs=list(found.graph_signature.output_specs[:-count]))
    masks = map(said, results[-count:])
    return replace(found, graph_signature=signature), [[next(masks) for _ in branch.masks] for branch in branches]


def _checks(gm: GraphModule, program: Program) -> dict[int, Node]:
    """The outputs that are checks of the code, by their places."""
    results: Any = facts.outputs(gm)
    end = len(results) - sum(axis.rows.ids is not None for axis in program.call.axes)
    return {k: results[k] for k in range(end - len(program.output.assumed), end)}


def _checks_left_out(empty: Emptied, gm: GraphModule, program: Program, other: Program) -> set[int] | None:
    """Take the checks out that are made of rows that nothing picks, if the other run has not made them; their places,
    or None where it has made others.
    """
    lacking = len(program.output.assumed) - len(other.output.assumed)
    found = {k for k, check in _checks(gm, program).items() if empty.depends(check)} if lacking else set()
    if len(found) != lacking or _left_behind(program) != _left_behind(other):
        return None
    kept = tuple(result for k, result in enumerate(facts.outputs(empty.gm)) if k not in found)
    empty.gm.graph.output_node().args = (kept,)
    return found


def _left_behind(program: Program) -> Any:
    """What a run leaves in the Python around it, and what its output has beside tensors."""
    written = [(entry.label, str(entry.leaves)) for entry in program.written]
    return written, program.output.spec, str(dict(program.output.constants))


def _same(*both: tuple[Emptied, Functional]) -> bool:
    """Whether a capture computes what is left of another one."""
    for empty, _ in both:
        _say_zeros_alike(empty)
        for node in _checks_of_sizes(empty.gm):
            empty.gm.graph.erase_node(node)  # numbers of rows, which are not the same
        empty.gm.graph.eliminate_dead_code()
    held = [_held(empty.gm, program) for empty, program in both]
    numbers: dict[Any, int] = {}
    same = len(held[0]) == len(held[1]) and all(map(_hold_the_same, *held))
    computed = [_computed(empty.gm, numbers) for empty, _ in both] if same else [[], [0]]
    return computed[0] == computed[1]


def _say_zeros_alike(empty: Emptied) -> None:
    """What is zero everywhere is, whatever it is computed from."""
    first = next(node for node in empty.gm.graph.nodes if node.op != "placeholder")
    for node in [n for n in empty.gm.graph.nodes if n in empty.zero and n.users]:
        if not isinstance(value := node.meta["val"], torch.Tensor):
            continue  # parts of one that is
        with empty.gm.graph.inserting_before(first):  # only compared, never run
            zeros = empty.gm.graph.call_function(aten.zeros.default, (str(value.shape),), {"dtype": value.dtype})
        node.replace_all_uses_with(zeros)


def _zeros(found: Functional) -> list[Node]:
    """The constants that are zero everywhere."""
    specs = zip(facts.placeholders(found.graph_module), found.graph_signature.input_specs, strict=True)
    held = ((node, found.constants.get(spec.target or "")) for node, spec in specs)
    return [node for node, value in held if isinstance(value, torch.Tensor) and not value.any()]


def _held(gm: GraphModule, program: Functional) -> list[tuple[InputKind, Any]]:
    """What the placeholders hold; constants that nothing reads are taken out."""
    held = []
    for node, spec in zip(facts.placeholders(gm), program.graph_signature.input_specs, strict=True):
        constant = spec.kind is InputKind.CONSTANT_TENSOR
        if constant and not node.users:
            gm.graph.erase_node(node)
        else:
            held.append((spec.kind, program.constants[spec.target or ""] if constant else spec.target))
    return held


def _hold_the_same(one: tuple[InputKind, Any], other: tuple[InputKind, Any]) -> bool:
    tensors = [value for _, value in (one, other) if isinstance(value, torch.Tensor)]
    if len(tensors) < 2:
        return one == other
    return tensors[0].shape == tensors[1].shape and same_values(*tensors)


def _computed(gm: GraphModule, numbers: dict[Any, int]) -> list[int]:
    """What the outputs are, and what has effects, in their order: the same numbers for the same."""
    found: dict[Node, int] = {}
    told, drawn = [], 0
    for place, node in enumerate(gm.graph.nodes):
        plain = torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{found[n]}")
        custom = custom_call(node.target)
        key: tuple[Any, ...] = (node.op, repr(custom.fixed) if custom else node.target, repr(plain))
        if node.op == "placeholder":
            key = (node.op, place)
        elif draws(node):
            key, drawn = (*key, drawn), drawn + 1
        found[node] = numbers.setdefault(key, len(numbers))
        if not node.users:
            told.append(found[node])
    return told


def _only_where_picked(gm: GraphModule, program: Program, masks: Sequence[list[Node]], of_arms: set[int]) -> None:
    """Checks of arms count only where the masks pick something whose rows they look at."""
    output = gm.graph.output_node()
    checks = _checks(gm, program)
    for of_branch in masks if of_arms else ():
        empty = Emptied(gm, of_branch)
        for k in (k for k in sorted(of_arms) if empty.depends(checks[k])):
            with written_before(output, checks[k].meta):
                picks = call(gm, aten.any.default, of_branch[0])
                both = call(gm, aten.logical_and.default, checks[k], picks)
            output.replace_input_with(checks[k], both)


def without_unread_numbers(gm: GraphModule) -> None:
    """Take out the numbers that only told which arm to take, and the lists that only told what to go through."""
    gm.graph.eliminate_dead_code()
    checks = _checks_of_sizes(gm)
    for node in reversed(list(gm.graph.nodes)):
        lists = op_name(node) in (*LISTING, *PICKS)
        if not lists and node.target not in READING:
            continue
        after = facts.descendants([node])
        read = after - {node, *checks}
        if not any(n.op == "output" or n.is_impure() or not (lists or _is_number(n)) for n in read):
            for unread in reversed([n for n in gm.graph.nodes if n in after | {node}]):
                gm.graph.erase_node(unread)
    gm.graph.eliminate_dead_code()


def _checks_of_sizes(gm: GraphModule) -> list[Node]:
    """What export has checked of numbers of rows."""
    checks = ("aten._assert_scalar", "aten.sym_constrain_range", "aten.sym_constrain_range_for_size")
    return [node for node in gm.graph.nodes if op_name(node) in checks]


def _is_number(node: Node) -> bool:
    return not isinstance(node.meta.get("val"), torch.Tensor)
