"""Settings that must stand before torch is imported."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "psg_fx_tests_inductor"))
