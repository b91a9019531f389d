"""The truth that every answer of psg_fx is held against; nothing here imports psg_fx, not even what `psg_fx.reference`
has too (batches taken apart, the loop over samples): that one is held against this one.

`loop_grads` is the definition itself: for each sample i, `torch.autograd.grad` of `loss_fn(model(x[i:i+1]), y[i:i+1])`
in float64. `vmap_grads` is a second opinion where vmap can run. From per-sample gradients `{name: [B, *shape]}` follow
the references of the other quantities, written as plainly as possible.

The model is turned to float64 in place and put back exactly as it was, rather than copied: a loss whose closure holds
a parameter (an L2 term) would not see a copy. Buffers and attributes of modules are reset before every sample, so each
starts from the state at the call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

Grads = dict[str, Tensor]
Loss = Callable[..., Tensor]


def spread_dims(dims: Any, tree: Any) -> list[int | None]:
    """One entry per leaf of `tree` from the prefix `dims`; a leaf that is no tensor is shared by all samples."""
    if dims is None or isinstance(dims, int):
        return [dims if isinstance(leaf, Tensor) else None for leaf in tree_flatten(tree)[0]]
    if isinstance(dims, Mapping):
        assert isinstance(tree, Mapping), f"batch_dim {dims} does not fit {tree}"
        assert set(dims) == set(tree), f"batch_dim {dims} does not fit {tree}"
        return [d for key in tree for d in spread_dims(dims[key], tree[key])]
    assert isinstance(tree, (tuple, list)), f"batch_dim {dims} does not fit {tree}"
    assert len(dims) == len(tree), f"batch_dim {dims} does not fit {tree}"
    return [d for part, sub in zip(dims, tree, strict=True) for d in spread_dims(part, sub)]


def flatten_samples(inputs: Any, targets: Any, batch_dim: Any) -> tuple[list[Any], list[int | None], Any, int]:
    """Leaves of `(inputs, targets)`, the sample dim of each (None: shared), their tree, and the batch size B."""
    leaves, spec = tree_flatten((inputs, targets))
    whole = batch_dim if isinstance(batch_dim, tuple) else (batch_dim, batch_dim)
    dims = spread_dims(whole[0], inputs) + spread_dims(whole[1], targets)
    assert len(dims) == len(leaves)
    sizes = {leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
    assert len(sizes) == 1, f"samples disagree about the batch size: {sizes}"
    return leaves, dims, spec, sizes.pop()


def loss_of(model: nn.Module, loss_fn: Loss, inputs: Any, targets: Any) -> Tensor:
    """Calls model and loss as the contract says: tensor, tuple (positional) or dict (keyword); targets may be None."""
    if isinstance(inputs, tuple):
        output = model(*inputs)
    elif isinstance(inputs, dict):
        output = model(**inputs)
    else:
        output = model(inputs)
    if targets is None:
        return loss_fn(output)
    if isinstance(targets, tuple):
        return loss_fn(output, *targets)
    if isinstance(targets, dict):
        return loss_fn(output, **targets)
    return loss_fn(output, targets)


def scalar(loss: Tensor) -> Tensor:
    """The loss of one sample, given as a scalar or as `[1]`."""
    assert loss.numel() == 1, f"the loss of one sample has shape {tuple(loss.shape)}"
    return loss.reshape(())


def tracked(model: nn.Module, params: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """The parameters asked for; by default all with `requires_grad`, a tied one under its first name."""
    if params is None:
        return {name: p for name, p in model.named_parameters() if p.requires_grad}
    known = dict(model.named_parameters(remove_duplicate=False))
    return {name: known[name] for name in params}


def _dicts(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """The dicts that a module holds beside its parameters, buffers and modules, and their entries."""
    own = (value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules"))
    return [(value, dict(value)) for value in own if isinstance(value, dict)]


@contextmanager
def lent(model: nn.Module, dtype: torch.dtype | None) -> Iterator[Callable[[], None]]:
    """The model in `dtype` (None: as it is), then exactly as before; yields a function that resets its buffers,
    attributes, and what dicts in these hold, such as hooks.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    data = {p: p.data for p in model.parameters()}
    wanted = {p: p.requires_grad for p in data}
    grads = {p: p.grad for p in data}
    buffers = [(m, key, b) for m in model.modules() for key, b in m._buffers.items() if b is not None]
    attributes = [(m, dict(vars(m)), _dicts(m)) for m in model.modules()]

    def put_back() -> None:
        for module, held, dicts in attributes:
            for key in vars(module).keys() - held.keys():
                del vars(module)[key]
            vars(module).update(held)
            for own, entries in dicts:
                own.clear()
                own.update(entries)

    def reset() -> None:
        put_back()
        fresh: dict[Tensor, Tensor] = {}
        for module, key, buffer in buffers:
            if buffer not in fresh:
                fresh[buffer] = cast(buffer).clone()
            module._buffers[key] = fresh[buffer]

    try:
        for p in data:
            p.grad = None
            p.data = cast(p.data)
        yield reset
    finally:
        for p, old in data.items():
            p.data = old
            p.grad = grads[p]
            p.requires_grad_(wanted[p])
        for module, key, buffer in buffers:
            module._buffers[key] = buffer
        put_back()


