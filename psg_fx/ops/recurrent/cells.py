"""The loops of `layers.py` for a CUDA device: a step is one product and one kernel (`cell_kernels.py`).

`lstm_cells` and its like have the signature and results of `lstm` and its like.  Of torch's calls a step of an LSTM is
eight there and five back; here two and two.  A cell is an op that writes into what it is given: on a CUDA device a
kernel of Triton, elsewhere torch's calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from psg_fx.ops.define import define_op, of_torch_alone
from psg_fx.ops.recurrent import layers as recurrent
from psg_fx.tensors import HALF

DTYPES = (torch.float32, *HALF)
"""What the kernels compute with, in float32; float64 is left to torch's calls."""

_LIBRARY = torch.library.Library("psg_fx", "FRAGMENT")


def _cell(schema: str, run: Callable[..., None]) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    return getattr(torch.ops.psg_fx, name).default


def _launch(name: str, state: Tensor, tensors: tuple[Tensor, ...]) -> None:
    from psg_fx.ops.recurrent import cell_kernels  # Triton is loaded where there is something to launch

    cell_kernels.launch(getattr(cell_kernels, name), tensors, *state.shape)


def _lstm_cell(gates: Tensor, c: Tensor, h_new: Tensor, c_new: Tensor, squashed: Tensor) -> None:
    if gates.is_cuda:
        return _launch("lstm_kernel", c, (gates, c, h_new, c_new, squashed))
    i, f, g, o = gates.chunk(4, -1)
    for gate in (i, f, o):
        gate.sigmoid_()
    torch.mul(f, c, out=c_new).addcmul_(i, g.tanh_())
    torch.tanh(c_new, out=squashed)
    torch.mul(o, squashed, out=h_new)
    return None


def _lstm_cell_backward(dh: Tensor, dc: Tensor, gates: Tensor, c: Tensor, squashed: Tensor, da: Tensor) -> None:
    if dh.is_cuda:
        return _launch("lstm_backward_kernel", dc, (dh, dc, gates, c, squashed, da))
    i, f, g, o = gates.chunk(4, -1)
    dc.addcmul_(dh, o * (1 - squashed * squashed))
    for part, factor in zip(da.chunk(4, -1), (g * i * (1 - i), c * f * (1 - f), i * (1 - g * g)), strict=False):
        torch.mul(dc, factor, out=part)
    torch.mul(dh, squashed * o * (1 - o), out=da.chunk(4, -1)[3])
    dc.mul_(f)
    return None


def _gru_cell_backward(
    dh: Tensor, gates: Tensor, inner: Tensor, h: Tensor, before: Tensor, dx: Tensor, da: Tensor
) -> None:
    if dh.is_cuda:
        return _launch("gru_backward_kernel", dh, (dh, gates, inner, h, before, dx, da))
    r, z, n = gates.chunk(3, -1)
    of_n = dh * (1 - z) * (1 - n * n)
    torch.cat([of_n * inner * r * (1 - r), dh * (h - n) * z * (1 - z), of_n], -1, out=dx)
    da.copy_(dx).chunk(3, -1)[2].mul_(r)
    before.addcmul_(dh, z)
    return None


def _gru_cell(x: Tensor, a: Tensor, h: Tensor, gates: Tensor, inner: Tensor, h_new: Tensor) -> None:
    if x.is_cuda:
        return _launch("gru_kernel", h, (x, a, h, gates, inner, h_new))
    size = h.shape[-1]
    r, z, n = gates.chunk(3, -1)
    torch.add(x[:, : 2 * size], a[:, : 2 * size], out=gates[:, : 2 * size]).sigmoid_()
    inner.copy_(a[:, 2 * size :])
    torch.addcmul(x[:, 2 * size :], r, inner, out=n).tanh_()
    torch.lerp(n, h, z, out=h_new)
    return None


