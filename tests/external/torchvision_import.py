"""`torchvision`, also where its compiled operators do not load because they were built for another torch.

Its import then fails where it describes operators that nobody defined.  Defined without a kernel they cannot run, which
no model here does; where the operators are there nothing is done.
"""

from __future__ import annotations

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _is_missing(schema: str) -> bool:
    return not torch._C._dispatch_has_kernel(f"torchvision::{schema.partition('(')[0]}")


try:
    import torchvision
except RuntimeError:
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _schema in filter(_is_missing, _SCHEMAS):
        _library.define(_schema)
    import torchvision

__all__ = ["torchvision"]
