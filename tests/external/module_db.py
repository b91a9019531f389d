"""Every module of PyTorch's own test database that has trainable parameters, on a batch made of each sample input.

The database says with which arguments a module is built and called. Where its example is one sample without a batch
dim (`no_batch_dim` in its description, or fewer dims than `RANKS` says), fresh samples are stacked in the dim where the
module takes them; where it is a batch, fresh data of the same shape replace it. Two inputs that become the same program
count once, a module whose parameters are all absent (`affine=False`) not at all.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
import unittest
import warnings
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from external.program import Problem, Program

B = 3
SEQUENCE = -1
"""A dim that depends on the module: 0 if it takes batches first, else 1."""

RANKS = {
    "Linear": 1, "Bilinear": 1, "LinearCrossEntropyLoss": 1, "RNNCell": 1, "GRUCell": 1, "LSTMCell": 1,
    "RNN": 2, "GRU": 2, "LSTM": 2, "MultiheadAttention": 2, "TransformerEncoderLayer": 2, "TransformerEncoder": 2,
    "TransformerDecoderLayer": 2, "Transformer": 2,
}  # fmt: skip
"""The dims of the first argument of one sample, where the description does not say `no_batch_dim`."""

DIMS = {
    "RNN": {"input": SEQUENCE, "hx": 1}, "GRU": {"input": SEQUENCE, "hx": 1}, "LSTM": {"input": SEQUENCE, "hx": 1},
    "MultiheadAttention": {"query": SEQUENCE, "key": SEQUENCE, "value": SEQUENCE, "attn_mask": None},
    "TransformerEncoderLayer": {"src": SEQUENCE, "src_mask": None},
    "TransformerEncoder": {"src": SEQUENCE, "mask": None},
    "TransformerDecoderLayer": {"tgt": SEQUENCE, "memory": SEQUENCE, "tgt_mask": None, "memory_mask": None},
    "Transformer": {"src": SEQUENCE, "tgt": SEQUENCE, "src_mask": None, "tgt_mask": None},
}  # fmt: skip
"""Where each argument holds the samples: 0 unless it is said here; None: one for all."""

OUT_DIMS: dict[str, Any] = {
    "RNN": (SEQUENCE, 1), "GRU": (SEQUENCE, 1), "LSTM": (SEQUENCE, 1), "MultiheadAttention": (SEQUENCE, 0),
    "TransformerEncoderLayer": SEQUENCE, "TransformerEncoder": SEQUENCE, "TransformerDecoderLayer": SEQUENCE,
    "Transformer": SEQUENCE,
}  # fmt: skip


def programs() -> list[Program]:
    """The programs of the database."""
    return list(database())


@cache
def database(module: str = "") -> tuple[Program, ...]:
    """The programs of the database, or those of one of its modules: thousands of modules are built for all."""
    found: dict[str, Program] = {}
    for info in infos():
        if module and info.name.removeprefix("nn.") != module:
            continue
        for training in (True, False):
            for k, sample in enumerate(sample_inputs(info, training)):
                entry = Entry(info.module_cls, sample, training)
                model = entry.module()
                if not training and not (info.train_and_eval_differ or attends(model)):
                    break
                if any(p.requires_grad for p in model.parameters()):
                    words = [info.name.removeprefix("nn."), str(k), sample.desc, "train" if training else "eval"]
                    program = Program("-".join(filter(None, words)), entry, family="module_db", **entry.expected())
                    found.setdefault(entry.key(model), program)
    return tuple(found.values())


def infos() -> list[Any]:
    """PyTorch's list. Its import would freeze the flags of `torch.backends`, and asks for a package of its runner."""
    runner = ModuleType("expecttest")
    runner.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    lent = {} if "expecttest" in sys.modules else {"expecttest": runner}
    with mock.patch.object(torch.backends, "disable_global_flags"), mock.patch.dict(sys.modules):
        sys.modules.update(lent)
        from torch.testing._internal import common_modules
    return list(common_modules.module_db)


