"""What a store writes down of what it was made of: the same in every process, and of every value."""

from __future__ import annotations

import copy
import enum
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psg_fx
from psg_fx import Norms
from psg_fx.errors import BadArgument
from psg_fx.loops.made_of import made_of
from psg_fx.loops.written import Texts
from support.batches import loader
from support.stores import own_step

PROGRAM = """
    import json, sys
    from dataclasses import dataclass
    from typing import Any
    import torch, torch.nn.functional as F
    from torch import nn
    import psg_fx
    from psg_fx.loops.made_of import made_of

    def act(x): return x.sqrt()

    @dataclass(frozen=True)
    class Own(psg_fx.Norms):
        fn: Any = act
        names: Any = frozenset(["a", "b", "c", "d"])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.of = nn.Linear(4, 3), {"a", "b", "c"}
            self.register_forward_pre_hook(lambda module, inputs: inputs)
        def forward(self, x, ids): return self.layer(x) if "x" in {"x", "y", "z"} else x

    torch.manual_seed(0)
    rows = psg_fx.Rows(lambda x, ids: ids)
    class Loss:
        names = ("a", "b")
        def __init__(self): self.table, self.more = {"u": 1.0}, {"s", "t", "u"}
        def __call__(self, output, target): return F.cross_entropy(output, target)
    step = psg_fx.transform(Net(), Loss(), quantities=Own(), batch_dim=((rows, rows), 0))
    print(json.dumps(made_of(step, {"directions": {"a": torch.ones(3)}}, 3, False, "cpu")))
"""


@pytest.mark.slow
def test_another_process_finds_the_same() -> None:
    """Whatever addresses functions have there, and in whatever order it has sets."""
    found = set()
    for seed in ("1", "2"):
        program = f"import sys; sys.path[:0] = {sys.path!r}\n" + textwrap.dedent(PROGRAM)
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
    text = found.pop()
    assert " at 0x" not in text
    assert json.loads(text)["batch_dim"].startswith("tuple(tuple(Rows(ids=__main__.<lambda>, dim=0")


def test_a_step_that_has_run_is_what_it_was() -> None:
    """Neither capture nor calls leave anything behind in what is compared."""
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Flatten())
    own = own_step(Norms(), model, nn.CrossEntropyLoss())
    before = copy.deepcopy(made_of(own, {}, None, False, "cpu"))
    own(torch.randn(3, 2, 4), torch.randint(8, (3,)))
    assert made_of(own, {}, None, False, "cpu") == before


@pytest.mark.parametrize("given", [{"record": 1}, {}])
def test_a_store_that_was_written_otherwise_can_be_read_alone(tmp_path: Path, given: dict[str, Any]) -> None:
    own = own_step()
    psg_fx.over(loader(5, 4), own, store=tmp_path, progress=False)
    about = json.loads((tmp_path / "store.json").read_text())
    del about["made of"]["record"]
    about["made of"] |= given
    (tmp_path / "store.json").write_text(json.dumps(about))
    assert len(psg_fx.Store(tmp_path)) == 5
    with pytest.raises(BadArgument, match=r"another version of psg_fx[^\0]*read it by psg_fx\.Store"):
        psg_fx.over(loader(5, 4), own, store=tmp_path, progress=False)


def text_of(value: Any) -> str:
    return Texts({}).text(value)


def of_itself(x: int) -> Any:
    return of_itself


class Odd:
    """It has an attribute of every name, which raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Kind(enum.Enum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (2**70, hex(2**70)),
        (Kind.ONE, "Kind.ONE"),
        (torch.tensor(0.5), "tensor(0.5, float32)"),
        (torch.ones(2, dtype=torch.complex64).conj(), "tensor([(1-0j), (1-0j)], complex64)"),
        (torch.ones(2, device="meta"), "tensor([2], float32, Tensor of torch.strided on meta)"),
        (torch.ones(2).to_sparse(), "tensor([2], float32, Tensor of torch.sparse_coo on cpu)"),
        (torch.add, "torch._VariableFunctionsClass.add"),
        (torch.ops.aten.add.Tensor, "aten.add.Tensor"),
        ("of".join, "builtins.str.join of 'of'"),
        ({"a": [1, {2}]}, "{'a': list(1, set(2))}"),
        (of_itself, f"{__name__}.of_itself"),
        (object(), "builtins.object()"),
    ],
)
def test_values_as_texts(value: Any, text: str) -> None:
    assert text_of(value) == text


def test_long_values_have_a_fingerprint_at_the_end() -> None:
    first, second = list(range(500)), [*range(499), 0]
    assert text_of(first) != text_of(second)
    assert len(text_of(first)) < 400
    large = torch.zeros(3000)
    assert text_of(large) != text_of(torch.cat([large[1:], torch.ones(1)]))
    assert text_of(large) == text_of(large.clone())


def test_an_object_that_raises_counts_by_its_type() -> None:
    assert text_of(Odd()) == f"{__name__}.Odd()"


def test_what_holds_itself() -> None:
    inside: list[Any] = [1]
    inside.append(inside)
    assert text_of(inside) == "list(1, list again)"


def test_functions_of_one_name_are_told_apart() -> None:
    texts, other = Texts({}), Texts({})
    pair = [lambda x: x, lambda x: x * 2]
    first, second = (texts.text(f) for f in pair)
    assert second == f"{first} (2)"
    assert [other.text(f) for f in reversed(pair)] == [first, second]
    assert list(texts.code) == list(other.code) == [first]
    assert texts.code != other.code
