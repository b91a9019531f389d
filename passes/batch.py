"""Pass `batch`: where the samples lie in every value, and the proof that no op mixes them."""

from __future__ import annotations

from torch.fx import GraphModule

from psg_fx.passes.independence import prove


def batch(gm: GraphModule) -> GraphModule:
    """Set `samples`, `reduced` and `proof` in the fact of every value, or raise `SamplesMixed`.

    A value with samples holds, in block i of its sample axis, what the program of one sample (B = 1) computes for
    sample i.  A *reduced* value is reduced over the samples; only the loss may come from it.
    """
    return prove(gm)
