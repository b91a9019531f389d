"""Mistakes in what psg_fx is given that show at once: kinds of models, losses and calls that have no meaning."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from psg_fx.errors import BadArgument, NotYetSupported
from psg_fx.passes.capture.unseen import view_by_a_bit
from psg_fx.planner.plan import Plan
from psg_fx.program.ambient import captures_here
from psg_fx.program.arguments.call import Call
from psg_fx.program.code import users_line
from psg_fx.program.objects import has_own_functions, is_made_of_others
from psg_fx.program.state import IN_PLACE, Tracked
from psg_fx.quantities.base import Quantity
from psg_fx.tensors import has_bits, leaves_of
from psg_fx.torch_private import sharded
from psg_fx.torch_private.fakes import FakeTensor

_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")


def check_model(model: Any) -> None:
    """Refuse what is no model, and models that a capture cannot look into."""
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type)
        raise BadArgument(
            f"model is {f'the class {model.__name__}' if is_class else f'a {type(model).__name__}'}, not an nn.Module",
            where="transform(model)", why="its parameters are found by name",
            fix=f"make one: {model.__name__}(...)" if is_class else "wrap the function in an nn.Module",
        )  # fmt: skip
    for name, module in model.named_modules():
        where = f"{name} ({type(module).__name__})" if name else type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise NotYetSupported(
                "the model is TorchScript" if not name else "a part of the model is TorchScript", where=where,
                why="torch.export follows Python code, and TorchScript has none",
                fix="use the module that it was made of: torch.compile does what TorchScript was for",
            )  # fmt: skip
        _check_processes(name, module, where)
        if type(module).__module__.startswith(_QUANTISED):
            raise NotYetSupported(
                "a part of the model is quantised", where=where,
                why="quantised layers have no gradients, and end those of what lies before them",
                fix="use the model before torch.ao.quantization.convert or quantize_dynamic",
            )  # fmt: skip


def _check_processes(name: str, module: nn.Module, where: str) -> None:
    """Refuse a module that communicates with other processes, or of which this one has a part."""
    if kind := sharded.wrapper(module):
        way = "model" if not name else f"model.{name}"
        how = "add up over processes by psg_fx.distributed.reduce(out)"
        if kind == "DataParallel":
            how = "give each device a process of its own, whose sums psg_fx.distributed.reduce(out) adds up"
        raise NotYetSupported(
            f"the model is wrapped in {kind}" if not name else f"a part of the model is wrapped in {kind}", where=where,
            why="it communicates in hooks and outside of the graph",
            fix=f"pass what is inside ({way}.module), and {how}"
            if kind != "FullyShardedDataParallel" else "shard the model by torch.distributed.fsdp.fully_shard instead",
        )  # fmt: skip
    if sharded.is_fully_sharded(module):
        raise NotYetSupported(
            "the model is sharded over processes", where=where,
            why="a step without a loss leaves whole gradients, and one made before the model was sharded reads whole "
            "parameters", fix="give the loss, after sharding: psg_fx.transform(model, loss_fn)",
        )  # fmt: skip
    for key, parameter in module._parameters.items():
        if sharded.is_sharded_tensor(parameter):
            raise NotYetSupported(
                f"the parameter {f'{name}.{key}' if name else key} is a DTensor", where=where,
                why="this process may hold a slice of it, and norms of slices are not those of gradients",
                fix="slice the model by parallelize_module or shard it by fully_shard, and give a loss, after that: "
                "psg_fx.transform(model, loss_fn)",
            )  # fmt: skip
    if hook := sharded.hook_of_processes(module):
        raise NotYetSupported(
            f"{name or 'the model'} has the hook {hook} of torch.distributed", where=where,
            why="it communicates with other processes while the model runs",
            fix="use the model without it; fully_shard and parallelize_module are understood where a loss is given "
            "after them, and sums over processes are psg_fx.distributed.reduce(out)",
        )  # fmt: skip


def refuse_rows(call: Call, what: str, where: str, fix: str) -> None:
    """Refuse what is had of samples alone that have a place in a dim of their own."""
    if call.axes:
        raise NotYetSupported(
            f"{what} of rows of samples" if what != "a step" else "rows of samples without a loss", where=where,
            why="a sample is no slice of the inputs: its rows lie anywhere, and others point to them", fix=fix,
        )  # fmt: skip


def check_rows(memory_budget: Any, sliced: bool) -> None:
    """Refuse what is not had of samples that are rows."""
    where = "transform(batch_dim=psg_fx.Rows(...))"
    if memory_budget is not None:
        raise NotYetSupported(
            "memory_budget with rows of samples", where=where, why="a batch is cut into parts where its samples lie",
            fix="leave it out, and pass batches of fewer rows",
        )  # fmt: skip
    if sliced:
        raise NotYetSupported(
            "rows of samples with a model that is sliced over processes", where=where,
            why="what is cut and added up is proven of samples in a dim of their own", fix="run it on one process",
        )  # fmt: skip


def check_graphs(call: Call, model: nn.Module, tracked: Tracked) -> None:
    """Refuse inputs and targets that are computed from parameters that are asked."""
    carrying = [(name, t) for name, t in zip(call.names, call.tensors, strict=False) if t.requires_grad]
    if not carrying:
        return
    with IN_PLACE:
        own = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if tracked.aliases[name]}
    for name, tensor in carrying:
        parameter = next((own[id(leaf)] for leaf in leaves_of(tensor) if id(leaf) in own), None)
        if parameter is not None:
            raise NotYetSupported(
                f"{name} is computed from the parameter {parameter}, outside of the model", where="step(...)",
                why="the gradient has a part that goes through it, and the way there is not in the graph",
                fix="compute it inside the model or the loss, or detach it if it is meant as data",
            )  # fmt: skip


def check_loss(loss_fn: Any) -> None:
    """Refuse what is no loss function."""
    if isinstance(loss_fn, type):
        raise BadArgument(
            f"loss_fn is the class {loss_fn.__name__}", where="transform(model, loss_fn)",
            why="it is called as loss_fn(output, *targets), and a class then makes an object, not a loss",
            fix=f"make one: transform(model, {loss_fn.__name__}())",
        )  # fmt: skip
    if isinstance(loss_fn, torch.jit.ScriptModule):
        raise NotYetSupported(
            "the loss is TorchScript", where="transform(model, loss_fn)",
            why="torch.export follows Python code, and TorchScript has none",
            fix="give the module that it was made of",
        )  # fmt: skip
    if not callable(loss_fn):
        raise BadArgument(
            f"loss_fn is a {type(loss_fn).__name__}", where="transform(model, loss_fn)",
            why="it is called as loss_fn(output, *targets)",
            fix="pass a function or a module, such as torch.nn.functional.cross_entropy",
        )  # fmt: skip


def require_a_gradient(plan: Plan) -> None:
    """Refuse a loss that no parameter reaches, as autograd does."""
    gradients = [p.gradient for p in plan.parameters]
    if gradients and not any(gradient.terms for gradient in gradients):
        raise BadArgument(
            "the loss depends on none of the model's parameters", where="loss_fn(model(inputs), targets)",
            why="every gradient would be zero: the output is not used, detached, or computed under torch.no_grad()",
            fix="let the loss follow from the output; where zeros are meant: transform(.., params=[..]) gives them for "
            "parameters that are named and not used",
        )  # fmt: skip


def check_apart(step: nn.Module, model: nn.Module) -> None:
    """Refuse a model that has its own step as a module."""
    for name, module in model.named_modules():
        if module is step:
            raise BadArgument(
                f"the model has its own step as its module {name}",
                where=f"model.{name} = psg_fx.transform(model, ...)",
                why="a step has the modules of its model, and would be one of its own: train() and state_dict() go "
                "through all of them, and would never end",
                fix=f"keep it outside of the model, or in a list: self.steps = [psg_fx.transform(self, ...)]; and del "
                f"model.{name}",
            )  # fmt: skip


def check_tensors(model: nn.Module) -> None:
    """Refuse a model whose layers wait for their first inputs, or whose tensors have functions of their own; and one in
    which `torch.func.functional_call` has put other tensors.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in (*parameters.items(), *model.named_buffers()):
        if has_own_functions(tensor) and not is_lazy(tensor):
            kind = type(tensor).__name__
            raise NotYetSupported(
                f"{name} is a {kind}, which has a __torch_function__ of its own", where=name,
                why=f"a graph has torch's ops, and {kind} has others for some",
                fix="use a plain nn.Parameter or tensor, and write what the class does in the forward pass",
            )  # fmt: skip
        if is_made_of_others(tensor):
            raise NotYetSupported(
                f"{name} is a {type(tensor).__name__}, a wrapper around other tensors", where=name,
                why="a graph has torch's ops on plain tensors, and a wrapper has no memory of its own",
                fix="keep the tensors that it wraps as parameters or buffers, and compute the weight of them in the "
                "forward pass",
            )  # fmt: skip
        if not is_lazy(tensor) and has_bits(tensor):
            raise view_by_a_bit(name)
        if is_lazy(tensor):
            raise BadArgument(
                f"{name} is not initialised", where="transform(model)",
                why="a lazy layer has its shape from the first inputs that it sees",
                fix="call the model once on a batch before the step",
            )  # fmt: skip
        if name in parameters and tensor.is_inference():
            raise BadArgument(
                f"{name} was made under torch.inference_mode()", where="transform(model)",
                why="torch lets no tensor of that mode have a gradient",
                fix="make the model outside of the mode (a copy by copy.deepcopy has tensors of its own)",
            )  # fmt: skip
        if name in parameters and not isinstance(tensor, nn.Parameter):
            raise NotYetSupported(
                f"in the place of the parameter {name} is a plain tensor", where=name,
                why="a step reads the model's own parameters, and torch.func.functional_call puts others there",
                fix="write the values into the parameters before the call, as model.load_state_dict(...) does",
            )  # fmt: skip


