"""The rules: what the gradient of one sample is, op by op.  Importing this package fills the table."""

from psg_fx.passes.rules import conv, embedding, linear, pointwise
from psg_fx.passes.rules.fallback import fallback

__all__ = ["conv", "embedding", "fallback", "linear", "pointwise"]
