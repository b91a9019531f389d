"""Samples stay apart: every program whose samples mix is refused, and what only looks like mixing is not.

The proof is itself checked: in an accepted program, every value's rows of sample i equal the value of the program of
sample i alone.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx.errors import NotYetSupported, SamplesMixed
from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.passes.independence.batch import batch
from psg_fx.passes.independence.probe import take
from support.graphs import Recorder, captured

Program = Callable[[Tensor], Tensor]
TABLE = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))


def rows_agree(gm: torch.fx.GraphModule, x: Tensor) -> None:
    """Every node: rows of sample i in a batch = the node in the program of sample i."""
    whole = Recorder(gm).record(x)
    for i in range(len(x)):
        alone = Recorder(gm).record(x[i : i + 1])
        for node, value in whole.items():
            axis = facts.fact(node).samples
            if isinstance(value, Tensor) and facts.fact(node).proof != "number of the sample":
                assert not isinstance(axis, tuple)
                torch.testing.assert_close(take(value, axis, i), alone[node], rtol=1e-4, atol=1e-5, equal_nan=True)


def assign(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1] = 0
    y[:, 2:4] = x[:, 0:2] * 2
    return y


def assign_mask(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = 0
    return y


def class_token(x: Tensor) -> Tensor:
    return torch.cat([TABLE[:1][None].expand(x.shape[0], -1, -1), x[:, None]], 1)


def picked(x: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0]), (x.sum(-1) > 0).long()]


def written(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[torch.arange(x.shape[0]), (x.sum(-1) > 0).long()] = x[:, 0]
    return y


APART: dict[str, Program] = {
    "mean of dim 1": lambda x: x.mean(1),
    "flip of dim 1": lambda x: x.flip(1),
    "softmax over classes": lambda x: x.softmax(-1),
    "own place of each sample": picked,
    "write to own place": written,
    "cat then unfold": lambda x: torch.cat([x, x * 2]).view(2, -1, 6)[1],
    "cat then slice": lambda x: torch.cat([x, 2 * x])[x.shape[0] :],
    "transposes": lambda x: (x.transpose(0, -1) * 2).transpose(0, -1),
    "fold and unfold": lambda x: x.view(x.shape[0] * 2, 3).relu().view(x.shape[0], 6),
    "cumsum of dim 1": lambda x: x.cumsum(1),
    "roll of dim 1": lambda x: x.roll(1, 1),
    "roll of two dims": lambda x: x.view(-1, 2, 3).roll((1, 1), (1, 2)),
    "fft of dim 1": lambda x: torch.fft.fft(x, dim=1).real,
    "fft of two dims": lambda x: torch.fft.rfft2(x.view(-1, 2, 3)).abs(),
    "sort of dim 1": lambda x: x.sort(1)[0],
    "centred rows": lambda x: x - x.mean(1, keepdim=True),
    "repeat of dim 1": lambda x: x.repeat(1, 2),
    "one row of integers that all samples share": lambda x: x * torch.ones_like(x[:, :1], dtype=torch.long)[:1],
    "kernels of each sample as groups": lambda x: F.conv1d(
        x.view(1, -1, 3), x[:, :4].reshape(-1, 1, 2), groups=2 * x.shape[0]
    ).view(-1, 4),
    "transposed kernels of each sample as groups": lambda x: F.conv_transpose1d(
        x.view(1, -1, 3), x[:, :4].reshape(-1, 1, 2), x[:, 4:].reshape(-1), stride=2, groups=2 * x.shape[0]
    ).view(-1, 12),
    "interleaved numbers of samples": lambda x: x.sum(1).repeat_interleave(2).view(-1, 2),
    "rows of each sample in turns": lambda x: x.view(-1, 3)[0::2] * x.view(-1, 3)[1::2],
    "one row in two of four": lambda x: x[:, :4].reshape(-1, 1)[1::2].view(-1, 2),
    "interleaved samples": lambda x: x.repeat_interleave(3, 0).view(x.shape[0], 3, 6),
    "tiled samples": lambda x: x.repeat(3, 1).view(3, x.shape[0], 6).sum(0),
    "expanded constant": lambda x: x + TABLE[0].expand(x.shape[0], 6),
    "constant in any order": lambda x: (
        x.repeat(3, 1) + TABLE[0].expand(3 * x.shape[0], 6) + x.new_zeros(3 * x.shape[0], 6)
    ),
    "outer product of a sample": lambda x: x.unsqueeze(2) @ x.unsqueeze(1),
    "einsum of a sample": lambda x: torch.einsum("bi,bj->bij", x, x),
    "einsum with dots": lambda x: torch.einsum("...i,ji->...j", x, TABLE),
    "tensordot": lambda x: torch.tensordot(x, TABLE, dims=([1], [1])),
    "inner": lambda x: torch.inner(TABLE, x.view(-1, 1, 6)).movedim(1, 0),
    "inner with a number": lambda x: torch.inner(torch.inner(x, TABLE[0]), torch.tensor(3.0)),
    "addmm": lambda x: torch.addmm(torch.zeros(10), x, TABLE.t()),
    "normalised rows": lambda x: F.normalize(x, dim=1),
    "masked": lambda x: x.masked_fill(x > 0, 0),
    "assignment": assign,
    "assignment by mask": assign_mask,
    "glu": lambda x: F.glu(x),
    "topk": lambda x: x.topk(2)[0],
    "embedding": lambda x: F.embedding((x > 0).long(), TABLE),
    "table": lambda x: TABLE[(x > 0).long()],
    "one hot": lambda x: F.one_hot((x > 0).long(), 3).float(),
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "cdist to a table": lambda x: torch.cdist(x[:, None], TABLE[None]),
    "gather": lambda x: x.gather(1, (x > 0).long()),
    "scatter": lambda x: torch.zeros_like(x).scatter_add(1, (x > 0).long(), x),
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 2])),
    "pad": lambda x: F.pad(x, (1, 1)),
    "circular pad": lambda x: F.pad(x[:, None], (1, 1), mode="circular"),
    "variance": lambda x: x.var(1),
    "maximum": lambda x: x.max(1)[0],
    "quantile": lambda x: x.quantile(0.5, dim=1),
    "norms": lambda x: torch.linalg.vector_norm(x, dim=1),
    "layer norm": lambda x: F.layer_norm(x, (6,)),
    "rms norm": lambda x: F.rms_norm(x, (6,)),
    "group norm": lambda x: F.group_norm(x.view(-1, 2, 3), 2),
    "instance norm": lambda x: F.instance_norm(x.view(-1, 2, 3)),
    "batch norm in eval mode": lambda x: F.batch_norm(x, torch.zeros(6), torch.ones(6)),
    "local response norm": lambda x: F.local_response_norm(x.view(-1, 6, 1), 3),
    "unbind": lambda x: torch.stack(x.unbind(1), 1),
    "split": lambda x: torch.cat(x.split(2, 1), 1),
    "diagonal": lambda x: torch.diagonal(x.view(-1, 2, 3), dim1=1, dim2=2),
    "triangle": lambda x: torch.tril(x.view(-1, 2, 3)),
    "inverse": lambda x: torch.linalg.inv(x[:, :4].reshape(-1, 2, 2) + 3 * torch.eye(2)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(-1, 1, 3, 2)] * 3, is_causal=True),
    "interpolate": lambda x: F.interpolate(x[:, None], scale_factor=2.0),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(3, 6, 6)),
    "cross": lambda x: torch.linalg.cross(x[:, :3], x[:, 3:]),
    "prelu": lambda x: F.prelu(x, torch.ones(6)),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(1)),
    "searchsorted": lambda x: torch.searchsorted(torch.arange(4.0), x),
    "windows": lambda x: x.unfold(1, 2, 1),
    "patches": lambda x: F.unfold(x.view(-1, 1, 2, 3), 2),
    "conv of folded windows": lambda x: F.conv1d(x.unfold(1, 3, 1).reshape(-1, 1, 3), torch.ones(2, 1, 2)).view(
        -1, 4, 4
    ),
    "class token": class_token,
    "dtype of the samples": lambda x: x + torch.ones(6, dtype=torch.int64).type_as(x),
    "positions": lambda x: x + torch.arange(6).expand(x.shape[0], 6),
    "pixel shuffle": lambda x: F.pixel_shuffle(x.view(-1, 6, 1, 1)[:, :4], 2),
    "grid sample": lambda x: F.grid_sample(x.view(-1, 1, 2, 3), x[:, :4].view(-1, 1, 2, 2), align_corners=False),
    "max pool": lambda x: F.max_pool1d(x[:, None], 2),
    "adaptive pool": lambda x: F.adaptive_avg_pool1d(x[:, None], 4),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "pad in front of the tokens": lambda x: F.pad(x.view(-1, 2, 3), (0, 0, 1, 0, 0, 0)),
    "squeezed sample dim": lambda x: x.squeeze(0) * 2,
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 3, 2)) * 1j),
}


@pytest.mark.parametrize("name", APART)
def test_samples_apart_are_accepted_and_rows_agree(name: str) -> None:
    if name == "quantile" and torch.__version__ < "2.12":
        pytest.skip("torch.export of this version does not trace quantile with a symbolic batch size")
    gm = batch(captured(APART[name], None, (torch.randn(4, 6),)))
    assert not facts.graph_facts(gm).notes
    assert not [n for n in gm.graph.nodes if facts.fact(n).proof in ("written out", "trusted")], "a rule is expected"
    rows_agree(gm, torch.randn(3, 6, generator=torch.Generator().manual_seed(0)))


MIXED: dict[str, Program] = {
    "one sample in two": lambda x: x[::2],
    "one row in four of two": lambda x: x.view(-1, 3)[::4],
    "one row in two from the third on": lambda x: x.view(-1, 3)[2::2],
    "one row in two up to the third": lambda x: x.view(-1, 3)[:3:2],
    "centred by the batch": lambda x: x - x.mean(0),
    "standardised by the batch": lambda x: x / (x.std(0) + 1),
    "logsumexp of the batch": lambda x: x - x.logsumexp(0, keepdim=True),
    "median of the batch": lambda x: x - x.median(0)[0],
    "norm of the batch": lambda x: x / x.norm(),
    "columns normalised": lambda x: F.normalize(x, dim=0),
    "softmax over the batch": lambda x: x.softmax(0),
    "sort": lambda x: x.sort(0)[0],
    "topk": lambda x: x.topk(2, 0)[0],
    "cumsum": lambda x: x.cumsum(0),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "flat roll": lambda x: x.roll(1),
    "fft": lambda x: torch.fft.fft(x.view(-1, 2, 3), dim=0).real,
    "fft of both dims": lambda x: torch.fft.fft2(x).real,
    "permutation": lambda x: x[torch.randperm(x.shape[0])],
    "drawn over the batch": lambda x: x * torch._sample_dirichlet(F.softplus(x).T + 1).T,
    "draws without replacement": lambda x: x * torch.multinomial(torch.ones(99), x.shape[0])[:, None],
    "sorted by score": lambda x: x[x.sum(1).argsort()],
    "Gram matrix": lambda x: x @ x.T @ x,
    "Gram by einsum": lambda x: torch.einsum("bi,ci->bc", x, x),
    "all differences": lambda x: x.unsqueeze(0) - x.unsqueeze(1),
    "broadcast [B, 1] with [B]": lambda x: x[:, :1] - x[:, 0],
    "attention over the batch": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "quantised by the batch maximum": lambda x: (x / x.abs().max()).round(),
    "branch on the batch": lambda x: torch.where((x > 0).any(), x, x + 1),
    "fold in the wrong order": lambda x: x.reshape(2 * x.shape[0], 3).view(2, x.shape[0], 3).transpose(0, 1),
    "one sample": lambda x: x - x[0],
    "first sample": lambda x: x - x[:1],
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "gather from the batch": lambda x: x.gather(0, (x > 0).long()),
    "looked up in the batch": lambda x: x[(x.sum(1) > 0).long()],
    "number of the sample": lambda x: x * torch.arange(x.shape[0])[:, None],
    "identity of the batch": lambda x: x + torch.eye(x.shape[0])[:, :1],
    "windows over the batch": lambda x: x.unfold(0, 2, 1),
    "written into one table": lambda x: torch.zeros(10, 6).index_add(0, (x[:, 0] > 0).long(), x),
    "scattered into one table": lambda x: torch.zeros(10, 6).scatter_add(0, (x > 0).long(), x),
    "pool over the batch": lambda x: F.avg_pool1d(x.t()[None], 3, 1, 1)[0].t(),
    "appended row": lambda x: torch.cat([x, x.new_zeros(1, 6)])[1:],
    "outer product": lambda x: torch.outer(x[:, 0], x[:, 1]),
    "triangle": lambda x: torch.tril(x),
    "layer norm over the batch": lambda x: F.layer_norm(x.t(), (x.shape[0],)).t(),
    "two samples taken apart": lambda x: x[0] + x[1] + x,
    "reduced output": lambda x: x.mean(0),
    "shared rows folded in another order": lambda x: TABLE[0].expand(x.shape[0], 6).reshape(-1) + x.t().reshape(-1),
    "msort": lambda x: x.msort(),
    "kernels of other samples as groups": lambda x: F.conv1d(
        x.view(-1, 2, 3).transpose(0, 1).reshape(1, -1, 3), x[:, :4].reshape(-1, 1, 2), groups=2 * x.shape[0]
    ),
    "transposed kernels of other samples as groups": lambda x: F.conv_transpose1d(
        x.view(-1, 2, 3).transpose(0, 1).reshape(1, -1, 3), x[:, :4].reshape(-1, 1, 2), groups=2 * x.shape[0]
    ),
    "column norms": lambda x: torch.renorm(x, 2, 1, 1.0),
    "numbers of the samples as output": lambda x: torch.arange(x.shape[0]),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_samples_are_refused(name: str) -> None:
    with pytest.raises(SamplesMixed) as error:
        batch(captured(MIXED[name], None, (torch.randn(4, 6),)))
    assert all(part in str(error.value) for part in ("\n  where  %", "\n  why    ", "\n  fix    "))


ROUTED: dict[str, Program] = {
    "sorted by an integer": lambda x: x[(x.sum(1) > 0).long().argsort()],
    "rows that are found": lambda x: x[torch.where(x.sum(1) > 0)[0]],
    "rows of a mask": lambda x: x[x.sum(1) > 0],
}


@pytest.mark.parametrize("name", ROUTED)
def test_rows_without_a_fixed_place_are_not_yet_supported(name: str) -> None:
    with pytest.raises(NotYetSupported, match="cannot be shown to keep samples apart") as error:
        batch(captured(ROUTED[name], None, (torch.randn(4, 6),)))
    assert any(part in str(error.value) for part in ("no sample's rows have a place", "no fixed place"))


MIXED_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divided by a batch statistic": lambda o, y: ((o - y) ** 2 / (o - y).detach().std()).mean(),
    "normalised by the batch": lambda o, y: F.mse_loss((o - o.mean(0)) / o.std(0), y),
    "contrastive": lambda o, y: F.cross_entropy(F.normalize(o) @ F.normalize(y).t(), torch.arange(o.shape[0])),
    "covariance": lambda o, y: (o.t() @ o).square().mean(),
    "centred": lambda o, y: (o - o.mean(0, keepdim=True)).square().mean(),
    "weighted by rank": lambda o, y: (o.sum(1).sort()[0] * torch.arange(o.shape[0])).mean(),
}


@pytest.mark.parametrize("name", MIXED_LOSSES)
def test_losses_that_mix_are_refused(name: str) -> None:
    with pytest.raises(SamplesMixed):
        batch(captured(nn.Linear(6, 3), MIXED_LOSSES[name], (torch.randn(4, 6),), (torch.randn(4, 3),)))


class Layers(nn.Module):
    """Convolution, norm, attention with the sequence first, an unrolled recurrence by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.cell = nn.Linear(8, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).flatten(2).permute(2, 0, 1)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        state = h.new_zeros(1, x.shape[0], 4)
        for step in h[:3].split(1):
            state = torch.tanh(self.cell(torch.cat([step, state], -1)))
        return self.head(state.squeeze())


