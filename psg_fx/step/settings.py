"""Everything that `transform` is told beside the model and the loss, checked."""

from __future__ import annotations

import difflib
import functools
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from psg_fx.errors import BadArgument
from psg_fx.planner import rates
from psg_fx.planner.budget import in_bytes
from psg_fx.planner.cost import Device, Fused
from psg_fx.program.arguments.batch_dim import BatchDim
from psg_fx.program.state import ParamFilter
from psg_fx.quantities.base import Join, Joins, Quantity, check_choice, check_flag
from psg_fx.quantities.own import check_asks
from psg_fx.torch_private.compiler import inductor_modes, inductor_options

FUSED_KERNELS = "psg_fx.fused_kernels"
"""The option that offers all kernels of psg_fx to plans for a CUDA device (True), or leaves all work to libraries, on a
CPU, too (False).
"""

KEPT_DTYPE = "psg_fx.kept_dtype"
"""The option that keeps gradients in bfloat16 until the norms are known."""

COMPARE_FIRST = "psg_fx.compare_first"
"""The option that holds the first answer of each graph against the user's own code on one sample, by default."""

_OWN = "psg_fx."
"""How options begin that are not torch.compile's."""


@dataclass(frozen=True)
class Settings:
    """The arguments of `psg_fx.transform` of the same names.  Raises BadArgument."""

    quantities: tuple[Quantity, ...]
    params: ParamFilter = None
    batch_dim: BatchDim = 0
    loss_reduction: str = "sum"
    backend: str = "inductor"
    mode: str | None = None
    options: dict[str, Any] | None = None
    dynamic: bool | None = None
    reuse_outputs: bool = False
    memory_budget: float | None = None
    progress: bool = True
    accumulate: bool = False
    warm: str | None = None

    def __post_init__(self) -> None:
        _check_quantities(self.quantities)
        if not (self.params is None or isinstance(self.params, str) or callable(self.params)):
            object.__setattr__(self, "params", _names(self.params))
        if self.backend not in ("eager", "inductor"):  # a list of the others loads them all
            _check_backend(self.backend)
        if self.dynamic is not None:
            check_flag("transform", "dynamic", self.dynamic)
        for name in ("reuse_outputs", "progress", "accumulate"):
            check_flag("transform", name, getattr(self, name))
        check_choice("transform", "loss_reduction", self.loss_reduction, ("sum", "mean"))
        _check_mode(self.mode, self.backend)
        if self.reuse_outputs and self.backend != "inductor":
            why = "it says where the code that inductor generates puts its values"
            raise _no_effect("reuse_outputs has", self.backend, "reuse_outputs=True", why)
        if self.warm is not None:
            check_choice("transform", "warm", self.warm, ("eager",))
            if self.backend != "inductor":
                raise _no_effect("warm has", self.backend, "warm=...", "it says what runs while inductor compiles")
        if self.options is not None:
            _check_options(self.options, self.backend)
        if self.memory_budget is not None:
            in_bytes(self.memory_budget, 1)

    @functools.cached_property
    def joins_of_processes(self) -> Joins:
        """How every field of the output follows from those of several processes."""
        found: dict[str, Join] = {"losses": "cat"}
        for quantity in self.quantities:
            found |= quantity.joins_of_processes()
        return found

    @functools.cached_property
    def joins_of_groups(self) -> Joins:
        """The same where gradients are those of groups, and each group has all its samples in one process."""
        of_groups = {field for q in self.quantities if not q.over_samples for field in q.joins_of_processes()}
        means = ("mean", "variance")
        return {f: "groups" if f in of_groups and j in means else j for f, j in self.joins_of_processes.items()}

    @property
    def reads(self) -> set[str]:
        """The keywords of a call that quantities read."""
        return {name for quantity in self.quantities for name in quantity.reads}

    @property
    def reads_each(self) -> set[str]:
        """Those of them that have an entry for every sample."""
        return {name for quantity in self.quantities for name in quantity.reads_each}

    @property
    def is_compiled(self) -> bool:
        """Whether steps are compiled by inductor, whose files on disk are kept beside those of psg_fx."""
        return self.backend == "inductor"

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """The options that are torch.compile's."""
        if self.options is None:
            return None
        return {name: value for name, value in self.options.items() if not name.startswith(_OWN)}

    @property
    def _fused_kernels(self) -> Any:
        """Whether kernels of psg_fx are asked for; None: it is not said."""
        return (self.options or {}).get(FUSED_KERNELS)

    @property
    def compares_first(self) -> bool:
        """Whether first answers are held against the user's own code."""
        return (self.options or {}).get(COMPARE_FIRST) is not False

    def kernels_in_cpp(self, device: torch.device) -> bool:
        """Whether kernels of psg_fx in C++ are compiled."""
        return device.type == "cpu" and self.is_compiled and self._fused_kernels is not False

    def own_kernels(self, device: torch.device) -> bool:
        """Whether kernels of psg_fx may be in a graph that are not part of its plan, for the loops of recurrent layers:
        in C++, or of Triton, where they were timed or are asked for.
        """
        told = self._fused_kernels
        wanted = rates.fused_kernels_pay(device) if told is None else bool(told)
        asked = device.type == "cuda" and self.is_compiled and wanted and _has_triton()
        return asked or self.kernels_in_cpp(device)

    def compiles_kernels(self, device: torch.device) -> bool:
        """Whether kernels of psg_fx may be in steps where that needs no choice of a plan: in C++, or of Triton."""
        if device.type == "cuda":
            return self._fused_kernels is not False and _has_triton()
        return self.kernels_in_cpp(device)

    def rates_of(self, device: torch.device) -> Device:
        """What plans for a device go by."""
        told = self._fused_kernels
        rounded = (self.options or {}).get(KEPT_DTYPE) is not None
        table = rates.device(device.type, self.replays)
        table = replace(table, compiled=self.compiles_kernels(device), rounded=rounded)
        if told is None:
            timed = rates.fused_kernels_pay(device) and _has_triton()
            return replace(table, fused=Fused.TIMED if timed else Fused.NONE)
        if told and device.type == "cuda" and not _has_triton():
            raise BadArgument(
                "the fused kernels need Triton", where=f"transform(options={{{FUSED_KERNELS!r}: True}})",
                why="they are written in its language", fix="pip install triton, or leave the option out",
            )  # fmt: skip
        return replace(table, fused=Fused.ALL if told else Fused.NONE)

    @property
    def replays(self) -> bool:
        """Whether a CUDA device is to replay its kernels as a graph."""
        told = (inductor_modes().get(self.mode or "default") or {}) | (self.options or {})
        return self.is_compiled and bool(told.get("triton.cudagraphs"))


