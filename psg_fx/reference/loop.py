"""Per-sample gradients by definition: a loop over single samples.

Slow, obvious and independent of the compiler, whose way to take a batch apart (`program/arguments/call.py`) is not
shared either: `psg_fx.reference.validate` holds compiled steps against it, `psg_fx.benchmarking` times it beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from psg_fx.errors import BadArgument
from psg_fx.reference.batch import Batch, as_tree, cast, has_rows, is_packed, is_rows, spread
from psg_fx.reference.cotangents import BATCH_NORMS, in_order
from psg_fx.reference.definitions import ByName
from psg_fx.reference.state import State, modules_of

Loss = Callable[..., Tensor]


class WithLoss(nn.Module):
    """Model and loss as one module: `(inputs, targets)` -> the loss as `loss_fn` gives it, scalar or `[B]`."""

    def __init__(self, model: nn.Module, loss_fn: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, inputs: Any, targets: Any) -> Tensor:
        """Inputs: tensor, tuple or list (positional) or dict (keyword); targets: the same, or None for none."""
        return self.loss(self.output(inputs), targets)

    def output(self, inputs: Any) -> Any:
        """What the model makes of the inputs."""
        if isinstance(inputs, (tuple, list)) and not is_packed(inputs):
            return self.model(*inputs)
        return self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)

    def loss(self, output: Any, targets: Any) -> Tensor:
        """What the loss makes of the output."""
        if targets is None:
            return self.loss_fn(output)
        if isinstance(targets, (tuple, list)) and not is_packed(targets):
            return self.loss_fn(output, *targets)
        if isinstance(targets, dict):
            return self.loss_fn(output, **targets)
        return self.loss_fn(output, targets)


class AsDefined(TorchFunctionMode):
    """Where an op refuses tensors of several floating dtypes, the narrow ones become float64: a loss may hold tensors
    of its own (weights of classes), and only the model and the batch are known here.  Backwards that torch has wrong
    are helped (`cotangents.py`).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            found = func(*args, **kwargs)
            return in_order(found) if func in BATCH_NORMS else found
        except RuntimeError:
            leaves, spec = tree_flatten((args, kwargs))
            dtypes = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}
            if torch.float64 not in dtypes or len(dtypes) == 1:
                raise
            wide_args, wide_kwargs = tree_unflatten([cast(leaf, torch.float64) for leaf in leaves], spec)
            return func(*wide_args, **wide_kwargs)


def one_loss(loss: Tensor) -> Tensor:
    """The loss of a single sample as a scalar."""
    if loss.numel() != 1:
        raise BadArgument(
            f"the loss of one sample has shape {tuple(loss.shape)}",
            where="loss_fn(model(x[i:i+1]), y[i:i+1])",
            why="a sample's loss is one number",
            fix="reduce over everything but the samples: return a scalar or [B]",
        )
    return loss.reshape(())


