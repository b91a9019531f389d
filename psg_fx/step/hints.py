"""The way out of a refusal that the model itself offers: an argument that was not given, an option of its config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import nn

from psg_fx.errors import CaptureFailed, NotYetSupported, PsgError, SamplesMixed
from psg_fx.program.arguments.call import Call
from psg_fx.program.program import holds_tensors

_ABOUT_MASKS = re.compile(r"mask|pad_token|padding")
_ABOUT_EXPERTS = re.compile(r"expert|router")


def with_hint(refusal: PsgError, model: nn.Module, call: Call) -> PsgError:
    """The refusal, and what the model offers, where the refused line is about that."""
    hints = (
        _mask(refusal, model, call), _experts(refusal, model), _balance(refusal, model), _objects(refusal, call),
        _layerdrop(refusal, model), _shared(refusal, call),
    )  # fmt: skip
    if (hint := next(filter(None, hints), None)) is None:
        return refusal
    return type(refusal)(refusal.what, where=refusal.where, why=refusal.why, fix=f"{hint}; or {refusal.fix}")


def _mask(refusal: PsgError, model: nn.Module, call: Call) -> str:
    """A model of sequences makes a mask where none is given."""
    takes = any("attention_mask" in parameters_of(m) for m in model.modules())
    given = any(name.endswith("attention_mask") for name in call.names)
    if not takes or given or not _ABOUT_MASKS.search(refusal.where):
        return ""
    return "pass attention_mask, which the model makes itself where none is given"


def _experts(refusal: PsgError, model: nn.Module) -> str:
    """Models of transformers loop over those experts that were hit, unless told otherwise."""
    loops = isinstance(refusal, CaptureFailed | NotYetSupported) and _ABOUT_EXPERTS.search(refusal.where)
    offers = any(getattr(m, "_can_set_experts_implementation", bool)() for m in model.modules())
    if not loops or not offers or not any("Expert" in type(m).__name__ for m in model.modules()):
        return ""
    return 'model.set_experts_implementation("grouped_mm"), which computes the same without a branch'


def _balance(refusal: PsgError, model: nn.Module) -> str:
    """A loss that balances experts counts the tokens of all samples."""
    asked = any(getattr(getattr(m, "config", None), "output_router_logits", False) for m in model.modules())
    if not asked or not isinstance(refusal, SamplesMixed) or not _ABOUT_EXPERTS.search(refusal.where):
        return ""
    return "model.config.output_router_logits = False: the loss that balances experts is one of all samples"


def _layerdrop(refusal: PsgError, model: nn.Module) -> str:
    """A random number says whether the batch as a whole goes through a layer."""
    rates = {name: getattr(m, "layerdrop", None) for name, m in model.named_modules() if m.training}
    drawn = [
        f"model.{name}.layerdrop".replace("..", ".") for name, rate in rates.items() if isinstance(rate, float) and rate
    ]
    if not drawn or not isinstance(refusal, CaptureFailed) or "branches on values" not in refusal.why:
        return ""
    return f"{' = '.join(drawn)} = 0.0: whether a layer runs is drawn for all samples together"


def _objects(refusal: PsgError, call: Call) -> str:
    """Tensors in an object that pytrees do not look into are those of the capture, for every batch size."""
    held = [type(value) for _, value in call.constants if holds_tensors(value)]
    if not held or not isinstance(refusal, CaptureFailed):
        return ""
    name = held[0].__name__
    how = f"dataclass({name})" if is_dataclass(held[0]) else f"pytree_node({name}, flatten, unflatten)"
    return f"pass the tensors of the {name} themselves, or say that it has some: torch.utils._pytree.register_{how}"


def _shared(refusal: PsgError, call: Call) -> str:
    """What is said to be the same for all samples may have a row for each."""
    if not isinstance(refusal, CaptureFailed) or call.axes:
        return ""
    given = zip(call.names, call.tensors, call.dims, strict=True)
    rows = [name for name, t, dim in given if dim is None and t.ndim and t.shape[0] == call.batch_size()]
    return f"say in batch_dim that {rows[0]} has a row for each sample" if rows else ""


def function_of(thing: Any) -> Any:
    """What is called."""
    return thing.forward if isinstance(thing, nn.Module) else thing


def parameters_of(thing: Any) -> Mapping[str, inspect.Parameter]:
    """What a function or module takes; nothing is known of those written in C."""
    try:
        return inspect.signature(function_of(thing)).parameters
    except (TypeError, ValueError):
        return {}
