"""What is said of writes and switches that a captured graph cannot follow."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from psg_fx.errors import NotYetSupported
from psg_fx.program.code import line_of
from psg_fx.source import is_library

SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_DETACH = (torch.Tensor.detach_, torch.detach_)
_INIT = nn.init.__file__
_SWITCHES = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_BACKWARD = (torch.autograd.backward, torch.Tensor.backward)


def computed_outside(value: torch.Tensor) -> NotYetSupported:
    """The refusal of a tensor that is made of parameters before the program runs."""
    return NotYetSupported(
        "the loss or the model reads a tensor that was computed outside of it and requires gradients",
        where=f"a tensor of shape {tuple(value.shape)}",
        why="the way from the parameters to it is not part of the graph",
        fix="compute it inside the model or the loss, or detach it if it is meant as a constant",
    )


def of_an_earlier_call(label: str) -> NotYetSupported:
    """The refusal of a tensor that a step has stored, as the code does, and that the code reads now."""
    return NotYetSupported(
        f"the code reads {label}, which an earlier call has computed of parameters", where=label,
        why="its gradient belongs to that call, and would be missing in this one; an ordinary forward keeps the graph",
        fix="compute it at every call (model.train(), where a model keeps it in evaluation only), or keep a detached "
        "tensor, which is a constant",
    )  # fmt: skip


def view_by_a_bit(name: str) -> NotYetSupported:
    """The refusal of a tensor whose memory does not hold its numbers."""
    return NotYetSupported(
        f"{name} is a view that a bit negates or conjugates", where=name,
        why="compiled code reads what lies in its memory: the numbers without the sign",
        fix=f"make a tensor of its own: {name.rpartition('.')[2]} = z.conj().imag.resolve_neg().resolve_conj()",
    )  # fmt: skip


def written_outside(func: Callable[..., Any]) -> NotYetSupported:
    """The refusal of a write into what no step writes back."""
    return NotYetSupported(
        "the code writes into a tensor that is no buffer of the model or the loss", where=line_of_call(func),
        why="a step writes the buffers of modules and what lies in attributes, and this would be written once, now",
        fix="register it: self.register_buffer(name, tensor); or put a new tensor in its place (self.x = self.x * 0.9)",
    )  # fmt: skip


def hidden_write(func: Callable[..., Any]) -> NotYetSupported:
    """The refusal of a write that changes a value and not its gradient."""
    if any(frame.f_code.co_filename == _INIT for frame, _ in traceback.walk_stack(sys._getframe(1))):
        return NotYetSupported(
            "a layer with parameters is made while the model runs", where=line_of_call(func),
            why="they are none of the model's, so that no step asks for their gradients, and drawn anew at every call",
            fix="make it in __init__; a layer without parameters (elementwise_affine=False) may be made here",
        )  # fmt: skip
    return NotYetSupported(
        "a tensor is written into where autograd does not see it",
        where=line_of_call(func),
        why="under torch.no_grad(), or through .detach() or .data, its value changes and its gradient does not",
        fix="write into a clone, or say what is meant: h + (new - h).detach() has the value new and the gradient of h; "
        "what the first batch sets (data-dependent initialisation) is set by running the model once before the step",
    )  # fmt: skip


def require_no_switch(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a backward pass, a tensor that becomes another, and to switch the gradient of a parameter, or of what
    depends on some, on or off.
    """
    if func in _BACKWARD:
        raise _own_backward(func)
    if func == SET_DATA or (func in _DETACH and args[0].requires_grad):
        raise _becomes_another(func)
    if func not in _SWITCHES:
        return
    tensor, on = args[0], bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    if on != tensor.requires_grad and (tensor.requires_grad or isinstance(tensor, nn.Parameter)):
        raise NotYetSupported(
            f"the code switches a gradient {'on' if on else 'off'}", where=line_of_call(func),
            why="which parameters have gradients is known before a graph is made, and holds for all of it",
            fix="where a module is to be frozen for some uses: torch.func.functional_call(module, {name: p.detach() "
            "for name, p in module.named_parameters()}, x); switch it between calls, and the step follows",
        )  # fmt: skip


def _becomes_another(func: Callable[..., Any]) -> NotYetSupported:
    detached = func in _DETACH
    what = "detaches a tensor in place" if detached else "assigns to the .data of a tensor"
    return NotYetSupported(
        f"the code {what}", where=line_of_call(func),
        why="a captured graph has values, and no tensors that become others",
        fix="z = z.detach() instead of z.detach_()" if detached
        else "use the new tensor instead; h + (new - h).detach() has the value new and the gradient of h; write into a "
        "frozen parameter (an average of others) after the step",
    )  # fmt: skip


def _own_backward(func: Callable[..., Any]) -> NotYetSupported:
    return NotYetSupported(
        "the code runs a backward pass of its own", where=line_of_call(func),
        why="it adds to the .grad of parameters and tensors, and a step leaves these alone",
        fix="take the gradients by torch.autograd.grad(..., create_graph=True)",
    )  # fmt: skip


def line_of_call(func: Callable[..., Any]) -> str:
    """The user's line that calls `func`."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))
    own = next((f for f in frames if not is_library(f.f_code.co_filename)), None)
    return line_of(own) if own is not None else getattr(func, "__name__", str(func))
