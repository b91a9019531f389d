"""Other ways to per-sample gradients, called as psg_fx is: a problem in, `name -> [B, *shape]` out.

Each works on the problem's own model, since a loss may read its parameters, and leaves its marks on it: a peer needs a
problem of its own. An exception is a refusal. A parameter that was given no gradient is left out of the answer.

Where a library must know how the loss of the batch is made of those of the samples, it is told: a problem without a
loss of its own has their sum. For any other, the loss of the batch is compared with those of single samples; if it is
neither their sum nor their mean (a mean over all tokens of the batch, say), or if it reads parameters itself, a library
that sees only the gradient of the model's outputs cannot be asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import psg_fx
from external import program
from external.program import Grads, Problem
from support import oracle


class CannotBeAsked(Exception):
    """The library computes something else: the samples' parts of the gradient of the batch, through the outputs."""


def vmap(problem: Problem) -> Grads:
    """`torch.func.vmap(grad(loss of one sample))`."""
    inputs, targets = problem.inputs, problem.targets
    return oracle.vmap_grads(problem.model, problem.loss, inputs, targets, batch_dim=problem.batch_dim)[1]


def opacus_hooks(problem: Problem) -> Grads:
    """Opacus' own formulas where it has them, functorch for other layers: its mode "hooks", the default."""
    return _opacus(problem, force_functorch=False)


def opacus_functorch(problem: Problem) -> Grads:
    """Opacus with functorch for every layer: its mode "functorch"."""
    return _opacus(problem, force_functorch=True)


def expanded_weights(problem: Problem) -> Grads:
    """`torch.nn.utils._per_sample_grad.call_for_per_sample_grads`, which is also Opacus' mode "ew"."""
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    how, first = reduction(problem), batch_first(problem)
    called = call_for_per_sample_grads(problem.model, batch_size=size(problem), loss_reduction=how, batch_first=first)
    with quiet():
        batch_loss(problem, called).backward()
    return collected(problem.model)


def psg_drop_in(problem: Problem) -> Grads:
    """psg_fx without a loss; what a loss of the problem's own does to the model's outputs, autograd does."""
    if problem.loss_fn is None:
        return program.drop_in(problem)
    dims = problem.batch_dim[0] if isinstance(problem.batch_dim, tuple) else problem.batch_dim
    how = reduction(problem)
    step = psg_fx.transform(problem.model, batch_dim=dims, backend="eager", loss_reduction=how)
    batch_loss(problem, step).backward()
    return collected(problem.model)


def _opacus(problem: Problem, *, force_functorch: bool) -> Grads:
    from opacus.grad_sample import GradSampleModule

    how, first = reduction(problem), batch_first(problem)
    record_in_eval_mode(problem)
    module = GradSampleModule(problem.model, batch_first=first, loss_reduction=how, force_functorch=force_functorch)
    with quiet():
        batch_loss(problem, module).backward()
    return collected(problem.model)


def batch_loss(problem: Problem, model: Callable[..., Any]) -> Tensor:
    """The loss of the batch as a number."""
    return oracle.loss_of(model, problem.loss, problem.inputs, problem.targets).sum()  # type: ignore[arg-type]


def collected(model: nn.Module) -> Grads:
    """What was left on the parameters; several batches in one list, which only the shape then tells."""
    found: Grads = {}
    for name, parameter in oracle.tracked(model, None).items():
        rows = getattr(parameter, "grad_sample", None)
        if rows is not None:
            found[name] = torch.cat(rows).detach() if isinstance(rows, list) else rows.detach()
    return found


def size(problem: Problem) -> int:
    """B, also of a ragged batch."""
    samples = getattr(problem, "samples", None)
    return program.batch_size(problem) if samples is None else len(samples)


def batch_first(problem: Problem) -> bool:
    """Whether the samples lie in dim 0 (or else in dim 1) of the first input: all that these libraries can be told."""
    whole = problem.batch_dim
    dims = oracle.spread_dims(whole[0] if isinstance(whole, tuple) else whole, problem.inputs)
    leaves = pytree.tree_leaves(problem.inputs)
    found = next(d for d, leaf in zip(dims, leaves, strict=True) if isinstance(leaf, Tensor) and d is not None)
    if found not in (0, 1):
        raise ValueError(f"samples in dim {found}: only dims 0 and 1 can be said")
    return bool(found == 0)


def reduction(problem: Problem) -> str:
    """ "sum" or "mean": how the loss of the batch is made of the losses of its samples."""
    if problem.loss_fn is None:
        return "sum"
    whole = problem.batch_dim
    each, _ = oracle.loop_grads(problem.model, problem.loss, problem.inputs, problem.targets, batch_dim=whole)
    with oracle.lent(problem.model, None) as reset, torch.random.fork_rng(devices=[]):
        reset()
        loss = oracle.loss_of(detached(problem.model), problem.loss, problem.inputs, problem.targets)
    if loss.requires_grad:
        raise CannotBeAsked("the loss reads parameters")
    for how, expected in (("sum", each.sum()), ("mean", each.mean())):
        if loss.dim() > 0 or torch.allclose(loss, expected.to(loss.dtype)):
            return how
    raise CannotBeAsked("the loss of the batch is neither the sum nor the mean of those of its samples")


def detached(model: nn.Module) -> Callable[..., Any]:
    """The model's outputs without their history."""
    return lambda *args, **named: pytree.tree_map_only(Tensor, Tensor.detach, model(*args, **named))


def record_in_eval_mode(problem: Problem) -> None:
    """Opacus records layers in training mode only: sets the flag of layers with parameters if no output changes."""
    layers = [m for m in problem.model.modules() if not m.training and any(True for _ in m.parameters(recurse=False))]
    if not layers:
        return
    before = outputs(problem)
    for layer in layers:
        layer.training = True
    after = outputs(problem)
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        for layer in layers:
            layer.training = False


def outputs(problem: Problem) -> list[Tensor]:
    """All tensors that the model returns; with gradients, since torch's fast paths without them round differently."""
    with oracle.lent(problem.model, None) as reset, torch.random.fork_rng(devices=[]), torch.enable_grad():
        reset()
        leaves = pytree.tree_leaves(program.call(problem.model, problem.inputs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@contextmanager
def quiet() -> Iterator[None]:
    """Hides that hooks run although no input requires gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        yield
