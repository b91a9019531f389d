"""The layers and argument grids of Opacus' own gradient tests, recorded while those tests run.

Opacus ships its tests (`opacus.tests.grad_samples`): hypothesis draws the arguments, the test makes a layer and a batch
and hands both to `run_test`.  Here `run_test` only writes them down, so a case is whatever their test makes.
"""

from __future__ import annotations

import copy
import importlib
import unittest
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from external.program import Problem, Program

FILES = (
    "conv1d_test",
    "conv2d_test",
    "conv3d_test",
    "dp_multihead_attention_test",
    "dp_rnn_test",
    "embedding_bag_test",
    "embedding_test",
    "group_norm_test",
    "instance_norm1d_test",
    "instance_norm2d_test",
    "instance_norm3d_test",
    "layer_norm_test",
    "linear_test",
    "rms_norm_test",
    "sequence_bias_test",
)
"""Every file of `opacus.tests.grad_samples` that checks gradients by `run_test`."""

EXAMPLES = {"conv1d_test": 80, "conv2d_test": 80, "conv3d_test": 80, "dp_rnn_test": 40}
"""Examples that hypothesis draws; the tests of convolutions drop most of theirs, where the groups do not fit."""

RAGGED = "the inputs disagree on the number of samples"
PACKED = "a packed sequence is taken apart"
"""The refusals of bags with offsets, of which no dim holds the samples, and of Opacus' own layers over packed
sequences, which read what torch has packed."""


@dataclass(frozen=True)
class Ragged(Problem):
    """A batch that no dim splits into samples; `samples` are the inputs of each sample alone."""

    samples: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of `run_test`."""

    x: Any
    module: nn.Module
    batch_first: bool

    @property
    def dim(self) -> int:
        """Where the samples lie."""
        return 0 if self.batch_first else 1

    @property
    def empty(self) -> bool:
        """Whether the batch has no samples."""
        return isinstance(self.x, Tensor) and self.x.shape[self.dim] == 0

    def problem(self) -> Problem:
        """The layer on the batch in float64, under a loss in which every output has a part of its own."""
        module = copy.deepcopy(self.module).double()
        if isinstance(self.x, PackedSequence):
            packed = self.x.double()
            return Ragged(module, (packed,), samples=tuple((part,) for part in unpacked(packed)))
        if isinstance(self.x, tuple):
            return Ragged(module, self.x, samples=tuple(bags(*self.x)))
        x = self.x.double() if self.x.is_floating_point() else self.x
        return Problem(module, x, batch_dim=self.dim, out_dim=self.dim)

    def describe(self) -> str:
        """The kind of the layer and the shape of the batch."""
        layer = next((part for part in self.module.children()), self.module)
        return f"{type(layer).__name__} on {shapes(self.x)}{'' if self.batch_first else ', samples in dim 1'}"


def unpacked(x: PackedSequence) -> Iterator[PackedSequence]:
    """Each sequence alone, in the order in which they are packed: that of Opacus' rows."""
    padded, lengths = pad_packed_sequence(PackedSequence(x.data, x.batch_sizes))
    for i, length in enumerate(lengths):
        yield pack_padded_sequence(padded[:length, i : i + 1], length.reshape(1))


def bags(ids: Tensor, offsets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each bag of `nn.EmbeddingBag` alone."""
    ends = [*offsets.tolist()[1:], len(ids)]
    for start, end in zip(offsets.tolist(), ends, strict=True):
        yield ids[start:end], offsets[:1]


def shapes(x: Any) -> str:
    if isinstance(x, PackedSequence):
        return f"packed {x.batch_sizes.tolist()} of {list(x.data.shape)}"
    return str(list(x.shape)) if isinstance(x, Tensor) else " and ".join(shapes(part) for part in x)


@contextmanager
def few_examples(count: int) -> Iterator[None]:
    """While this is open, hypothesis' default is `count` examples, the same ones in every run, and no shrinking."""
    before = settings.get_current_profile_name()
    settings.register_profile(
        "recorded",
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("recorded")
    try:
        yield
    finally:
        settings.load_profile(before)


@cache
def record(file: str) -> list[Call]:
    """Runs the tests of one file with `run_test` replaced; each layer and batch once."""
    calls: dict[int, Call] = {}

    def run_test(self: object, x: Any, module: nn.Module, batch_first: bool = True, **others: object) -> None:
        calls.setdefault(id(module), Call(x, module, batch_first))

    with few_examples(EXAMPLES.get(file, 12)), torch.random.fork_rng(devices=[]):
        tests = importlib.import_module(f"opacus.tests.grad_samples.{file}")
        common = importlib.import_module("opacus.tests.grad_samples.common")
        torch.manual_seed(zlib.crc32(file.encode()))
        with mock.patch.object(common.GradSampleHooks_test, "run_test", run_test):
            for test in drawn(tests):
                test()
    return list(calls.values())


def drawn(tests: ModuleType) -> Iterator[Callable[[], None]]:
    """The tests of a file whose arguments hypothesis draws; the others do not call `run_test`."""
    for suite in unittest.defaultTestLoader.loadTestsFromModule(tests):
        for case in suite:
            method = getattr(case, case.id().rpartition(".")[2])
            if is_hypothesis_test(method):
                yield method


def programs() -> list[Program]:
    """All cases of all files but those of an empty batch."""
    return [program for file in FILES for program in programs_of(file)]


def programs_of(file: str) -> list[Program]:
    """The cases of one file."""
    kind = file.removesuffix("_test")
    return [
        Program(f"{kind}/{i} {call.describe()}", call.problem, refused=refusal(call), family="opacus")
        for i, call in enumerate(record(file))
        if not call.empty
    ]


def refusal(call: Call) -> str:
    """What psg_fx says of layers over packed sequences, and of bags with offsets."""
    if isinstance(call.x, Tensor):
        return ""
    return PACKED if isinstance(call.x, PackedSequence) else RAGGED