def tracked(model: nn.Module, params: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Parameters by name: those in `params`, or all with `requires_grad` (a tied one under its first name)."""
    if params is None:
        return {name: p for name, p in model.named_parameters() if p.requires_grad}
    known = dict(model.named_parameters(remove_duplicate=False))
    if unknown := [name for name in params if name not in known]:
        raise BadArgument(
            f"no parameter is called {unknown[0]!r}",
            where="params",
            why=f"the model has {', '.join(known)}",
            fix="take names from model.named_parameters()",
        )
    return {name: known[name] for name in params}


@contextmanager
def borrowed(model: nn.Module, dtype: torch.dtype | None, loss_fn: Loss | None = None) -> Iterator[Callable[[], None]]:
    """The model in `dtype` (None: as it is), afterwards exactly as before; yields a function that resets buffers and
    attributes, those of a loss that is a module too.

    In place rather than as a copy, because a loss whose closure holds a parameter would not see a copy.
    """
    before = {p: (p.data, p.grad, p.requires_grad) for p in model.parameters()}
    own = modules_of(model)
    state, of_loss = State(own), State(m for m in modules_of(loss_fn) if m not in own)

    def reset() -> None:
        state.lend(dtype)
        of_loss.lend(None)

    try:
        for p in before:
            p.grad = None
            p.data = cast(p.data, dtype)
        yield reset
    finally:
        for p, (data, grad, requires_grad) in before.items():
            p.data = data
            p.grad = grad
            p.requires_grad_(requires_grad)
        state.restore()
        of_loss.restore()


def reference_grads(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Any,
    targets: Any = None,
    *,
    batch_dim: Any = 0,
    params: Sequence[str] | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> tuple[Tensor, ByName]:
    """The reference: losses `[B]` and gradients `name -> [B, *shape]` by a loop over single samples, in `dtype`.

    `dtype=None` keeps the model's own. Every sample starts from the buffers at the call; an unused parameter has zeros.
    Where samples are rows, the loop is over the losses of the whole batch (`losses_of_rows`).
    """
    wanted = tracked(model, params)
    losses: list[Tensor] = []
    rows: dict[str, list[Tensor]] = {name: [] for name in wanted}
    with borrowed(model, dtype, loss_fn) as reset, own_random_state(model), torch.enable_grad(), AsDefined():
        for p in wanted.values():
            p.requires_grad_(True)
        for loss in each_loss(WithLoss(model, loss_fn), inputs, targets, batch_dim, dtype, reset):
            losses.append(loss.detach())
            found = gradients(loss, list(wanted.values()), kept=has_rows(batch_dim))
            for row, g in zip(rows.values(), found, strict=True):
                row.append(g)
    return torch.stack(losses), {name: torch.stack(row) for name, row in rows.items()}


def each_loss(
    program: WithLoss, inputs: Any, targets: Any, batch_dim: Any, dtype: torch.dtype | None = None,
    reset: Callable[[], None] = lambda: None,
) -> Iterator[Tensor]:  # fmt: skip
    """The loss of each sample, computed by itself; of rows, those of the whole batch.  reset: is called in front of
    each computation.
    """
    if has_rows(batch_dim):
        reset()
        yield from losses_of_rows(program, *_whole(inputs, targets, dtype), batch_dim)
        return
    batch = Batch.of(inputs, targets, batch_dim).to(dtype)
    for i in range(batch.size):
        reset()
        yield one_loss(program(*batch.sample(i)))


def losses_of_rows(program: WithLoss, inputs: Any, targets: Any, batch_dim: Any) -> Iterator[Tensor]:
    """The loss of each sample, where samples are rows: by definition those of the whole batch.

    No sample is cut out of the inputs: which of the numbers among these point to rows, and would be others for a sample
    alone, they do not say.  Where the loss of the batch is one number, that of a sample is the loss of the model's
    output for it.  Raises BadArgument where targets hold rows then, too.
    """
    output = program.output(inputs)
    loss = program.loss(output, targets)
    if loss.dim() == 1:
        yield from loss.unbind()
        return
    parts, spec = tree_flatten(output)
    dims = batch_dim[1] if isinstance(batch_dim, (tuple, list)) else batch_dim
    targets = as_tree(targets)
    said = zip(tree_leaves(targets, is_leaf=is_packed), spread(dims, targets, "targets"), strict=True)
    if any(is_rows(dim) or (dim == 0 and type(leaf) is int) for leaf, dim in said):
        raise BadArgument(
            "the loss of the batch is one number, and its targets hold rows",
            where="loss_fn(model(x), y)",
            why="the gradient of a sample is that of its own loss, which a mean over all does not show",
            fix="return the losses [B] of the samples in place of their mean: the step is the same",
        )
    batch = Batch.of(parts, targets, ([0] * len(parts), dims))
    for i in range(batch.size):
        own, wanted = batch.sample(i)
        yield one_loss(program.loss(tree_unflatten(own, spec), wanted))


def _whole(inputs: Any, targets: Any, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """The whole batch with its floating-point tensors in `dtype`."""
    found: tuple[Any, Any] = tree_map(
        lambda leaf: cast(leaf, dtype), (as_tree(inputs), as_tree(targets)), is_leaf=is_packed
    )
    return found


def _first_sample(inputs: Any, targets: Any, batch_dim: Any) -> tuple[Any, Any]:
    """The first sample as a batch of one; all of them, where they are rows."""
    return _whole(inputs, targets, None) if has_rows(batch_dim) else Batch.of(inputs, targets, batch_dim).sample(0)


def loss_of_the_batch(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Any,
    targets: Any = None,
    *,
    dtype: torch.dtype | None = torch.float64,
) -> float | None:
    """`loss_fn(model(x), y)` of the whole batch, as an ordinary step has it; None where that is not one number."""
    with borrowed(model, dtype, loss_fn) as reset, own_random_state(model), torch.enable_grad(), AsDefined():
        reset()
        try:
            loss = WithLoss(model, loss_fn)(*_whole(inputs, targets, dtype))
        except Exception:  # code for one sample need not run on several, and a step has answered already
            return None
    return loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def own_random_state(model: nn.Module) -> AbstractContextManager[None]:
    """A block whose random draws leave the generators of the CPU and of the model's devices as they were."""
    indices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    context: AbstractContextManager[None] = torch.random.fork_rng(devices=sorted(indices))
    return context


def gradients(loss: Tensor, params: Sequence[Tensor], kept: bool = False) -> list[Tensor]:
    """Gradients of a scalar loss, zeros for what it does not use.  kept: its graph is needed again."""
    if not params:
        return []
    if not loss.requires_grad:
        return [torch.zeros_like(p, requires_grad=False) for p in params]
    found = torch.autograd.grad(loss, params, materialize_grads=True, retain_graph=kept)
    return [g.to_dense() if g.is_sparse else g for g in found]  # nn.Embedding(sparse=True)


def draws_random_numbers(model: nn.Module, loss_fn: Loss, inputs: Any, targets: Any, batch_dim: Any = 0) -> bool:
    """Whether two runs of the first sample (of all, where they are rows) differ, as by dropout: then no two ways of
    computing can be compared.
    """
    sample = _first_sample(inputs, targets, batch_dim)
    program = WithLoss(model, loss_fn)
    with borrowed(model, None, loss_fn) as reset, own_random_state(model), torch.enable_grad():  # it may take some
        losses = []
        for seed in (0, 1):
            reset()
            torch.manual_seed(seed)
            losses.append(program(*sample).detach())
    return not _equal_but_for_rounding(*losses)


class _InSingle(TorchFunctionMode):
    """Whether something that depends on a parameter is computed in float32: `x.float()` inside a model in float64."""

    found: bool = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor) and each.dtype is torch.float32 and each.requires_grad:
                self.found = True
        return result


def computes_in_single(model: nn.Module, loss_fn: Loss, inputs: Any, targets: Any, batch_dim: Any = 0) -> bool:
    """Whether a model in float64 computes something in float32, the first sample (all, where they are rows)."""
    if not any(p.dtype is torch.float64 for p in model.parameters()):
        return False
    sample = _first_sample(inputs, targets, batch_dim)
    single = _InSingle()
    with borrowed(model, None, loss_fn) as reset, own_random_state(model), torch.enable_grad(), single:
        reset()
        WithLoss(model, loss_fn)(*sample)
    return single.found


def _equal_but_for_rounding(a: Tensor, b: Tensor) -> bool:
    """Of two runs on a CPU the last bits may differ."""
    off = 16 * torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
    return torch.allclose(a, b, rtol=off, atol=0.0, equal_nan=True)
