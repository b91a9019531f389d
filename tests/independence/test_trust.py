"""Custom operators need the user's word, and are tried out all the same; what has effects is never run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import psg_fx
from psg_fx.errors import BadArgument, NotYetSupported, SamplesMixed
from psg_fx.graph import facts
from psg_fx.op_table import changed, rows
from psg_fx.passes.independence.batch import batch
from support import oracle
from support.graphs import captured
from support.selection import one_in

X, Y = torch.randn(6, 4), torch.randint(3, (6,))


def define(name: str, function: Callable[[Tensor], Tensor], backward: Any = None) -> Any:
    """A custom op of one argument whose result is shaped like it."""

    def kernel(x: Tensor) -> Tensor:
        return function(x.clone())

    op = torch.library.custom_op(f"trust_tests::{name}", kernel, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(backward or (lambda ctx, g: g))
    return op


def in_blocks(x: Tensor, size: int) -> Tensor:
    """Each block of `size` entries in memory divided by its largest one."""
    flat = F.pad(x.flatten(), (0, -x.numel() % size)).view(-1, size)
    return (flat / flat.abs().amax(1, keepdim=True).clamp(min=1e-30)).flatten()[: x.numel()].view(x.shape)


twice = define("twice", lambda x: 2 * x, lambda ctx, g: 2 * g)
two_backward = define("two_backward", lambda x: x, lambda ctx, g: twice(g) / 2)
normed_backward = define("normed_backward", lambda x: 2 * x, lambda ctx, g: g / g.norm())
counting_backward = define("counting_backward", lambda x: 2 * x, lambda ctx, g: g / g.shape[0])
flipped_backward = define("flipped_backward", lambda x: 2 * x, lambda ctx, g: g.flip(0))
MIXING: dict[str, Any] = {
    "blocks of 64": define("blocks_of_64", lambda x: in_blocks(x, 64)),
    "blocks of 1000": define("blocks_of_1000", lambda x: in_blocks(x, 1000)),
    "tiles of 64 rows": define(
        "tiles", lambda x: torch.cat([t - t.mean(0) if len(t) == 64 else t for t in x.split(64)])
    ),
    "large batches": define("large_batches", lambda x: x.flip(0) if len(x) > 100 else x),
    "large values": define("large_values", lambda x: x / x.norm() if x.abs().max() > 1e3 else x),
    "tiny values": define("tiny_values", lambda x: x / x.norm() if x.abs().max() < 1e-3 else x),
    "ties": define("ties", lambda x: x - x.mean() if x.unique().numel() < x.numel() // 2 else x),
    "one quantisation": define("one_quantisation", lambda x: (x / x.abs().max() * 127).round()),
}


@pytest.fixture(autouse=True)
def nothing_is_trusted() -> Iterator[None]:
    with changed(*(key for key, said in rows().items() if said.trusted), trusted=False):
        yield


class Model(nn.Module):
    """Linear layers around an operator."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.op, self.last = nn.Linear(4, 5), op, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.op(self.first(x)))


LINE = f"test_trust.py:{inspect.getsourcelines(Model.forward)[1] + 1}: return self.last(self.op(self.first(x)))"


def text(op: Any, loss_fn: Any = F.cross_entropy) -> str:
    """The refusal of a model with the operator."""
    step = psg_fx.transform(Model(op), loss_fn, backend="eager")
    with pytest.raises((NotYetSupported, SamplesMixed)) as error:
        step(*((X, Y) if loss_fn else (X,)))
    return f"{type(error.value).__name__}: {error.value}"


def test_an_unknown_operator_needs_the_users_word() -> None:
    assert text(twice) == (
        "NotYetSupported: trust_tests.twice cannot be shown to keep samples apart\n"
        f"  where  %twice;  {LINE}\n"
        "  why    it is a custom operator, which cannot be looked into\n"
        "  fix    if each row of its output, and of the gradient that its backward gives, is computed from that row "
        "alone: psg_fx.trust(torch.ops.trust_tests.twice)"
    )


