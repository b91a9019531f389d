"""What a compiled step comes to, without running it: kernels, launches, traffic, and what each kernel takes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from no_device.loops import inside, is_loop
from no_device.retarget import Compiled

_EXTERN = re.compile(r"^\s+(?:\w+ = )?((?:extern_kernels|torch\.ops|aten)\.[\w.]+)\(", re.M)
_LAUNCH = re.compile(r"^\s+(\w+)\.run\(", re.M)


def counted(found: Compiled) -> dict[str, Any]:
    """Numbers of one step.

    kernels: distinct ones.  launches: of these, in a call.  extern: calls of ops that torch has kernels for (products,
    convolutions, attention), each of which may launch several.  inside: what loops of psg_fx's own launch, counted once
    each among the extern calls.  gradients: those of a convolution's backward beyond the first, since cuDNN has a call
    for each.  bytes: read and written, as inductor counts them (not inside loops).
    Of steps whose kernels were compiled: registers (a thread), shared (bytes a block): the most that a kernel takes;
    spilling: kernels that spill registers, spilled: which, and bytes of stack a thread.
    """
    body = found.wrapper.split("async_compile.wait(")[-1].split("def benchmark_compiled_module")[0]
    externs = Counter(_EXTERN.findall(body))
    launches = Counter(_LAUNCH.findall(body))
    if lacking := launches.keys() - found.kernels.keys():
        raise RuntimeError(f"launched, but not seen to be compiled: {sorted(lacking)}")
    found_out = {
        "kernels": len(found.kernels),
        "launches": launches.total(),
        "extern": externs.total(),
        "inside": in_loops(found.graph),
        "gradients": further_gradients(found.graph),
        "bytes": found.bytes,
        "externs": dict(externs.most_common()),
        "groups": dict(Counter(map(_group, launches.elements())).most_common()),
    }
    taken = {name: resources(binary) for name, binary in found.kernels.items() if binary is not None}
    if taken:
        spilled = {name: t["spilled"] for name, t in taken.items() if t["spilled"]}
        found_out |= {key: max(t[key] for t in taken.values()) for key in ("registers", "shared")}
        found_out |= {"spilling": len(spilled), "spilled": spilled}
    return found_out


def value_of(node: Node) -> Any:
    """What `torch.compile` has noted of a node, or a pass of psg_fx."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta["val"]


def in_loops(gm: GraphModule) -> int:
    """Kernels that loops of psg_fx's own launch."""

    def concrete(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        sizes = [s if isinstance(s, int) else s.node.hint for s in value.shape]
        return torch.empty(sizes, dtype=value.dtype, device="meta")

    return sum(
        len(inside(node.target, *map_arg((node.args, node.kwargs), lambda n: concrete(value_of(n)))))
        for node in gm.graph.nodes
        if is_loop(node.target)
    )


def further_gradients(gm: GraphModule) -> int:
    """Of every convolution's backward, the gradients that it is asked for beyond one."""
    backward = torch.ops.aten.convolution_backward.default
    return sum(sum(node.args[-1][:2]) - 1 for node in gm.graph.nodes if node.target is backward)


def _group(kernel: str) -> str:
    """`triton_poi` of `triton_poi_fused_add_3`: pointwise, reductions (`red`, `per`) and the like."""
    return "_".join(kernel.split("_")[:2])


def resources(binary: Any) -> dict[str, int]:
    """Of a kernel: registers a thread, bytes of stack a thread (registers are spilled there), shared bytes a block."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said))
    spilled = int(usage["STACK"]) + int(usage["LOCAL"])
    return {"registers": int(usage["REG"]), "spilled": spilled, "shared": binary.metadata.shared}
