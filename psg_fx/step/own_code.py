"""Whether the user's own code fails, with or without psg_fx: it is run on one sample, or on the batch, as it stands."""

from __future__ import annotations

import contextlib
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from psg_fx.errors import BadArgument, CaptureFailed, NotYetSupported, PsgError, SamplesMixed, first_line
from psg_fx.generators import generators_kept
from psg_fx.passes.capture.functions.flexible import attention_as_formula
from psg_fx.passes.capture.reasons import NOT_ONE_GRAPH, user_line
from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.packed import is_packed, packed
from psg_fx.program.changes.effects import nothing_left
from psg_fx.program.changes.untouched import untouched
from psg_fx.step.hints import function_of, parameters_of, with_hint
from psg_fx.step.mistakes import check_model, check_values
from psg_fx.tensors import short_name
from psg_fx.torch_private.modes import autocast_now, autocast_unseen, hooks_of_all_modules, no_modes
from psg_fx.torch_private.quiet import quiet

_Made = TypeVar("_Made")
_Found = tuple[BadArgument, Exception]
_SHOWN = 6
"""Arguments that an error describes."""
_OWN_LOSS = "if the model computes its loss itself: loss_fn=lambda out: out.loss"


def built(build: Callable[[], _Made], model: nn.Module, loss_fn: Any, call: Call) -> _Made:
    """What `build` makes, without torch's own remarks.

    Raises:
        BadArgument: nothing was captured, and the code does not run on one sample without psg_fx either.
        NotYetSupported: the code has written to gradients or attributes of the modules' tensors, which are put back.
    """
    check_model(model)
    check_values(model)
    try:
        with generators_kept(*{tensor.device for tensor in call.tensors}), untouched(model, loss_fn), quiet():
            return build()
    except CaptureFailed as refusal:
        found = _own_error(model, loss_fn, call) if refusal.what == NOT_ONE_GRAPH else None
        if found is None:
            raise with_hint(refusal, model, call) from refusal.__cause__
    except (SamplesMixed, NotYetSupported) as refusal:
        raise with_hint(refusal, model, call) from refusal.__cause__
    raise found[0] from found[1]


class blamed:
    """While open, an error of torch is replaced by that of the user's own code, if that fails, too: a capture does not
    see everything that a run sees (dtypes of a product, an index that is too large).

    Raises BadArgument.
    """

    __slots__ = ("_call", "_loss_fn", "_model")

    def __init__(self, model: nn.Module, loss_fn: Any, call: Call) -> None:
        self._model, self._loss_fn, self._call = model, loss_fn, call

    def __enter__(self) -> None:
        """Nothing is done until something fails."""

    def __exit__(self, kind: Any, failure: BaseException | None, traceback: Any) -> None:
        if not isinstance(failure, _OF_TORCH) or isinstance(failure, PsgError):
            return
        found = _own_error(self._model, self._loss_fn, self._call, whole=True)
        if found is not None:
            raise found[0] from failure


_OF_TORCH = (RuntimeError, TypeError, IndexError, ValueError)


def _own_error(model: nn.Module, loss_fn: Any, call: Call, whole: bool = False) -> _Found | None:
    """What fails when the code runs on the first sample alone (whole: or on all of them), and the exception."""
    if call.batch_size() == 0 or call.axes:
        return None
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(no_modes())  # a fake mode would put fake tensors into the model
            stack.enter_context(tried(model, loss_fn))
            pairs = list(zip(call.tensors, call.dims, strict=True))
            batches = [[copied(t, d) for t, d in pairs], *([[copied(t, None) for t, _ in pairs]] if whole else [])]
        except Exception:  # no memory to set the state aside, or tensors of another kind: torch's reason stands
            return None
        stack.enter_context(torch.enable_grad())
        found = (_run(model, loss_fn, call, tensors, size) for tensors, size in zip(batches, ("1", ""), strict=False))
        return next((failure for failure in found if failure is not None), None)


def _run(model: nn.Module, loss_fn: Any, call: Call, tensors: list[torch.Tensor], size: str) -> _Found | None:
    """What fails on these tensors: as many samples as `size` says, or all."""
    (args, kwargs), (targets, target_kwargs) = packed(call.rebuild(tensors))
    try:
        output = model(*args, **kwargs)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, TypeError) and (text := _misfit(model, args, kwargs)):
            return _not_taken("model", model, args, kwargs, text, loss_fn is not None), error
        return _fails("model", error, model, _named("input", args, kwargs), size), error
    if loss_fn is None:
        return None
    try:
        loss_fn(output, *targets, **target_kwargs)
    except Exception as error:
        if isinstance(error, TypeError) and (text := _misfit(loss_fn, (output, *targets), target_kwargs)):
            return _not_taken("loss", loss_fn, (output, *targets), target_kwargs, text, True), error
        values = {"the output": output, **_named("target", targets, target_kwargs)}
        return _fails("loss", error, model, values, size), error
    return None