@pytest.mark.parametrize(
    "given",
    [twice, torch.ops.trust_tests.twice, torch.ops.trust_tests.twice.default],
    ids=["def", "packet", "overload"],
)
def test_with_it_the_step_is_exact(given: Any) -> None:
    assert psg_fx.trust(given) is given
    model = Model(twice).double()
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    found = step(X.double(), Y)
    model_of_plain_ops = Model(lambda x: 2 * x).double()
    model_of_plain_ops.load_state_dict(model.state_dict())
    _, expected = oracle.loop_grads(model_of_plain_ops, F.cross_entropy, X.double(), Y)
    assert oracle.worst_error(found.grads, expected) < 1e-12
    assert "trust_tests.twice (%twice) has no rule; you vouch for it" in str(step.explain())


def test_trust_is_a_decorator() -> None:
    @psg_fx.trust
    @torch.library.custom_op("trust_tests::decorated", mutates_args=())
    def decorated(x: Tensor) -> Tensor:
        return x.clone()

    assert isinstance(decorated, type(twice))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.ops.aten.mul.Tensor, "trust() takes a custom operator, not aten.mul.Tensor\n"
         "  where  psg_fx.trust(op)\n"
         "  why    torch's own ops have rules, and functions and autograd.Functions are looked into\n"
         "  fix    give what torch.library.custom_op returned, or torch.ops.<library>.<op>"),
        (torch.relu, "trust() takes a custom operator, not builtin_function_or_method\n"
         "  where  psg_fx.trust(op)\n"
         "  why    only an operator is one op of a captured graph; what other code computes is looked into\n"
         "  fix    give what torch.library.custom_op returned, or torch.ops.<library>.<op>"),
    ],
)  # fmt: skip
def test_only_custom_operators_can_be_trusted(given: Any, message: str) -> None:
    with pytest.raises(BadArgument) as error:
        psg_fx.trust(given)
    assert str(error.value) == message


@pytest.mark.parametrize("name", one_in(2, MIXING))
def test_a_trusted_operator_that_mixes_is_refused(name: str) -> None:
    psg_fx.trust(MIXING[name])
    assert text(MIXING[name]).partition("\n  why    ")[2] == (
        "tried out on random values, a sample's rows change with the other samples\n"
        "  fix    write it so that every sample is computed from its own rows alone"
    )


def test_blocks_within_a_sample_are_apart() -> None:
    op = psg_fx.trust(define("blocks_of_rows", lambda x: in_blocks(x, 6)))
    gm = batch(captured(lambda x: op(x), None, (torch.randn(4, 6),)))
    assert [facts.fact(n).proof for n in gm.graph.nodes if "blocks" in n.name] == ["trusted"]


def test_layouts_are_found_by_trying() -> None:
    op = psg_fx.trust(define("cumsum_of_rows", lambda x: x.cumsum(1)))
    gm = batch(captured(lambda x: op(op(x).view(-1, 3)), None, (torch.randn(4, 6),)))
    found = [facts.fact(n).samples for n in gm.graph.nodes if "cumsum" in n.name]
    assert found == [facts.SampleAxis(0), facts.SampleAxis(0, 1, 2)]


def test_an_operator_that_draws_is_refused() -> None:
    op = psg_fx.trust(define("noisy", lambda x: x + torch.rand_like(x)))
    assert "  why    it gives other values each time it runs\n" in text(op)


# ---- backward --------------------------------------------------------------------------------------------------------


def test_a_backward_that_mixes_is_refused_with_and_without_a_loss() -> None:
    psg_fx.trust(normed_backward)
    expected = (
        "SamplesMixed: in the backward pass, aten.div mixes samples, so per-sample gradients do not exist\n"
        "  where  %{}, sample dim 0;  its result leads to the gradient of %linear;  {}\n"
        "  why    %mm carries samples, %linalg_vector_norm is reduced over them by %linalg_vector_norm "
        "(aten.linalg_vector_norm)\n"
        "  fix    a statistic over the batch makes each sample's loss depend on the others; take it within a sample"
    )
    assert text(normed_backward) == expected.format("div_2", LINE)
    assert text(normed_backward, None) == expected.format("div", LINE)


def test_a_backward_that_exchanges_samples_is_refused() -> None:
    psg_fx.trust(flipped_backward)
    found = text(flipped_backward)
    assert found.startswith("SamplesMixed: in the backward pass, aten.flip mixes samples")