def loop_grads(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Any,
    targets: Any = None,
    *,
    batch_dim: Any = 0,
    params: Sequence[str] | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> tuple[Tensor, Grads]:
    """Losses `[B]` and gradients `{name: [B, *shape]}`, one sample at a time; zeros for an unused parameter."""
    leaves, dims, spec, batch = flatten_samples(inputs, targets, batch_dim)
    if dtype is not None:
        leaves = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
    wanted = tracked(model, params)
    losses: list[Tensor] = []
    rows: dict[str, list[Tensor]] = {name: [] for name in wanted}
    with lent(model, dtype) as reset, torch.random.fork_rng(), torch.enable_grad():
        for p in wanted.values():
            p.requires_grad_(True)
        for i in range(batch):
            reset()
            one = [x if d is None else x.narrow(d, i, 1) for x, d in zip(leaves, dims, strict=True)]
            loss = scalar(loss_of(model, loss_fn, *tree_unflatten(one, spec)))
            losses.append(loss.detach())
            weights = list(wanted.values())
            found: Sequence[Tensor | None] = [None] * len(weights)
            if loss.requires_grad and weights:
                found = torch.autograd.grad(loss, weights, allow_unused=True)
            for (name, p), g in zip(wanted.items(), found, strict=True):
                rows[name].append(torch.zeros_like(p.data) if g is None else g.detach().clone())
    return torch.stack(losses), {name: torch.stack(row) for name, row in rows.items()}


class _WithLoss(nn.Module):
    """Model and loss as one module, so that a loss reading the model's parameters sees functional_call's."""

    def __init__(self, model: nn.Module, loss_fn: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, inputs: Any, targets: Any) -> Tensor:
        return scalar(loss_of(self.model, self.loss_fn, inputs, targets))


def vmap_grads(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Any,
    targets: Any = None,
    *,
    batch_dim: Any = 0,
    params: Sequence[str] | None = None,
) -> tuple[Tensor, Grads]:
    """The same by `torch.func` in the model's own dtype; raises whatever vmap raises where it cannot run."""
    leaves, dims, spec, _ = flatten_samples(inputs, targets, batch_dim)
    places = {k: d for k, d in enumerate(dims) if d is not None}
    wanted = {name: p.detach() for name, p in tracked(model, params).items()}
    module = _WithLoss(model, loss_fn)

    def one_loss(weights: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
        full = list(leaves)
        for (k, dim), part in zip(places.items(), sample, strict=True):
            full[k] = part.unsqueeze(dim)
        named = {f"model.{name}": w for name, w in weights.items()}
        loss: Tensor = torch.func.functional_call(module, named, tree_unflatten(full, spec))
        return loss

    each = torch.func.grad_and_value(one_loss)
    step = torch.func.vmap(each, in_dims=(None, *places.values()), randomness="different")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        grads, losses = step(wanted, *(leaves[k] for k in places))
    return losses.detach(), {name: g.detach() for name, g in grads.items()}


def relative_error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """max|got - want| / max(max|want|, floor), in float64; 0 where both are zero, inf where only the truth is.

    `floor` is for truths that are zero up to rounding (the bias of an attention's keys): pass a small fraction of the
    largest gradient of the model.
    """
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if want.numel() == 0:
        return 0.0
    difference = (got.detach().to(torch.float64).cpu() - want.detach().to(torch.float64).cpu()).abs().max().item()
    scale = max(want.detach().to(torch.float64).abs().max().item(), floor)
    if difference != difference:
        return float("inf")
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale


def worst_error(got: Mapping[str, Tensor], want: Mapping[str, Tensor], floor: float = 1e-3) -> float:
    """The largest `relative_error` over names; `floor` is a fraction of the largest truth of all."""
    assert set(got) == set(want), f"names differ: {sorted(set(got) ^ set(want))}"
    largest = max((w.detach().abs().max().item() for w in want.values() if w.numel()), default=0.0)
    return max((relative_error(got[name], w, floor * largest) for name, w in want.items()), default=0.0)


def check_call(
    step: Callable[..., Any], model: nn.Module, loss_fn: Loss, inputs: Any, targets: Any = None
) -> tuple[Any, Grads]:
    """Hold the losses and gradients that a step returns against the loop in the model's own dtype, which runs before.
    Returns what the step does, and the loop's gradients.
    """
    losses, grads = loop_grads(model, loss_fn, inputs, targets, dtype=None)
    found = step(inputs) if targets is None else step(inputs, targets)
    torch.testing.assert_close(found.losses, losses)
    for name, want in grads.items():
        torch.testing.assert_close(found.grads[name], want)
    return found, grads


def check_batches(
    step: Callable[..., Any], model: nn.Module, loss_fn: Loss, inputs: Tensor, targets: Sequence[Tensor],
    sizes: Sequence[int],
) -> None:  # fmt: skip
    """Hold a step, on the first samples of a batch, so many in turn, against the loop in float64."""
    for size in sizes:
        x, given = inputs[:size], tuple(t[:size] for t in targets)
        losses, grads = loop_grads(model, loss_fn, x, given)
        found = step(x, given)
        torch.testing.assert_close((found.losses, found.grads), (losses, grads))


def norms(grads: Grads) -> Tensor:
    """2-norm of each sample's whole gradient, `[B]`."""
    return torch.stack(list(parameter_norms(grads).values())).pow(2).sum(0).sqrt()


def parameter_norms(grads: Grads) -> Grads:
    """2-norm of each sample's gradient of each parameter, `{name: [B]}`."""
    return {name: g.flatten(1).norm(dim=1) if g.dim() > 1 else g.abs() for name, g in grads.items()}


def weighted_sum(grads: Grads, weights: Tensor) -> Grads:
    """Σᵢ wᵢ gᵢ, `{name: shape}`, for weights `[B]`."""
    return {name: torch.tensordot(weights.to(g.dtype), g, dims=([0], [0])) for name, g in grads.items()}


def clip_factors(norm: Tensor, max_norm: float) -> Tensor:
    """cᵢ = min(1, max_norm / ‖gᵢ‖), `[B]`; 1 for a zero gradient."""
    return torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))


