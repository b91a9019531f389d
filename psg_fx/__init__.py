"""psg_fx: exact per-sample gradients, and what users ask of them, compiled into one graph at about the cost of an
ordinary training step.
"""

from psg_fx import distributed
from psg_fx.api import transform
from psg_fx.benchmarking.benchmark import benchmark
from psg_fx.errors import BadArgument, CaptureFailed, InternalError, NotYetSupported, PsgError, SamplesMixed
from psg_fx.loops.over import over
from psg_fx.loops.store import Store
from psg_fx.measure.calibrate import calibrate
from psg_fx.ops.of_users.trusted import trust
from psg_fx.program.arguments.rows import Rows
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.quantities.products import Dots, Gram, Projection, SecondMoment
from psg_fx.quantities.sums import Grads, MeanGrad, Norms, WeightedSum
from psg_fx.step.loaded import load
from psg_fx.step.microbatch import microbatch
from psg_fx.step.module import PerSampleModule
from psg_fx.version import __version__

__all__ = [
    "BadArgument",
    "CaptureFailed",
    "ClippedSum",
    "Dots",
    "Grads",
    "Gram",
    "InternalError",
    "MeanGrad",
    "Norms",
    "NotYetSupported",
    "PerSampleModule",
    "Projection",
    "PsgError",
    "Quantity",
    "Rows",
    "SamplesMixed",
    "SecondMoment",
    "Store",
    "WeightedSum",
    "__version__",
    "benchmark",
    "calibrate",
    "distributed",
    "load",
    "microbatch",
    "over",
    "transform",
    "trust",
]