def check_values(model: nn.Module) -> None:
    """Refuse a model without values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise BadArgument(
                f"{name} is on the meta device", where="transform(model)", why="it has a shape and no values",
                fix="take off what offloads the model; or model.to_empty(device=...), and load its state",
            )  # fmt: skip
        if isinstance(tensor, FakeTensor):
            raise BadArgument(
                f"{name} is a fake tensor", where="transform(model)", why="it has a shape and no values",
                fix="make the model outside of FakeTensorMode",
            )  # fmt: skip


def check_outside() -> None:
    """Refuse a call of a step in code that another step captures."""
    if captures_here():
        raise NotYetSupported(
            "the model or the loss calls a step of psg_fx", where=users_line(sys._getframe(1)),
            why="a graph is made of torch's ops, and a step runs a graph of its own",
            fix="call it before, and pass what it returns as inputs or targets; for gradients inside of a model: "
            "torch.autograd.grad(..., create_graph=True)",
        )  # fmt: skip


def check_keywords(
    given: Mapping[str, Any], quantities: Sequence[Quantity], call: str = "step(inputs, targets)",
    known: Sequence[str] = ("inputs", "targets", "num_samples", "groups", "num_groups", "out"),
) -> None:  # fmt: skip
    """Refuse keyword arguments of a call that nothing reads, such as a misspelt one.  known: those of every call."""
    read = {name for quantity in quantities for name in quantity.reads}
    if not (unknown := sorted(set(given) - read)):
        return
    name = unknown[0]
    meant = get_close_matches(name, [*known, *read], 1, 0.7) or [
        k for k in known if len(name) > 2 and k.startswith(name)
    ]
    raise BadArgument(
        f"{call.partition('(')[0]}() got {', '.join(unknown)}", where=_with_keyword(call, "..."),
        why="no quantity of this step reads it" if not meant else f"did you mean {meant[0]}?",
        fix=(call if meant[0] in ("inputs", "targets") else _with_keyword(call, f"{meant[0]}=...")) if meant else
        _set_by(name, quantities) or
        "WeightedSum() and ClippedSum(weighted=True) read weights=, Dots() reads directions=; what the model reads "
        "goes into a dict of inputs: step({name: value, ...}, targets)",
    )  # fmt: skip


def _with_keyword(call: str, keyword: str) -> str:
    return f"{call[:-1]}, {keyword})"


def _set_by(name: str, quantities: Sequence[Quantity]) -> str:
    """How what a quantity has, and no call gives, is set."""
    owner = next((q for q in quantities if name in getattr(q, "__dataclass_fields__", ())), None)
    return "" if owner is None else f"set it where the quantity is made: {type(owner).__name__}({name}=...)"


def no_inputs(given: Mapping[str, Any]) -> BadArgument:
    """The error for `step(**batch)`."""
    return BadArgument(
        "step() got no inputs" + (f", but {', '.join(sorted(given))}" if given else ""),
        where="step(inputs, targets)", why="keywords of the call are for quantities: weights=, directions=, out=",
        fix="pass the dict itself, whose names are then those of the model's arguments: step(batch), or "
        "step(batch, targets)",
    )  # fmt: skip


def too_many(count: int) -> BadArgument:
    """The error for `step(x, mask, y)`."""
    return BadArgument(
        f"step() got {count} positional arguments", where="step(inputs, targets)",
        why="the first are the inputs, the second the targets",
        fix="put several into a tuple or a dict: step((x1, x2), y), step(x, (y1, y2)), step({name: x, ...}, y)",
    )  # fmt: skip


def check_file(path: Any, where: str) -> None:
    """Refuse what is not the path of a file that can be written: none at all, a folder, or one in a folder that is not
    there.
    """
    if not isinstance(path, str | os.PathLike) or not str(path) or Path(path).is_dir():
        raise BadArgument(
            f"{path!r} is no file", where=where, why="one is written", fix='name one: "report.html"',
        )  # fmt: skip
    folder = Path(path).parent
    if not folder.is_dir():
        raise BadArgument(
            f"there is no folder {folder}", where=where, why="a file is written into it",
            fix="make it first: os.makedirs; or name another file",
        )  # fmt: skip
