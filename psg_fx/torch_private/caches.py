"""Where torch keeps on disk what it has compiled, and what of torch a graph depends on that no node of it says."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch


def folder() -> Path | None:
    """Inductor's folder, None where it is told to keep nothing (`TORCHINDUCTOR_FORCE_DISABLE_CACHES` and its like)."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) if config.fx_graph_cache and not config.force_disable_caches else None


def write_whole(path: Path, data: bytes) -> None:
    """Written as a whole or not at all, whoever else writes there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def empty_for_a_while() -> contextlib.AbstractContextManager[None]:
    """A folder without kernels, so that what is compiled is compiled anew."""
    from torch._inductor.utils import fresh_cache

    found: contextlib.AbstractContextManager[None] = fresh_cache()
    return found


def surroundings() -> Any:
    """Versions, and the flags by which torch chooses among implementations when it traces."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        sys.version, torch.__version__, torch.version.git_version, float32_products(),
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic,
        torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled(),
        _capabilities(),
    )  # fmt: skip


def float32_products() -> tuple[str, ...]:
    """In which arithmetic products of float32 are taken, by the older way to say so ("mixed" where both are in use,
    of which torch does not say it) and by the newer one, for each backend.
    """
    backends: Any = torch.backends
    try:
        older = f"{torch.get_float32_matmul_precision()} {backends.cudnn.allow_tf32}"
    except RuntimeError:
        older = "mixed"
    asked = (
        backends, backends.cuda.matmul, backends.cudnn, getattr(backends.cudnn, "conv", None),
        getattr(backends.cudnn, "rnn", None), backends.mkldnn, getattr(backends.mkldnn, "matmul", None),
        getattr(backends.mkldnn, "conv", None), getattr(backends.mkldnn, "rnn", None),
    )  # fmt: skip
    return older, *(str(getattr(one, "fp32_precision", "none")) for one in asked)


def _capabilities() -> list[tuple[int, int]]:
    """Of the devices, if something uses them: asking makes the process one that does."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_capability(k) for k in range(torch.cuda.device_count())]


def is_overridden() -> bool:
    """Whether somebody has given an op of torch another implementation in Python.  Of those torch itself has shapes
    alone ("Meta"), some for devices, and in 2.15 one for "PythonTLSSnapshot"; where autograd or a CPU is concerned, it
    is of another package.
    """
    keys = (name.rpartition("/")[2] for name in torch.library._impls if name.startswith("aten/"))
    return any(key == "Python" or key.startswith(("Autograd", "CPU", "Composite")) for key in keys)