def clipped_sum(grads: Grads, max_norm: float) -> Grads:
    """Σᵢ min(1, max_norm / ‖gᵢ‖) gᵢ over whole-model norms, `{name: shape}`."""
    return weighted_sum(grads, clip_factors(norms(grads), max_norm))


def clipped_sum_per_parameter(grads: Grads, max_norm: float | Mapping[str, float]) -> Grads:
    """The same with each parameter clipped by its own norm; `max_norm` one number or one for each name."""
    own = parameter_norms(grads)
    limit = {name: max_norm[name] if isinstance(max_norm, Mapping) else max_norm for name in grads}
    return {n: weighted_sum({n: g}, clip_factors(own[n], limit[n]))[n] for n, g in grads.items()}


def mean_grad(grads: Grads) -> Grads:
    """The gradient of the mean per-sample loss, `{name: shape}`."""
    return {name: g.mean(0) for name, g in grads.items()}


def dots(grads: Grads, directions: Mapping[str, Tensor]) -> Tensor:
    """⟨gᵢ, v⟩, `[B]`; `[B, K]` where every direction has a leading K."""
    total: Tensor | None = None
    for name, g in grads.items():
        v = directions[name].to(g.dtype)
        flat = g.flatten(1) if g.dim() > 1 else g[:, None]
        part = flat @ v.reshape(-1) if v.dim() == g.dim() - 1 else flat @ v.reshape(v.shape[0], -1).T
        total = part if total is None else total + part
    assert total is not None
    return total


def gram(grads: Grads) -> Tensor:
    """⟨gᵢ, gⱼ⟩, `[B, B]`."""
    flat = torch.cat([g.reshape(g.shape[0], -1) for g in grads.values()], dim=1)
    return flat @ flat.T


def second_moment(grads: Grads, centered: bool = False) -> Grads:
    """Σᵢ gᵢ² / B elementwise, `{name: shape}`; centered: Σᵢ (gᵢ - ḡ)² / B."""
    return {n: (g - g.mean(0) if centered else g).pow(2).mean(0) for n, g in grads.items()}
