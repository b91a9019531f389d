"""JAX: `jit(vmap(grad(loss of one sample)))` with what is asked computed inside the same `jit`.

Only the models that `jax_models.py` writes anew can be asked; parameters and batch are those of the problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from psg_fx.benchmarking.peers.adapters import CannotBeAsked
from psg_fx.benchmarking.problem import Computation, Problem
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.quantities.sums import Grads
from psg_fx.reference.definitions import Answer


class JaxStep:
    """A compiled step, whose arrays JAX allocates, and which therefore says itself what it takes.

    The batch and the parameters are converted once; the answers share memory with JAX's.
    """

    def __init__(self, problem: Problem, quantity: Quantity) -> None:
        import jax

        from psg_fx.benchmarking.peers.jax_models import sample_loss

        if problem.device.type != {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend()):
            raise CannotBeAsked(f"the model lies on {problem.device.type}, JAX computes on {jax.default_backend()}")
        if {p.dtype for p in problem.wanted.values()} != {torch.float32} or problem.batch_dim != 0:
            raise CannotBeAsked("only float32 parameters and samples in dim 0 are translated")
        each = jax.vmap(jax.grad(sample_loss(problem.model, problem.loss_fn)), in_axes=(None, 0, 0))

        def answer(params: Any, inputs: Any, targets: Any) -> Any:
            return of_gradients(quantity, each(params, inputs, targets))

        params = {name: _array(p.detach()) for name, p in problem.wanted.items()}
        self._arguments = params, _array(problem.inputs), _array(problem.targets)
        self._run = jax.jit(answer).lower(*self._arguments).compile()
        self._wait = jax.block_until_ready

    def __call__(self) -> Answer:
        """The answer as torch's tensors."""
        found = self._wait(self._run(*self._arguments))
        if isinstance(found, Mapping):
            return {name: from_dlpack(value) for name, value in found.items()}
        answer: Tensor = from_dlpack(found)
        return answer

    def bytes(self) -> int:
        """What XLA has planned for temporary values and results."""
        plan = self._run.memory_analysis()
        return int(plan.temp_size_in_bytes + plan.output_size_in_bytes)


def planned_bytes(step: Computation, device: torch.device) -> int:
    """The bytes of a `JaxStep`, which torch's profiler does not see."""
    assert isinstance(step, JaxStep)
    return step.bytes()


def of_gradients(quantity: Quantity, grads: Any) -> Any:
    """The quantity from JAX's gradients `name -> [B, *shape]`."""
    import jax.numpy as jnp

    if isinstance(quantity, Grads):
        return grads
    norm = jnp.sqrt(sum(jnp.square(g).sum(tuple(range(1, g.ndim))) for g in grads.values()))
    if not isinstance(quantity, ClippedSum):
        return norm
    factors = jnp.minimum(quantity.max_norm / norm, 1.0)
    return {name: jnp.einsum("b,b...->...", factors, g) for name, g in grads.items()}


def _array(tensor: Tensor) -> Any:
    """JAX's array of the same numbers; integers in 32 bits, as JAX counts."""
    import jax.numpy as jnp

    return jnp.array((tensor if tensor.is_floating_point() else tensor.int()).cpu().numpy())