def sample_inputs(info: Any, training: bool) -> list[Any]:
    """The arguments that the database has for one module."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return list(info.module_inputs_func(info, "cpu", torch.float64, requires_grad=False, training=training))


class Entry:
    """One sample input as the maker of a problem with a batch of `B`."""

    def __init__(self, kind: type[nn.Module], sample: Any, training: bool) -> None:
        self.kind, self.training = kind, training
        self.name = kind.__name__
        self.built, self.called, self.described = sample.constructor_input, sample.forward_input, sample.desc

    def __call__(self) -> Problem:
        model = self.module()
        named, places = self.batch(model)
        if self.name.startswith("Lazy"):
            model(**named)
        inputs, dims = (named, places) if self.has_gaps(named) else (tuple(named.values()), tuple(places.values()))
        out_dim = self.place(model, OUT_DIMS.get(self.name, 0))
        loss = (lambda out: out) if self.is_whole_loss() else None
        return Problem(model, inputs, loss_fn=loss, batch_dim=(dims, None), out_dim=out_dim)

    def has_gaps(self, named: dict[str, Any]) -> bool:
        """Whether an argument is left out before another, so that the others are given by name."""
        _, *names = inspect.signature(self.kind.forward).parameters
        return list(named) != names[: len(named)]

    def module(self) -> nn.Module:
        """The module, in float64."""
        args, kwargs = copy.deepcopy((self.built.args, self.built.kwargs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.kind(*args, **kwargs).to(torch.float64).train(self.training)

    def expected(self) -> dict[str, str]:
        """What is refused: statistics of the batch."""
        if not self.name.startswith("BatchNorm"):
            return {}
        model = self.module()
        if self.training and model.momentum is None:  # the number of batches is read, to average over them
            return {"refused": "values of a tensor"}
        return {"mixes": "its mean runs over dim"} if self.training or not model.track_running_stats else {}

    def is_whole_loss(self) -> bool:
        """Whether its output is one loss for the whole batch."""
        return self.built.kwargs.get("reduction") in ("mean", "sum")

    def key(self, model: nn.Module) -> str:
        """The same for entries that make the same program, whatever the data."""
        shapes = pytree.tree_map_only(Tensor, lambda t: (*t.shape, t.dtype), self.batch(model))
        built = pytree.tree_map_only(Tensor, lambda t: tuple(t.shape), (self.built.args, self.built.kwargs))
        return f"{self.kind} {self.training} {built} {shapes}"

    def batch(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments by name, and where each holds the samples."""
        given = inspect.signature(self.kind.forward).bind(None, *self.called.args, **self.called.kwargs).arguments
        named = {name: value for name, value in given.items() if name != "self" and value is not None}
        places = DIMS.get(self.name, {})
        dims = {name: self.place(model, places.get(name, 0)) for name in named}
        return {name: self.stacked(value, dims[name]) for name, value in named.items()}, dims

    def place(self, model: nn.Module, dim: Any) -> Any:
        """A dim of the tables for this module."""
        if isinstance(dim, tuple):
            return tuple(self.place(model, d) for d in dim)
        return dim if dim != SEQUENCE else 0 if batch_first(model) else 1

    def stacked(self, value: Any, dim: int | None) -> Any:
        """`B` fresh samples like `value`, which is a batch or one sample; a mask for all (or of the first head)."""
        if dim is None:
            return value if value.ndim == 2 else value[0]
        if isinstance(value, tuple):
            return tuple(self.stacked(v, dim) for v in value)
        shape = list(value.shape)
        shape[dim : dim + self.is_batch()] = [B]
        if value.dtype == torch.bool:
            return torch.arange(math.prod(shape)).reshape(shape) % (shape[-1] + 1) == 0
        if value.is_floating_point():
            return torch.rand(shape, dtype=value.dtype)
        return self.integers(value, shape)

    def integers(self, value: Tensor, shape: list[int]) -> Tensor:
        """Integers that occur in `value`; not the ignored one if a mean over the sample alone would be 0 / 0."""
        known, ignored = value.unique(), self.built.kwargs.get("ignore_index")
        if self.is_whole_loss() and len(shape) == 1 and ignored is not None and len(known) > 1:
            known = known[known != ignored]
        return known[torch.randint(len(known), shape)]

    def is_batch(self) -> bool:
        """Whether the example has a dim for the samples."""
        if self.name not in RANKS:
            return not self.described.startswith(("no_batch_dim", "scalar"))
        first: Tensor = next(iter([*self.called.args, *self.called.kwargs.values()]))
        return first.ndim > RANKS[self.name]


def attends(model: nn.Module) -> bool:
    """Whether it has attention layers, which take another path in eval mode."""
    return any(isinstance(m, nn.MultiheadAttention) for m in model.modules())


def batch_first(model: nn.Module) -> bool:
    """Whether sequences hold the samples in dim 0."""
    return any(getattr(m, "batch_first", False) for m in model.modules())