def _named(kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names that psg_fx has for them."""
    return {f"{kind}_{key}": value for key, value in (*enumerate(args), *kwargs.items())}


def copied(tensor: torch.Tensor, dim: int | None, sample: int = 0) -> torch.Tensor:
    """A copy of a sample, or of all there is."""
    one = tensor if dim is None else tensor.narrow(dim, sample, 1)
    return one.detach().clone().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def tried(model: nn.Module, loss_fn: Any, written: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
    """While open, the code runs as it stands, without warnings, and leaves nothing.  written: as `unchanged` has."""
    with (
        nothing_left((model, loss_fn, *hooks_of_all_modules())), unchanged(model, loss_fn, written=written),
        attention_as_formula(),  # no CPU has the backward of torch's own
        autocast_unseen(autocast_now()),  # the caller's cache of cast weights stays as it is
        warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")  # said before, while it was captured
        yield


@contextlib.contextmanager
def unchanged(*roots: Any, written: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
    """The modules' tensors, attributes and the generators are afterwards what they were, whatever runs in between.

    written: the tensors that may be written into, if that is known; the values of others are not set aside.
    """
    modules = {m: None for root in roots if isinstance(root, nn.Module) for m in root.modules()}
    everything = [t for m in modules for group in (m._parameters, m._buffers) for t in group.values() if t is not None]
    values = [(t, t.data) for t in dict.fromkeys(everything if written is None else written)]
    places = [d for m in modules for d in (vars(m), m._parameters, m._buffers, m._modules)]
    held = [(place, dict(place)) for place in places]
    try:
        with generators_kept(*{t.device for t in everything}), torch.inference_mode(False):
            for tensor, value in values:
                tensor.data = value.clone()
            yield
    finally:
        for place, before in held:
            _put_back(place, before)
        for tensor, value in values:
            tensor.data = value


def _put_back(place: dict[str, Any], before: Mapping[str, Any]) -> None:
    for name in [name for name in place if name not in before]:
        del place[name]
    for name, value in before.items():
        if place.get(name) is not value:
            place[name] = value


def _misfit(thing: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Why a function or module cannot be called with these arguments, or ""."""
    try:
        signature = inspect.signature(function_of(thing))
    except (TypeError, ValueError):  # written in C
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _signature(thing: Any) -> str:
    """`cross_entropy(input, target, ...)`: the name, what must be given, and whether there is more."""
    name = f"{type(thing).__name__}.forward" if isinstance(thing, nn.Module) else getattr(thing, "__name__", "loss_fn")
    parameters = parameters_of(thing).values()
    needed = [str(p).partition(":")[0] for p in parameters if p.default is p.empty]
    return f"{name}({', '.join([*needed, *(['...'] if len(needed) < len(parameters) else [])])})"


_HOW = {
    "model": "a tuple or list of inputs holds positional arguments, a dict keyword arguments; one argument that is a "
    "list goes into a tuple: step(([x1, x2],), y)",
    "loss": "step(inputs, targets): targets may be a tensor, a tuple (loss_fn(output, *targets)), a dict "
    "(loss_fn(output, **targets)), or left out",
}


def _not_taken(
    what: str, thing: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], text: str, has_loss: bool
) -> BadArgument:
    given = [f"{len(args)} positional argument{'s' * (len(args) != 1)}"] if args or not kwargs else []
    given += [f"the keyword{'s' * (len(kwargs) != 1)} {', '.join(map(str, kwargs))}"] if kwargs else []
    return BadArgument(
        f"the {what} does not take these {'inputs' if what == 'model' else 'targets'}", where=_signature(thing),
        why=f"it is called with {' and '.join(given)}: {text}",
        fix=_HOW[what] if has_loss else "a step without a loss is called as the model is: step(*args, **kwargs)",
    )  # fmt: skip


def _fails(what: str, error: Exception, model: nn.Module, values: Mapping[str, Any], size: str) -> BadArgument:
    call = f"model(x[:{size}])" if what == "model" else f"loss_fn(model(x[:{size}]), y[:{size}])"
    first = first_line(error)
    seen = [f"{name} is {_described(value)}" for name, value in values.items()]
    seen[_SHOWN:] = [f"{len(seen) - _SHOWN} more"] if len(seen) > _SHOWN else []
    fix = f"the error is that of your code: make {call.replace('[:]', '')} run by itself"
    if what == "loss" and not isinstance(values["the output"], torch.Tensor):
        fix += f"; {_OWN_LOSS}"
    fix = _elsewhere(model, values) or fix
    return BadArgument(
        f"the {what} does not run on " + ("a batch of one sample" if size else "this batch, though on one sample"),
        where=_where(what, error, model),
        why=f"{type(error).__name__}: {first}" + (f"  ({'; '.join(seen)})" if seen else ""), fix=fix,
    )  # fmt: skip


def _elsewhere(model: nn.Module, values: Mapping[str, Any]) -> str:
    """What lies on another device than the parameters, or ""; scalars on the CPU may."""
    homes = {str(p.device) for p in model.parameters()}
    found = [n for n, v in values.items() if isinstance(v, torch.Tensor) and v.dim() and str(v.device) not in homes]
    if not homes or not found:
        return ""
    there, here = values[found[0]].device, ", ".join(sorted(homes))
    return f"{', '.join(found)} on {there}, the parameters on {here}: move one of them"


def _where(what: str, error: Exception, model: nn.Module) -> str:
    """The user's line, and the module whose forward failed."""
    parts = [line] if (line := user_line(error)) else []
    if what == "model" and (inside := _module(error, model)):
        parts.append(inside)
    return ";  ".join(parts) or f"in the {what}"


def _module(error: Exception, model: nn.Module) -> str:
    names = {id(m): name for name, m in model.named_modules()}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            return f"in {names[id(module)]} ({type(module).__name__})"
    return ""


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{short_name(value.dtype)} {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value))}"
    if is_packed(value):
        return f"a PackedSequence of {_described(value.data)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return f"a {type(value).__name__}"