lstm_cell = _cell(
    "lstm_cell(Tensor(a!) gates, Tensor c, Tensor(b!) h_new, Tensor(c!) c_new, Tensor(d!) squashed) -> ()", _lstm_cell
)
"""I, f, o = σ(gates), g = tanh(gates), in their place; c_new = f c + i g; squashed = tanh c_new; h_new = o squashed."""
lstm_cell_backward = _cell(
    "lstm_cell_backward(Tensor dh, Tensor(a!) dc, Tensor gates, Tensor c, Tensor squashed, Tensor(b!) da) -> ()",
    _lstm_cell_backward,
)
"""dc += dh o (1 - squashed²); da of the four gates as `layers.py` has them; dc *= f.  c: before the step."""
gru_cell_backward = _cell(
    "gru_cell_backward(Tensor dh, Tensor gates, Tensor inner, Tensor h, Tensor(a!) before, Tensor(b!) dx,"
    " Tensor(c!) da) -> ()",
    _gru_cell_backward,
)
"""dx and da of the three gates as `layers.py` has them; before += dh z.  h: before the step."""
gru_cell = _cell(
    "gru_cell(Tensor x, Tensor a, Tensor h, Tensor(a!) gates, Tensor(b!) inner, Tensor(c!) h_new) -> ()", _gru_cell
)
"""r, z = σ(x + a); n = tanh(x_n + r a_n); h_new = n + (h - n) z; inner = a_n."""


def _lstm(x: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Tensor | None, projection: None) -> tuple[Tensor, ...]:
    gates = recurrent.sum_of(x, bias)
    hidden, cells, squashed = (x.new_empty((*x.shape[:2], c.shape[1])) for _ in range(3))
    c = c.contiguous()
    for both, h_new, c_new, tanh in zip(gates, hidden, cells, squashed, strict=True):
        both.addmm_(h, w.t())
        lstm_cell(both, c, h_new, c_new, tanh)
        h, c = h_new, c_new
    return hidden, gates, cells, squashed


def _gru(x: Tensor, h: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    gates, (hidden, inner) = x.new_empty(x.shape), (x.new_empty((*x.shape[:2], h.shape[1])) for _ in range(2))
    h = h.contiguous()
    for x_t, gates_t, a_n, h_new in zip(x.contiguous(), gates, inner, hidden, strict=True):
        a = torch.mm(h, w.t()) if bias is None else torch.addmm(bias, h, w.t())
        gru_cell(x_t, a, h, gates_t, a_n, h_new)
        h = h_new
    return hidden, gates, inner


def _lstm_backward(
    dh: Tensor, dc: Tensor, gates: Tensor, c: Tensor, cells: Tensor, squashed: Tensor, w: Tensor, projection: None
) -> tuple[Tensor, ...]:
    da, every = gates.new_empty(gates.shape), recurrent.sum_of(dh, None)
    first, dc = torch.zeros_like(every[0]), recurrent.sum_of(dc, None)
    gates, c, cells, squashed = (value.contiguous() for value in (gates, c, cells, squashed))
    rows = list(zip([first, *every[:-1]], every, gates, [c, *cells[:-1]], squashed, da, strict=True))
    for before, now, gates_t, c_before, tanh, da_t in reversed(rows):
        lstm_cell_backward(now, dc, gates_t, c_before, tanh, da_t)
        before.addmm_(da_t, w)
    return da, every, first, dc


def _gru_backward(dh: Tensor, hidden: Tensor, gates: Tensor, inner: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    (dx, da), every = (gates.new_empty(gates.shape) for _ in range(2)), recurrent.sum_of(dh, None)
    first = torch.zeros_like(every[0])
    hidden, gates, inner, h = (value.contiguous() for value in (hidden, gates, inner, h))
    rows = list(zip([first, *every[:-1]], every, gates, inner, [h, *hidden[:-1]], dx, da, strict=True))
    for before, now, gates_t, a_n, h_before, dx_t, da_t in reversed(rows):
        gru_cell_backward(now, gates_t, a_n, h_before, before, dx_t, da_t)
        before.addmm_(da_t, w)
    return dx, da, first


def _in_cells(op: OpOverload, run: Callable[..., Any]) -> OpOverload:
    schema = str(op._schema).removeprefix("psg_fx::").replace("(", "_cells(", 1)
    made: OpOverload = define_op(schema, run, recurrent.LOOPS[op].shapes, of_torch_alone(op))
    LOOPS[made] = run
    return made


LOOPS: dict[OpOverload, Callable[..., Any]] = {}
"""The ops, and the loop of each."""

IN_CELLS = {
    op: _in_cells(op, run)
    for op, run in (
        (recurrent.lstm, _lstm),
        (recurrent.gru, _gru),
        (recurrent.lstm_backward, _lstm_backward),
        (recurrent.gru_backward, _gru_backward),
    )
}
"""An op with a loop of torch's calls -> the one with a loop of cells."""