def needs_loss(name: str, why: str) -> BadArgument:
    """The error for an argument that means nothing without a loss."""
    verb = "need" if name.endswith("s") else "needs"
    return BadArgument(
        f"{name} {verb} a loss", where=f"transform({name}=...)", why=why, fix=f"pass loss_fn, or leave {name} out"
    )


def without_loss(name: str, why: str) -> BadArgument:
    """The error for an argument that means nothing with a loss."""
    return BadArgument(
        f"{name} is for steps without a loss", where=f"transform(model, loss_fn, {name}=...)", why=why,
        fix=f"leave {name} out, or leave loss_fn out",
    )  # fmt: skip


def _no_effect(
    what: str, backend: str, argument: str, why: str = "it is the compiler's, and none compiles"
) -> BadArgument:
    """The error for an argument that the backend does not read."""
    return BadArgument(
        f"{what} no effect with backend={backend!r}", where=f"transform({argument})", why=why,
        fix='use backend="inductor", or leave it out',
    )  # fmt: skip


def as_sequence(quantities: Any) -> tuple[Any, ...]:
    """One quantity or several as a tuple; what is neither is in it as it is, for `Settings` to refuse."""
    several = isinstance(quantities, Iterable) and not isinstance(quantities, (type, str))
    return tuple(quantities) if several else (quantities,)