def test_layers_fold_the_samples_and_rows_agree() -> None:
    gm = batch(captured(Layers(), None, (torch.randn(4, 1, 5, 5),)))
    found = {facts.fact(n).samples for n in gm.graph.nodes}
    assert {SampleAxis(1, 1, 2), SampleAxis(0, 1, 2), SampleAxis(0, 9, 1)} <= found
    whole, single = torch.randn(3, 1, 5, 5), []
    values = Recorder(gm).record(whole)
    for i in range(3):
        single = list(Recorder(gm).record(whole[i : i + 1]).items())
        for node, value in single:
            if isinstance(value, Tensor) and node.name != "squeeze":
                axis = facts.fact(node).samples
                assert not isinstance(axis, tuple)
                shaped = take(values[node], axis, i)
                torch.testing.assert_close(shaped.reshape(value.shape), value, rtol=1e-4, atol=1e-5)


def test_reductions_inside_the_model() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(0)

    class OwnLoss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x**2).sum(1).mean()

    with pytest.raises(SamplesMixed, match="a reduction over samples in the model itself"):
        batch(captured(Mean(), lambda o: o.sum(), (torch.randn(4, 6),)))
    batch(captured(OwnLoss(), lambda o: o, (torch.randn(4, 6),)))


def test_buffers_may_count_and_average_but_not_be_read() -> None:
    class Counter(nn.Module):
        def __init__(self, average: bool, read: bool = False) -> None:
            super().__init__()
            self.average, self.read = average, read
            self.linear = nn.Linear(6, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.mean() if self.average else 1
            return self.linear(x) + self.seen if self.read else self.linear(x)

    for average, notes in (False, ()), (True, ("the buffer seen keeps a statistic of the whole batch",)):
        gm = batch(captured(Counter(average), lambda o: o.sum(), (torch.randn(4, 6),)))
        assert [s.kind for s in facts.graph_facts(gm).outputs] == ["buffer", "loss"]
        assert facts.graph_facts(gm).notes == notes
    with pytest.raises(SamplesMixed, match=r"reduced over them by %mean"):
        batch(captured(Counter(True, read=True), lambda o: o.sum(), (torch.randn(4, 6),)))


def test_a_shared_input_carries_no_samples() -> None:
    gm = batch(captured(lambda x, t: x + t, None, (torch.randn(4, 6), torch.randn(6)), shared=(1,)))
    assert [facts.fact(n).samples for n in facts.placeholders(gm)] == [SampleAxis(0), None]


def test_samples_in_another_dim() -> None:
    gm = batch(captured(lambda x: x.flatten(1) * 2, None, (torch.randn(6, 4, 5),), batch_dim=1))
    last = facts.outputs(gm)[0]
    assert last is not None
    assert facts.fact(last).samples == SampleAxis(1, 1, 5)
