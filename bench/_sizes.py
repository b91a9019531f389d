"""Sizes of models in which a fast device has something to do."""

from __future__ import annotations

from typing import Any

BATCH = 16
WIDE: dict[str, dict[str, Any]] = {
    "gpt": {"width": 768, "heads": 12, "layers": 3, "tokens": 512},
    "vit": {"width": 768, "heads": 12, "layers": 4, "image": 224, "patch": 16},
}