def _check_backend(backend: str) -> None:
    """Refuse what torch.compile does not know."""
    every = torch.compiler.list_backends(exclude_tags=())
    if backend not in every:
        usual = torch.compiler.list_backends()
        near = difflib.get_close_matches(str(backend), dict.fromkeys(["inductor", "eager", *every]), 1)
        raise BadArgument(
            f"backend={backend!r} is unknown", where="transform(backend=...)",
            why=f"known are {', '.join(dict.fromkeys(['inductor', 'eager', *usual]))}",
            fix=f'backend="{near[0]}"' if near else "use one of those",
        )  # fmt: skip


def _check_mode(mode: Any, backend: str) -> None:
    """Refuse what is no mode of inductor, and a mode where none is read."""
    if mode is None:
        return
    if backend in ("inductor", "eager"):
        check_choice("transform", "mode", mode, tuple(inductor_modes()))
    if backend == "eager":
        raise _no_effect(f"mode={mode!r} has", backend, "mode=...")


def _check_options(options: Any, backend: str) -> None:
    """Refuse what is neither an option of psg_fx nor one that the backend reads."""
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise BadArgument(
            f"options is {options!r}", where="transform(options={...})", why="it has the values of options by name",
            fix=f"a dict: options={{{FUSED_KERNELS!r}: True}}",
        )  # fmt: skip
    for name in options:
        if name.startswith(_OWN):
            check_choice("transform", "options", name, (FUSED_KERNELS, KEPT_DTYPE, COMPARE_FIRST))
        elif backend == "inductor" and name.replace("-", "_") not in inductor_options():
            near = " or ".join(map(repr, difflib.get_close_matches(name, inductor_options())))
            raise BadArgument(
                f"options has {name!r}, which is unknown", where="transform(options={...})",
                why="inductor has no option of that name",
                fix=near or "torch._inductor.list_options() has the names",
            )  # fmt: skip
        elif backend == "eager":
            raise _no_effect(f"options has {name!r}, which has", backend, "options={...}")
    for name in (FUSED_KERNELS, COMPARE_FIRST):
        if options.get(name) is not None and not isinstance(options[name], bool):
            raise BadArgument(
                f"{name}={options[name]!r} is neither True nor False",
                where=f"transform(options={{{name!r}: ...}})", why="it is a switch",
                fix=f"options={{{name!r}: True}} or False, or leave it out",
            )  # fmt: skip
    kept = options.get(KEPT_DTYPE)
    if kept not in (None, torch.bfloat16):
        raise BadArgument(
            f"gradients cannot be kept in {kept!r}", where=f"transform(options={{{KEPT_DTYPE!r}: ...}})",
            why="it is a dtype with the range of float32, so that no gradient overflows, and there is one",
            fix=f"options={{{KEPT_DTYPE!r}: torch.bfloat16}}",
        )  # fmt: skip


def _check_quantities(quantities: Sequence[Any]) -> None:
    for quantity in quantities:
        if not isinstance(quantity, Quantity):
            name = quantity.__name__ + " (a class: call it)" if isinstance(quantity, type) else repr(quantity)
            raise BadArgument(
                f"{name} is not a quantity", where="transform(quantities=...)",
                why="each quantity fills a field of the output",
                fix="use psg_fx.Grads(), Norms(), ClippedSum(max_norm), Gram() or another of psg_fx.Quantity",
            )  # fmt: skip
        check_asks(quantity)
    fields = [q.field for q in quantities]
    twice = {f for f in fields if fields.count(f) > 1}
    if twice or not quantities:
        raise BadArgument(
            f"two quantities fill out.{min(twice)}" if twice else "no quantity is asked for",
            where="transform(quantities=...)", why="each quantity fills a field of its own",
            fix="ask for each kind once; make a second step for others" if twice else "ask for one, e.g. Grads()",
        )  # fmt: skip


def _names(params: Any) -> tuple[str, ...]:
    """Names that are given one after the other, perhaps by a generator."""
    names = tuple(params) if isinstance(params, Iterable) else (params,)
    for name in names:
        if not isinstance(name, str):
            kind = f"has a {type(name).__name__}" if isinstance(params, Iterable) else f"is a {type(params).__name__}"
            raise BadArgument(
                f"params {kind}", where="transform(params=...)", why="parameters are asked for by name",
                fix="names of model.named_parameters(), with * and ?, or a function of name and parameter",
            )  # fmt: skip
    return names


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
