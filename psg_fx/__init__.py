"""psg_fx: exact per-sample gradients, and what users ask of them, compiled into one graph at about the cost of an
ordinary training step.
"""

from psg_fx.api import PerSampleModule, transform
from psg_fx.benchmarking import benchmark
from psg_fx.calibration import calibrate
from psg_fx.clipping import ClippedSum
from psg_fx.errors import BadArgument, CaptureFailed, InternalError, NotYetSupported, PsgError, SamplesMixed
from psg_fx.microbatch import microbatch
from psg_fx.products import Dots, Gram, Projection, SecondMoment
from psg_fx.quantity import Grads, MeanGrad, Norms, Quantity, WeightedSum
from psg_fx.trusted import trust
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
    "SamplesMixed",
    "SecondMoment",
    "WeightedSum",
    "__version__",
    "benchmark",
    "calibrate",
    "microbatch",
    "transform",
    "trust",
]
