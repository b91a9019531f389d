"""The derivatives of `torch.func`, to be taken in another way for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch._functorch.eager_transforms import _replace_args, _slice_argnums

from psg_fx.torch_private.patching import patched_here

SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled
"""What a mode of functions is told where gradients are turned on or off."""

chosen: Callable[..., Any] = _slice_argnums
"""Of the arguments of a function, those that `argnums` says."""
with_chosen: Callable[..., tuple[Any, ...]] = _replace_args
"""The arguments with others in place of those."""


@contextlib.contextmanager
def derivatives_by(
    grad_and_value: Callable[..., Any], vjp: Callable[..., Any], jvp: Callable[..., Any]
) -> Iterator[None]:
    """`grad`, `grad_and_value`, `vjp` and `jacrev`, and `jvp`, `jacfwd` and `hessian`, by these functions, which are
    called as those of torch: `(func, argnums, has_aux, args, kwargs)`, `(func, *primals, argnums=, has_aux=)` and
    `(func, primals, tangents, argnums, *, strict=, has_aux)`.
    """
    with (
        patched_here(eager_transforms, "grad_and_value_impl", grad_and_value),
        patched_here(eager_transforms, "_vjp_with_argnums", vjp),
        patched_here(eager_transforms, "_jvp_with_argnums", jvp),
    ):
        yield
