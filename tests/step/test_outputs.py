"""Where results lie: memory is used again when nobody holds what lies in it, and only then."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import psg_fx
from psg_fx import Grads, MeanGrad, blocks
from psg_fx.blocks import blocks_used
from psg_fx.errors import BadArgument
from psg_fx.step.compiled import write_into
from support import oracle
from support.selection import one_in

pytestmark = pytest.mark.inductor


@pytest.fixture(autouse=True)
def _every_value_is_large(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(blocks, "LARGE", 1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(backend: str = "inductor", **options: Any) -> psg_fx.PerSampleModule:
    torch.manual_seed(0)
    return psg_fx.transform(
        nn.Linear(6, 3), F.cross_entropy, quantities=[Grads(), MeanGrad()], backend=backend, **options
    )


def batch(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def compare(got: Any, want: Any) -> None:
    got, want = pytree.tree_leaves(vars(got)), pytree.tree_leaves(vars(want))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert oracle.relative_error(a, b) < 1e-5


def starts(out: Any) -> list[int]:
    return [t.data_ptr() for t in pytree.tree_leaves(vars(out))]


@pytest.mark.parametrize("reuse", one_in(2, [True, False]))
def test_results_do_not_depend_on_where_they_lie(reuse: bool) -> None:
    step, want = make(reuse_outputs=reuse, dynamic=True), make("eager")
    for seed, size in enumerate((4, 7, 2, 1, 9)):
        compare(step(*batch(size, seed)), want(*batch(size, seed)))


def test_results_that_are_held_are_not_overwritten() -> None:
    step, want = make(reuse_outputs=True), make("eager")
    held = [step(*batch(4, seed)) for seed in range(3)]
    view = step(*batch(4, 3)).grads["weight"][1:]
    step(*batch(4, 4))
    for seed, out in enumerate(held):
        compare(out, want(*batch(4, seed)))
    assert oracle.relative_error(view, want(*batch(4, 3)).grads["weight"][1:]) < 1e-5


def test_memory_that_nobody_holds_is_used_again() -> None:
    step = make(reuse_outputs=True)
    first = starts(step(*batch(4)))
    with blocks_used() as before:
        assert starts(step(*batch(4, 1))) == first
    with blocks_used() as after:
        step(*batch(4, 2))
    assert before
    assert after == before


@pytest.mark.parametrize("set_by_user", [True, False])
def test_what_the_c_library_keeps_is_left_to_it(set_by_user: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first call blocks hold results alone, unless glibc was told otherwise."""
    if set_by_user:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
    blocks._settle_allocator.cache_clear()
    step = make(reuse_outputs=True)
    out = step(*batch(4))
    held = len({t.untyped_storage().data_ptr() for t in pytree.tree_leaves(vars(out))})
    del out
    with blocks_used() as used:
        out = step(*batch(4, 1))
    assert (len(used) == held) is not set_by_user
    blocks._settle_allocator.cache_clear()
    assert {place for place in starts(out) if place in used}
    compare(out, make("eager")(*batch(4, 1)))


def test_smaller_batch_lies_in_the_memory_of_a_larger_one() -> None:
    step = make(reuse_outputs=True, dynamic=True)
    step(*batch(9))
    with blocks_used() as before:
        step(*batch(9))
    with blocks_used() as after:
        for size in (7, 5, 9):
            step(*batch(size))
    assert before
    assert after == before


def test_blocks_without_use_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[blocks.Block]] = []

    class Noted(blocks.Block):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            made.append(weakref.ref(self))

    monkeypatch.setattr(blocks, "Block", Noted)
    step = make(reuse_outputs=True, dynamic=True)
    held = step(*batch(8))
    place = held.grads["weight"].data_ptr()
    (block,) = [ref for ref in made if getattr(ref(), "address", 0) == place]
    for seed in range(blocks._CALLS + 1):
        step(*batch(8, seed))
    assert block() is None
    compare(held, make("eager")(*batch(8)))


def test_out_is_written_into() -> None:
    step, want = make(reuse_outputs=True), make("eager")
    out = step(*batch(4))
    tensors, places = pytree.tree_leaves(vars(out)), starts(out)
    used: list[dict[int, int]] = []
    for seed in (1, 2):
        with blocks_used() as now_used:
            assert step(*batch(4, seed), out=out) is out
        used.append(now_used)
        now = pytree.tree_leaves(vars(out))
        assert starts(out) == places
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(now, tensors, strict=True))
        compare(out, want(*batch(4, seed)))
    assert used[0] == used[1] != {}