def test_a_backward_that_counts_the_samples_is_refused() -> None:
    psg_fx.trust(counting_backward)
    found = text(counting_backward)
    assert found.startswith("SamplesMixed: in the backward pass, aten.div mixes samples")
    assert "depends on the batch size, which is 1 for the loss of one sample" in found


def test_an_operator_in_a_backward_needs_trust_of_its_own() -> None:
    psg_fx.trust(two_backward)
    found = text(two_backward)
    assert found.startswith("NotYetSupported: in the backward pass, trust_tests.twice cannot be shown")
    assert found.endswith("psg_fx.trust(torch.ops.trust_tests.twice)")
    psg_fx.trust(twice)
    psg_fx.transform(Model(two_backward), F.cross_entropy, backend="eager")(X, Y)


# ---- written out -----------------------------------------------------------------------------------------------------


def test_an_operator_composed_of_others_is_looked_into() -> None:
    library = torch.library.Library("trust_tests", "FRAGMENT")
    library.define("composed(Tensor x) -> Tensor")
    library.impl("composed", lambda x: (2 * x).softmax(1), "CompositeImplicitAutograd")
    library.define("mixing(Tensor x) -> Tensor")
    library.impl("mixing", lambda x: x - x.mean(0), "CompositeImplicitAutograd")
    model = Model(torch.ops.trust_tests.composed).double()
    found = psg_fx.transform(model, F.cross_entropy, backend="eager")(X.double(), Y)
    _, expected = oracle.loop_grads(model, F.cross_entropy, X.double(), Y)
    assert oracle.worst_error(found.grads, expected) < 1e-12
    assert "aten.sub mixes samples" in text(torch.ops.trust_tests.mixing)


# ---- effects ---------------------------------------------------------------------------------------------------------


RUNS: list[str] = []
LIBRARY = torch.library.Library("trust_tests", "FRAGMENT")
SCHEMAS = {"drawn": "Tensor x", "told": "Tensor x", "silent": "Tensor x", "written": "Tensor(a!) x"}
for _name, _arguments in SCHEMAS.items():
    _tags = (torch.Tag.nondeterministic_seeded,) if _name == "drawn" else ()
    LIBRARY.define(f"{_name}({_arguments}) -> {'()' if _name == 'silent' else 'Tensor'}", tags=_tags)
    LIBRARY.impl(_name, lambda x, name=_name: RUNS.append(name), "CompositeExplicitAutograd")
_register_effectful_op("trust_tests::told", _EffectType.ORDERED)


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (torch.ops.trust_tests.drawn.default, "it draws at random, and has no rule that says how"),
        (torch.ops.trust_tests.told.default, "it has effects beside its result"),
        (torch.ops.trust_tests.silent.default, "it returns no tensor, so it can only be there for its effects"),
        (torch.ops.trust_tests.written.default, "it writes into its argument"),
        (torch.ops._c10d_functional.all_reduce.default, "it is a collective, in which other processes take part"),
    ],
    ids=str,
)
def test_what_has_effects_is_never_run(op: Any, why: str) -> None:
    """Not even when it is trusted."""
    psg_fx.trust(op)
    gm = captured(lambda x: twice(x), None, (torch.randn(4, 6),))
    (node,) = [n for n in gm.graph.nodes if "twice" in n.name]
    node.target = op
    if "silent" in str(op):
        node.meta["val"] = None
    with pytest.raises(NotYetSupported) as error:
        batch(gm)
    assert error.value.why == why
    assert error.value.what == f"{op._schema.name.replace('::', '.')} cannot be shown to keep samples apart"
    assert not RUNS


def test_an_operator_that_writes_into_its_argument_is_named() -> None:
    @torch.library.custom_op("trust_tests::doubling", mutates_args=("x",))
    def doubling(x: Tensor) -> None:
        x.mul_(2)

    def program(x: Tensor) -> Tensor:
        y = x.clone()
        doubling(y)
        return y

    with pytest.raises(NotYetSupported) as error:
        batch(captured(program, None, (torch.randn(4, 6),)))
    assert error.value.what == "trust_tests.doubling cannot be shown to keep samples apart"
    assert error.value.why == "it writes into its argument"
