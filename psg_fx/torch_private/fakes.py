"""Fake tensors with symbols for sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    compute_unbacked_bindings,
)

LIST_OF_FAKE: Callable[[FakeTensor], Any] = FakeTensor.tolist
"""A method of its own, which no mode of functions sees."""


def _like_the_first(mode: FakeTensorMode, func: Any, first: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    with mode:
        return torch.empty_like(first)


for _name in ("_sample_dirichlet", "_dirichlet_grad", "_standard_gamma", "_standard_gamma_grad"):
    _op = getattr(torch.ops.aten, _name).default
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_op.name(), "Meta"):
        register_op_impl(_op)(_like_the_first)  # torch knows their shapes by their kernels alone


def has_known_value(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be looked at while a program is traced: it is a constant of the code."""
    if isinstance(tensor, FakeTensor):
        return tensor.constant is not None
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def with_symbols(mode: FakeTensorMode, tensor: torch.Tensor, sizes: list[DimDynamic], name: str) -> torch.Tensor:
    """The tensor as a fake one, its sizes symbols or numbers as is said of each.  name: no other tensor's."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))


def fake_batch() -> tuple[Callable[[torch.Tensor, bool], torch.Tensor], Callable[[], bool]]:
    """A maker of fake tensors `(like, stacked)` whose first size, if stacked, is a batch size of their own, and a
    question: is that size still a symbol?
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    size = 3
    made: list[torch.Tensor] = []

    def example(like: torch.Tensor, stacked: bool) -> torch.Tensor:
        shape = [int(s) for s in like.shape[stacked:]]
        real = torch.empty([size, *shape] if stacked else shape, dtype=like.dtype, device="meta")
        dims = [DimDynamic.DUCK] * stacked + [DimDynamic.STATIC] * len(shape)
        with mode:
            sized = with_symbols(mode, real, dims, f"value_{len(made)}")
            fake = torch.empty(sized.shape, dtype=like.dtype, device=like.device)
        made.extend([fake] if stacked else [])
        return fake

    def is_symbol() -> bool:
        sizes: list[Any] = [t.shape[0] for t in made]
        return all(isinstance(s, torch.SymInt) and not s.node.expr.is_number for s in sizes)

    return example, is_symbol


def with_own_sizes(like: torch.Tensor, hints: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor on the device and among the symbols of `like`, every size of which is a symbol of its own.

    hints: what each size is taken for where a trace must know; no other size should be that.
    """
    assert isinstance(like, FakeTensor)
    real = torch.empty(tuple(hints), dtype=dtype, device="meta")
    with like.fake_mode as mode:
        sized = with_symbols(mode, real, [DimDynamic.DYNAMIC] * len(hints), f"sizes_{len(hints)}")
        return torch.empty(sized.shape, dtype=dtype, device=like.device)


def symbolic_inputs(tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> list[torch.Tensor]:
    """The tensors as fake ones whose size in `dims` is one symbol; they agree on that size."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    made: list[torch.Tensor] = []
    for index, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
        sizes = [DimDynamic.DUCK if d == dim else DimDynamic.STATIC for d in range(tensor.ndim)]
        made.append(with_symbols(mode, tensor, sizes, f"value_{index}"))
    return made


def forget_real_tensors(fake: torch.Tensor) -> None:
    """Fake tensors no longer tell which real ones of these they were made of: torch keeps weak references to those, and
    does not swap a tensor that has any (`torch.utils.swap_tensors`, by which modules may convert their parameters).
    """
    assert isinstance(fake, FakeTensor)
    fake.fake_mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def sizes_made(fake: torch.Tensor, result: Any) -> dict[Any, Any]:
    """The sizes that an op on fake tensors has made, which depend on values, and where they are in its result.  Until
    somebody asks, the next trace with these tensors misses them.
    """
    return compute_unbacked_bindings(fake.fake_mode.shape_env, result) or {}  # type: ignore[attr-defined]


def empty_fake(
    mode: Any, shape: Sequence[Any], strides: Sequence[Any] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A fake tensor of memory of its own, made without asking what an op returns, and without guards.

    strides: None for those of a tensor that lies in its memory in order.
    """
    env = mode.shape_env
    with in_kernel_invocation_manager(mode), contextlib.nullcontext() if env is None else env.suppress_guards():
        if strides is None:
            empty = torch.empty(shape, dtype=dtype, device="meta")
        else:
            empty = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, empty, device)


def empty_as(like: torch.Tensor, among: Iterable[torch.Tensor] = ()) -> torch.Tensor:
    """A tensor without values that lies in memory as another, and is conjugated or negated lazily as that is.

    among: tensors of the trace that runs: an equal size of one of these is taken, since a trace knows sizes by object.
    """
    sizes: list[Any] = [size for t in among for size in (*t.shape, *t.stride())]
    known = {size.node.expr: size for size in reversed(sizes) if isinstance(size, torch.SymInt)}

    def of_the_trace(size: Any) -> Any:
        return known.get(size.node.expr, size) if isinstance(size, torch.SymInt) else size

    shape, strides = map(of_the_trace, like.shape), map(of_the_trace, like.stride())
    made = torch.empty_strided(tuple(shape), tuple(strides), dtype=like.dtype, device=like.device)
    made = torch._neg_view(made) if like.is_neg() else made
    return made.conj() if like.is_conj() else made


class Values:
    """Makes fake tensors and sizes on the symbols of some that are there."""

    def __init__(self, like: Iterable[torch.Tensor]) -> None:
        """like: fake tensors of one trace, with every symbol as a size."""
        tensors = list(like)
        assert isinstance(tensors[0], FakeTensor)
        self._mode = tensors[0].fake_mode
        sizes: list[Any] = [size for tensor in tensors for size in tensor.shape]
        self._hints = {size.node.expr: size.node.hint for size in sizes if isinstance(size, torch.SymInt)}
        self._sizes: dict[sympy.Expr, int | torch.SymInt] = {}

    def size(self, value: sympy.Expr) -> int | torch.SymInt:
        """An expression of symbols as a size."""
        if value.is_number:
            return int(value)
        if value not in self._sizes:
            env = self._mode.shape_env
            assert env is not None
            self._sizes[value] = env.create_symintnode(value, hint=int(value.xreplace(self._hints)))
        return self._sizes[value]

    def tensor(
        self, shape: Iterable[sympy.Expr], strides: Iterable[sympy.Expr], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A fake tensor of memory of its own."""
        return empty_fake(self._mode, [*map(self.size, shape)], [*map(self.size, strides)], dtype, device)