def test_out_of_another_batch_size() -> None:
    step, want = make(reuse_outputs=True, dynamic=True), make("eager")
    out = step(*batch(6))
    for seed, size in enumerate((4, 0, 7, 7)):
        compare(step(*batch(size, seed), out=out), want(*batch(size, seed)))


def test_out_whose_memory_is_not_ours() -> None:
    step, want = make(reuse_outputs=True), make("eager")
    other = want(*batch(4))
    grads = other.grads["weight"]
    step(*batch(4, 1), out=other)
    assert other.grads["weight"] is grads
    compare(other, want(*batch(4, 1)))


def test_arguments_that_lie_in_out() -> None:
    """The gradients of the batch before as the directions of this one."""
    quantities = [Grads(), psg_fx.Dots(count=4)]
    step, want = (
        psg_fx.transform(nn.Linear(6, 3), F.cross_entropy, quantities=quantities, backend=backend, reuse_outputs=reuse)
        for backend, reuse in (("inductor", True), ("eager", False))
    )
    want.model.load_state_dict(step.model.state_dict())
    out, plain = (
        made(*batch(4), directions={n: torch.ones(4, *p.shape) for n, p in made.named_parameters()})
        for made in (step, want)
    )
    for seed in (1, 2):
        out = step(*batch(4, seed), directions=out.grads, out=out)
        plain = want(*batch(4, seed), directions=plain.grads)
        compare(out, plain)


def test_values_that_changed_places() -> None:
    """Each lies where the other belongs."""
    block = torch.arange(4.0)
    a, b = torch.zeros(2), torch.zeros(2)
    former = {"x": {"a": a, "b": b}}
    a.copy_(block[2:])
    b.copy_(block[:2])
    write_into(former, {"x": {"a": b.view(2), "b": a.view(2)}})
    assert a.tolist() == [0.0, 1.0]
    assert b.tolist() == [2.0, 3.0]


def test_gradients_left_on_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    step, places = psg_fx.transform(model, reuse_outputs=True), []
    for seed in range(3):
        x, y = batch(4, seed)
        F.cross_entropy(step(x), y, reduction="sum").backward()
        found: torch.Tensor = model.weight.grad_sample  # type: ignore[assignment]
        want = [
            torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), model.weight)[0] for i in range(4)
        ]
        assert oracle.relative_error(found, torch.stack(want)) < 1e-5
        places.append(found.data_ptr())
        del found
        model.weight.grad_sample = model.bias.grad_sample = None  # type: ignore[assignment]
    assert places[1] == places[2]


def test_refusals() -> None:
    with pytest.raises(BadArgument, match="reuse_outputs has no effect with backend='eager'"):
        make("eager", reuse_outputs=True)
    step = make()
    with pytest.raises(BadArgument, match="out= needs a step that reuses its outputs"):
        step(*batch(4), out=step(*batch(4)))
    reusing = make(reuse_outputs=True)
    with torch.inference_mode():
        inside = reusing(*batch(4))
        assert reusing(*batch(4), out=inside) is inside
    with pytest.raises(BadArgument, match=r"out was made under torch\.inference_mode"):
        reusing(*batch(4), out=inside)
    with pytest.raises(BadArgument, match="out has the fields losses"):
        reusing(*batch(4), out=psg_fx.transform(reusing.model, F.cross_entropy, backend="eager")(*batch(4)))


def test_memory_is_used_again_where_calls_do_not_wait_for_the_compiler() -> None:
    step, want = make(reuse_outputs=True, warm="eager"), make("eager")
    step(*batch(4))
    step.wait()
    first = starts(step(*batch(4, 1)))
    out = step(*batch(4, 2))
    assert starts(out) == first
    compare(out, want(*batch(4, 2)))


def test_parts_are_written_into_a_former_output() -> None:
    step, want = make(reuse_outputs=True, dynamic=True), make("eager")
    former = step(*batch(9))
    places = starts(former)
    for size in (2, 9):
        out = psg_fx.microbatch(step, size)(*batch(9, 1), out=former)
        assert out is former
        assert starts(out) == places
        compare(out, want(*batch(9, 1)))
    with pytest.raises(BadArgument, match="out= needs a step that reuses its outputs"):
        psg_fx.microbatch(want, 2)(*batch(9), out=former)
