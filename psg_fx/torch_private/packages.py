"""The archive of AOTInductor: an exported program, its compiled form, and a text beside them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from psg_fx.torch_private.mended import inductor_mended

Runner = Callable[..., Any]


def compiled_files(program: ExportedProgram, options: Mapping[str, Any]) -> list[Any]:
    """What AOTInductor makes of a program of tensors.  Afterwards that has no example inputs: nobody needs them."""
    args, kwargs = program.example_inputs
    with inductor_mended():
        files: Any = torch._inductor.aot_compile(
            program.module(), args, kwargs, options={**options, "aot_inductor.package": True}
        )
    program.example_inputs = None
    return list(files)


def pack(path: str, program: ExportedProgram, files: list[Any], texts: Mapping[str, str]) -> None:
    """Write the archive, in which `torch.export.load` finds the program and `aoti_load_package` the compiled one."""
    from torch.export.pt2_archive._package import package_pt2  # slow to import, and only a file needs it

    package_pt2(path, exported_programs={"model": program}, aoti_files={"model": files}, extra_files=dict(texts))


def text_in(path: str, name: str) -> str | None:
    """A text of the archive, None where there is no such text.  Raises BadZipFile for another kind of file."""
    with zipfile.ZipFile(path) as archive:
        found = [entry for entry in archive.namelist() if entry.endswith(f"/extra/{name}")]
        return archive.read(found[0]).decode() if found else None


def load_compiled(path: str) -> Runner:
    """(tensors, ..) -> [results]."""
    runner = torch._inductor.aoti_load_package(path)
    return lambda *tensors: pytree.tree_leaves(runner(*tensors))
