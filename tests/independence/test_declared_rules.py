"""Every declared independence rule is tried out: where it accepts, the samples lie where it says.

The inputs are those of PyTorch's own operator tests (`support/op_samples.py`, `support/op_extra.py`); a rule that
no trial reaches fails, unless it is listed here with the reason.  The ordinary run makes the first trials of each rule,
`make test-all` every one.  The figures are printed by
`PYTHONPATH=tests python tests/independence/test_declared_rules.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
import torch

import psg_fx.passes.independence  # noqa: F401  (fills the table)
from psg_fx.errors import SamplesMixed
from psg_fx.graph import facts
from psg_fx.op_table import POINTWISE, changed, rows
from psg_fx.passes.independence.batch import batch
from psg_fx.passes.independence.table import find
from support.graphs import captured
from support.op_extra import written
from support.op_samples import Call, recorded
from support.placements import PLAIN, placements, widened
from support.trials import Outcome, trial

pytestmark = pytest.mark.xdist_group("operators")  # they read one recording of all operators

EACH = 5
ENOUGH, MOST = 2, 30
"""How many accepted trials the ordinary run makes of a rule, and how many in all where few are accepted."""
RULES = {key: said.samples for key, said in rows().items() if said.samples is not None}
PARTS = 8

UNTRIED = {
    "a row of any sample, for places of which nothing is read": "psg_fx::some_row",
    "only on other devices": """
        _fused_rms_norm_backward
        _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable cudnn_convolution
        cudnn_convolution_transpose miopen_convolution cudnn_batch_norm miopen_batch_norm conv_depthwise3d
        _conv_depthwise2d _masked_scale _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable_backward cudnn_batch_norm_backward miopen_batch_norm_backward
    """,
    "refuses all samples": """
        kron chain_matmul linalg_multi_dot addbmm block_diag cartesian_prod _weight_norm _weight_norm_interface
        norm_except_dim randperm masked_scatter put repeat_interleave.Tensor repeat_interleave.self_Tensor
        _unsafe_masked_index _unsafe_masked_index_put_accumulate segment_reduce meshgrid pad_sequence _chunk_cat
        histc bincount trace cov corrcoef unique_consecutive _unique2 unique_dim nonzero nonzero_numpy nonzero_static
        masked_select argwhere where.default pdist _pdist_forward
        nll_loss nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward
        cross_entropy_loss cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss
        multilabel_margin_loss_forward ctc_loss _ctc_loss as_strided as_strided_copy as_strided_scatter set resize
        embedding_renorm embedding_bag _embedding_bag _embedding_bag_forward_only lstm gru rnn_tanh rnn_relu
        _batch_norm_with_update _batch_norm_with_update_functional _native_batch_norm_legit
        linalg_householder_product ormqr
        embedding_dense_backward embedding_backward _embedding_bag_backward _embedding_bag_dense_backward
        _embedding_bag_per_sample_weights_backward _pdist_backward _segment_reduce_backward masked_scatter_backward
        nll_loss_backward nll_loss2d_backward multi_margin_loss_backward multilabel_margin_loss_backward
        _ctc_loss_backward
    """,
    "the samples lie in its channels, which no trial does": "native_batch_norm_backward batch_norm_backward",
    "writes into an argument, so it is never asked": "rrelu_with_noise",
    "its size is never a multiple of B": "range",
    "stands for operators of other libraries": "<custom>",
    "always a reduction over the samples, which claims no place": "dot vdot dist",
    "its samples lie in four arguments; compared with a loop in test_ctc.py": "psg_fx::ctc psg_fx::ctc_backward",
    "other processes take part; compared with one process in test_tensor_parallel.py": """
        psg_fx::enter psg_fx::sum_across psg_fx::gather psg_fx::own_slice psg_fx::sum_slice psg_fx::index
    """,
    "its kernel reads outside of memory where the arguments do not fit": """
        linalg_ldl_solve _scaled_dot_product_flash_attention_for_cpu_backward
    """,
}


def listed() -> dict[str, str]:
    return {name: reason for reason, names in UNTRIED.items() for name in names.split()}


def key_of(op: torch._ops.OpOverload) -> str | None:
    """The name under which the rule of an operator stands."""
    name = op._schema.name.removeprefix("aten::")
    full = f"{name}.{op._schema.overload_name or 'default'}"
    if find(op) is None:
        return None
    return full if full in RULES else name if name in RULES else POINTWISE


@functools.cache
def calls() -> Mapping[str, list[Call]]:
    """The calls that reach each rule."""
    found: dict[str, list[Call]] = {name: [] for name in RULES}
    for call in [c for cs in written().values() for c in cs] + [c for cs in recorded().values() for c in cs]:
        key = key_of(call.op)
        if key is not None:
            found[key].append(call)
    return found


def outcomes(given: list[Call], each: int = EACH) -> Iterator[Outcome]:
    """The trials of some calls, and of the same calls with one more dim."""
    return itertools.chain.from_iterable(map(functools.partial(trials, each=each), given))


def trials(plain: Call, each: int = EACH) -> Iterator[Outcome]:
    """The trials of one call, and of the same call with one more dim."""
    for call in (plain, widened(plain)):
        rule = find(plain.op)
        if call is None or rule is None:
            continue
        for placement in placements(call, rule, each):
            if (outcome := trial(call, placement, rule)) is not None:
                yield outcome


def first(given: list[Call], untried: bool) -> Iterator[Outcome]:
    """The first trials of each call in turn, until enough of them were accepted."""
    accepted = made = 0
    for outcome in in_turn([trials(call) for call in given]):
        yield outcome
        accepted, made = accepted + outcome.said.startswith("accepted"), made + 1
        if accepted >= ENOUGH or (made >= MOST and (accepted or untried)):
            return


def in_turn(of_calls: list[Iterator[Outcome]]) -> Iterator[Outcome]:
    while of_calls:
        found = [next(each, None) for each in of_calls]
        yield from (outcome for outcome in found if outcome is not None)
        of_calls = [each for each, outcome in zip(of_calls, found, strict=True) if outcome is not None]


def check(found: list[Outcome]) -> int:
    """No claim is false.  The number of claims."""
    false = [str(o) for o in found if o.holds is False and o.said.startswith("accepted")]
    assert not false, "\n".join(false[:5])
    return sum(o.said.startswith("accepted") for o in found)


def is_here(name: str) -> bool:
    """Whether this torch has the operator of a rule: `qr` and `cholesky` went with 2.14."""
    base = name.partition(".")[0]
    return not base.isidentifier() or hasattr(torch.ops.aten, base)


NAMES = sorted(n for n in RULES if n != POINTWISE and is_here(n))


@pytest.mark.parametrize("name", NAMES)
def test_where_a_rule_accepts_the_samples_lie_there(name: str) -> None:
    check_rule(name, list(first(calls()[name], name in listed())))


@pytest.mark.rest
@pytest.mark.parametrize("name", NAMES)
def test_every_trial(name: str) -> None:
    check_rule(name, list(outcomes(calls()[name])))


def check_rule(name: str, found: list[Outcome]) -> None:
    """Some trials were accepted, and of what is listed none."""
    accepted = check(found)
    if name in listed():
        assert not accepted, f"{name} is listed as untried ({listed()[name]}), but {accepted} trials were accepted"
    else:
        assert accepted, f"no trial of the rule of {name} was accepted: add a call to op_extra.py, or list it with why"


@pytest.mark.parametrize("part", range(PARTS))
def test_pointwise_operators_keep_every_element_at_its_place(part: int) -> None:
    ops = sorted({c.op for c in calls()[POINTWISE]}, key=str)
    assert len(ops) > 100
    never = []
    for op in ops[part::PARTS]:
        found = list(outcomes([c for c in calls()[POINTWISE] if c.op is op][:3], 3))
        if not check(found) and any(not o.said.startswith("reduced") for o in found):
            never.append(str(op))
    assert not never, f"no trial was accepted of {never}"


def test_a_false_rule_is_found() -> None:
    """The trial itself: each of these rules is given to an operator that it is not true of."""
    false = {"cumsum": "abs", "sort": "abs", "flip": "abs", "softmax": "abs"}
    for name, donor in false.items():
        rule = RULES.get(donor, RULES[POINTWISE])
        with changed(name, samples=rule), pytest.raises(AssertionError, match="accepted"):
            check(list(outcomes(calls()[name], 12)))


def test_numbers_of_the_samples_stay_known_when_they_are_indexed() -> None:
    def scaled_by_number(x: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(x.shape[0])[:, None].expand(x.shape[0], 6)
        return x[:, :2] * numbers[:, torch.tensor([0, 2])]

    with pytest.raises(SamplesMixed, match="numbers of the samples"):
        batch(captured(scaled_by_number, None, (torch.randn(4, 6),)))


def test_a_squeeze_of_the_sample_dim_takes_no_other_dim() -> None:
    gm, x = batch(captured(lambda x: x[:, None].squeeze(0) * 2, None, (torch.randn(4, 6),))), torch.randn(3, 6)
    (out,) = gm.graph.output_node().args[0]
    assert facts.fact(out).samples == facts.SampleAxis(0)
    torch.testing.assert_close(gm(x)[0], x[:, None] * 2)


def test_untried_rules_are_rules() -> None:
    assert set(listed()) <= set(RULES)


def figures() -> None:
    """How much was tried, and which refusals were stricter than the values ask for."""
    said: Counter[str] = Counter()
    strict: Counter[str] = Counter()
    reached = 0
    for name, given in calls().items():
        found = list(outcomes(given))
        reached += any(o.said.startswith("accepted") for o in found)
        said.update(o.said.split(" ")[0] for o in found)
        refused = [o for o in found if o.holds and o.said.startswith(("mixed", "not yet"))]
        strict.update(f"{name}: {o.said}" for o in refused if set(o.placement.kinds.values()) == {PLAIN})
    print(f"{reached} of {len(RULES)} rules accepted something; {said.total()} trials: {dict(said)}")
    print(
        *(f"{count:4} refused though apart on these values: {text}" for text, count in strict.most_common()), sep="\n"
    )


if __name__ == "__main__":
    figures()
