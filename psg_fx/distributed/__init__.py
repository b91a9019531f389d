"""Several processes: what steps of each return, added up; models whose parameters are spread over them."""

from psg_fx.distributed.gradients import set_grad
from psg_fx.distributed.sums import reduce

__all__ = ["reduce", "set_grad"]
