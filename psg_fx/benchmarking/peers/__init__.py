"""Other ways to per-sample gradients, as contenders of `psg_fx.benchmark`: Opacus, BackPACK, fastDP, JAX, and
`call_for_per_sample_grads` of torch.

Each is asked in the way that makes its answer right, and what it answers is held against the reference like that of
every contender.  One that is not installed, or refuses a model, says so in its row.
"""

from __future__ import annotations

from functools import partial

from psg_fx.benchmarking.peers import backpack, expanded_weights, fastdp, jaxed, opacus
from psg_fx.benchmarking.problem import Contender, is_plain_clipping
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.sums import Grads, Norms


def peers_for(label: str, quantity: Quantity) -> list[Contender]:
    """Everybody who computes `quantity`, labelled `label`: from gradients if need be, directly where they can."""
    peer = partial(Contender, quantity=label, usual=False, peer=True)
    found = [
        peer("opacus-hooks", build=partial(opacus.hooks, quantity=quantity)),
        peer("expanded-weights", build=partial(expanded_weights.step, quantity=quantity)),
        peer("backpack", build=partial(backpack.gradients, quantity=quantity)),
    ]
    if quantity == Norms():
        found.append(peer("opacus-ghost", build=opacus.ghost_norms))
        found.append(peer("backpack-norms", build=backpack.norms))
    if is_plain_clipping(quantity):
        found.append(peer("opacus-ghost", build=partial(opacus.ghost_clipping, quantity=quantity)))
        found.append(peer("fastdp", build=partial(fastdp.book_keeping, quantity=quantity)))
    if quantity in (Grads(), Norms()) or is_plain_clipping(quantity):
        found.append(peer("jax", build=partial(jaxed.JaxStep, quantity=quantity), memory=jaxed.planned_bytes))
    return found
