"""Quantities of the user's own: what they return, and how they fail, in words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from psg_fx.algebra.ask import Ask
from psg_fx.algebra.gradient import ParameterGradient
from psg_fx.algebra.members import COUNT, IDS, MEMBERS
from psg_fx.errors import BadArgument, PsgError, first_line
from psg_fx.graph.facts import expr
from psg_fx.program.decisions.branches import for_every_batch_size
from psg_fx.program.reads.observe import observing_backward
from psg_fx.quantities.base import Extra, Quantity, Results, Shapes, Weights
from psg_fx.quantities.clipped_sum import COUNTED, ClippedSum
from psg_fx.quantities.names import KINDS

_EVERY_STEP = ("losses", "joins", "together", "indices", "path", "about", "complete", "top")
"""What each output has, or the results over a dataset."""
_OF_PSG_FX = frozenset({*KINDS, "clip_factors"})
"""Fields that quantities of psg_fx fill."""
_GIVEN = frozenset({MEMBERS.name, IDS.name, COUNT.name})
_OF_AXES = re.compile(r"(members|ids)\.\d+")
"""Further inputs of psg_fx's own: of groups, of axes of rows."""
_FIX = "write it with torch's ops on the tensors it is given: no branch on values, nothing written in place"


def check_asks(quantity: Quantity) -> None:
    """Refuse a quantity that asks for nothing, or fills what every step has."""
    with _its_own(quantity, "asks"):
        asks = () if type(quantity).asks is Quantity.asks else quantity.asks()
    if isinstance(asks, Ask) or not all(isinstance(ask, Ask) for ask in asks):
        raise BadArgument(
            f"{type(quantity).__name__}.asks() gives {asks}", where="transform(quantities=...)",
            why="a quantity may ask for several contractions of the gradients",
            fix="return a tuple of psg_fx.algebra.asks: (SquaredNorm(),)",
        )  # fmt: skip
    if not asks or not quantity.field or quantity.field in _EVERY_STEP:
        what = "asks for nothing" if not asks else f"fills the field {quantity.field!r}"
        raise BadArgument(
            f"{type(quantity).__name__} {what}", where="transform(quantities=...)",
            why="a quantity asks for contractions of the gradients, and fills a field of its own",
            fix="let asks() return some, and give field a name",
        )  # fmt: skip


def weights_of(
    quantities: Sequence[Quantity], results: Results, extras: Mapping[str, torch.Tensor], names: Sequence[str],
    rows: Any,
) -> Weights:  # fmt: skip
    """The weights of all.  names: of the parameters.  rows: how many weights each has (a tensor: not known).

    Raises BadArgument, also where two quantities make weights of one name.
    """
    found: dict[str, Mapping[str, torch.Tensor]] = {}
    for quantity in quantities:
        with _its_own(quantity, "weights", results, extras):
            made = quantity.weights(results, extras)
        if is_own(quantity):
            _require_weights(quantity, made, names, rows)
        if taken := found.keys() & made.keys():
            raise _shared(quantity, "weights", min(taken))
        found.update(made)
    return found


def _require_weights(quantity: Quantity, made: Any, names: Sequence[str], rows: Any) -> None:
    """Refuse what has no weight for each parameter and row."""
    for name, of in made.items() if isinstance(made, Mapping) else [("", made)]:
        for weights in [_at(of, parameter) for parameter in names] if isinstance(of, Mapping) else [of]:
            if isinstance(of, Mapping) and _is_weights(weights, rows):
                continue
            shown = list(weights.shape) if isinstance(weights, torch.Tensor) else weights
            raise _fails(
                quantity, "weights", f"it gives {shown} for {name!r}, and every parameter has a weight for each row",
                'return {"name": {parameter: weights [B]}}, with every parameter',
            )  # fmt: skip


def _at(of: Mapping[str, Any], name: str) -> Any:
    """What a mapping has there, or makes; None for nothing."""
    try:
        return of[name]
    except KeyError:
        return None


def _is_weights(value: Any, rows: Any) -> bool:
    """Whether it is a vector, of as many as there are rows."""
    if not isinstance(value, torch.Tensor) or value.ndim != 1:
        return False
    return isinstance(rows, torch.Tensor) or expr(value.shape[0]) == expr(rows)


def extras_of(quantities: Sequence[Quantity], gradients: Mapping[str, ParameterGradient]) -> dict[str, Extra]:
    """The further inputs of all.  Raises BadArgument, also where a quantity of the user's own and another one name one
    alike: what a call gives for it would be that of either.
    """
    found: dict[str, Extra] = {}
    of_own: set[str] = set()
    for quantity in quantities:
        with _its_own(quantity, "extras"):
            made = quantity.extras(gradients)
        if is_own(quantity):
            _require_free(quantity, made)
        taken = found.keys() & made.keys()
        if taken and (is_own(quantity) or taken & of_own):
            raise _shared(quantity, "extras", min(taken))
        of_own.update(made if is_own(quantity) else ())
        found.update(made)
    return found


def _require_free(quantity: Quantity, names: Iterable[str]) -> None:
    """Refuse further inputs by the names of those that graphs have anyway."""
    taken = _GIVEN if isinstance(quantity, ClippedSum) else {*_GIVEN, COUNTED}
    if found := [name for name in names if name in taken or _OF_AXES.fullmatch(name)]:
        kind = type(quantity).__name__
        raise BadArgument(
            f"{kind}.extras names {found[0]!r}, which is an input of psg_fx's own", where=f"{kind}.extras",
            why="it would be given in place of the value of the call",
            fix=f"choose another name, such as {quantity.field}_{found[0]}",
        )  # fmt: skip


def _shared(quantity: Quantity, method: str, name: str) -> BadArgument:
    kind = type(quantity).__name__
    return BadArgument(
        f"{kind}.{method} names {name!r}, which another quantity of the step names as well", where=f"{kind}.{method}",
        why="names of weights and extras are those of all quantities of a step, and one would read the other's numbers",
        fix=f"begin the name with the quantity's field: {quantity.field}_{name}",
    )  # fmt: skip


def no_weights(name: str) -> BadArgument:
    """The error for an ask whose weights no quantity makes."""
    return BadArgument(
        f"an ask reads the weights {name!r}, and no quantity of the step makes them", where="asks",
        why="a weighted sum needs its weights", fix=f'let weights() return {{"{name}": {{parameter: weights [B]}}}}',
    )  # fmt: skip


def no_input(name: str) -> BadArgument:
    """The error for an ask that reads what no quantity names."""
    return BadArgument(
        f"an ask reads {name!r}, and no quantity of the step names it", where="asks",
        why="a graph has inputs for extras alone", fix=f"name {name!r} in extras, and give it in values",
    )  # fmt: skip


def of_call(quantity: Quantity, method: str, shapes: Shapes, given: Mapping[str, Any]) -> Any:
    """What its method "resolved" or "values" makes of the keyword arguments of a call.  Raises BadArgument."""
    try:
        return getattr(quantity, method)(shapes, given)
    except Exception as error:
        if isinstance(error, PsgError) or not is_own(quantity):
            raise
        missing = [name for name in quantity.reads if given.get(name) is None]
        kind, keywords = type(quantity).__name__, "".join(f", {name}=..." for name in missing or quantity.reads)
        raise BadArgument(
            f"{kind} needs {', '.join(missing)}" if missing else f"{kind}.{method} fails on what the call gives",
            where=f"step(inputs, targets{keywords})", why=f"{kind}.{method} raises {type(error).__name__}: {error}",
            fix="pass it to the call" if missing else f"pass what {kind}.{method} takes",
        ) from error  # fmt: skip


def no_extra(quantity: Quantity, name: str) -> BadArgument:
    """The error for a value that no graph asked for."""
    kind = type(quantity).__name__
    return BadArgument(
        f"{kind}.values gives {name!r}, which its extras do not name", where=f"{kind}.values",
        why="a call gives values for the further inputs of the graph", fix=f"name {name!r} in {kind}.extras",
    )  # fmt: skip


def is_own(quantity: Quantity) -> bool:
    """Whether it is the user's, and none of psg_fx."""
    return not type(quantity).__module__.startswith("psg_fx.")


def _is_new(quantity: Quantity) -> bool:
    """Whether it is the user's, and not derived from one of psg_fx."""
    return all(k is Quantity or not k.__module__.startswith("psg_fx.") for k in type(quantity).__mro__)


def finished(quantity: Quantity, results: Results, weights: Weights, count: Any) -> Mapping[str, Any]:
    """Its fields: each a tensor, or a mapping of tensors by name.  Raises BadArgument."""
    with _its_own(quantity, "finish", results, weights):
        found = quantity.finish(results, weights, count)
    given: Any = found
    fields: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    values = [v for field in fields.values() for v in (field.values() if isinstance(field, Mapping) else [field])]
    if not fields or not all(isinstance(value, torch.Tensor) for value in values):
        kinds = ", ".join(dict.fromkeys(type(v).__name__ for v in values)) or type(found).__name__
        raise _fails(quantity, "finish", f"it returns {kinds}, and a step returns tensors by the names of fields",
                     'return {"field": tensor}, or {"field": {name: tensor}}')  # fmt: skip
    if quantity.field not in fields:
        raise _fails(quantity, "finish", f"it fills {', '.join(map(repr, fields))}, and its field is "
                     f"{quantity.field!r}", f'return {{"{quantity.field}": ..}}')  # fmt: skip
    if taken := [field for field in fields if field in _EVERY_STEP]:
        raise _fails(quantity, "finish", f"it fills {taken[0]}, which every step has", "give the field another name")
    if _is_new(quantity) and (taken := [f for f in fields if f in _OF_PSG_FX and f != quantity.field]):
        why = f"it fills {taken[0]!r} as well, which is a field of psg_fx's own: one would take the other's place"
        raise _fails(quantity, "finish", why, "give the field another name")
    return fields


@contextlib.contextmanager
def _its_own(quantity: Quantity, method: str, *given: Any) -> Iterator[None]:
    """While open, a method of the quantity runs; those of psg_fx are not looked after."""
    if not is_own(quantity):
        yield
        return
    tensors = [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]
    versions = [t._version for t in tensors]
    sizes = [size for t in tensors for size in t.shape if expr(size).free_symbols]
    try:
        # what it reads is compared at every call, as what the loss reads
        with observing_backward(), for_every_batch_size():
            yield
    except PsgError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, KeyError) and given:
            why += f"; there are {', '.join(map(repr, given[0])) or 'none'}"
        raise _fails(quantity, method, why, _FIX) from error
    if not all(expr(size).free_symbols for size in sizes):
        raise _fails(quantity, method, "it makes a number of how many rows there are, as a loop over them does", _FIX)
    if versions != [t._version for t in tensors]:
        raise _fails(quantity, method, "it writes into what it is given, which others read as well", _FIX)


def _fails(quantity: Quantity, method: str, why: str, fix: str) -> BadArgument:
    name = type(quantity).__name__
    return BadArgument(f"{name}.{method} cannot be part of a graph", where=f"{name}.{method}", why=why, fix=fix)
