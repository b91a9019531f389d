"""What a graph means never depends on strides: views work however a value lies in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree

import psg_fx
from psg_fx import Grads, NotYetSupported
from psg_fx.graph.strides import free_of_strides, laid_out_as_read, reads_strides
from support import oracle
from support.cases import wavy
from support.selection import one_in

aten = torch.ops.aten
View = Callable[[Tensor], Tensor]

LAYOUTS: dict[str, View] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "inner-transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "sliced": lambda x: torch.stack([x, x + 1, x + 2], -1)[..., 1] - 1,
    "gaps": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "offset": lambda x: torch.cat([x, x], 0)[x.shape[0] :],
    "expanded": lambda x: x[:1].expand_as(x),
    "expanded-inside": lambda x: x[..., :1].expand_as(x),
    "one-number": lambda x: x[:1, :1, :1, :1].expand_as(x),
}

OPS: dict[str, tuple[Any, tuple[Any, ...], torch.dtype]] = {
    "view": (aten.view.default, ([6, 20],), torch.float64),
    "view-fold": (aten.view.default, ([2, -1],), torch.float64),
    "unsafe-view": (aten._unsafe_view.default, ([30, 2, 2],), torch.float64),
    "reshape-alias": (aten._reshape_alias.default, ([6, 20], [20, 1]), torch.float64),
    "view-as-complex": (aten.view_as_complex.default, (), torch.float32),
    "view-dtype-down": (aten.view.dtype, (torch.int16,), torch.float64),
    "view-dtype-up": (aten.view.dtype, (torch.int64,), torch.int32),
    "view-dtype-same": (aten.view.dtype, (torch.int64,), torch.float64),
}


def one_op(op: str, x: Tensor) -> GraphModule:
    """A graph of the op alone, as a tracer records it for a contiguous x."""
    target, args, _ = OPS[op]
    graph = Graph()
    source = graph.placeholder("x")
    source.meta["val"] = x
    graph.output(graph.call_function(target, (source, *args)))
    return GraphModule({}, graph)


def reads(gm: GraphModule) -> bool:
    return any(reads_strides(node) for node in gm.graph.nodes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", [op for op in OPS if op != "view-as-complex"])
def test_every_view_under_every_layout(op: str, layout: str) -> None:
    target, args, dtype = OPS[op]
    x = torch.randint(-1000, 1000, (2, 3, 5, 4)).to(dtype)
    laid = LAYOUTS[layout](x)
    gm = one_op(op, x)
    assert reads(gm) or op == "view-dtype-same"
    assert not reads(free_of_strides(gm))
    assert torch.equal(gm(laid), target(laid.contiguous(), *args))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_complex_views_under_every_layout(layout: str) -> None:
    x = torch.randn(2, 3, 5, 2)
    gm = one_op("view-as-complex", x)
    assert reads(gm)
    assert not reads(free_of_strides(gm))
    laid = LAYOUTS[layout](x)
    assert torch.equal(gm(laid), torch.complex(laid[..., 0], laid[..., 1]))


def _signs(h: Tensor) -> Tensor:
    """1 where negative, read from the last byte of each number."""
    return (h.detach().contiguous().view(torch.int8).unflatten(-1, (-1, h.element_size()))[..., -1] < 0).to(h)


VIEWS: dict[str, View] = {
    "flatten": lambda h: h.flatten(1),
    "reshape": lambda h: h.reshape(h.shape[0], -1),
    "fold": lambda h: h.reshape(-1, 4).sin().reshape(h.shape[0], 3, 4),
    "ravel": lambda h: h.ravel().cos().view(h.shape[0], -1),
    "contiguous": lambda h: h.contiguous().view(h.shape[0], 4, 3),
    "unflatten": lambda h: h.unflatten(2, (2, 2)).flatten(1, 2),
    "reshape-as": lambda h: h.reshape_as(h.transpose(1, 2)),
    "view-as": lambda h: h.clone(memory_format=torch.contiguous_format).view_as(h.transpose(1, 2)),
    "transpose": lambda h: h.transpose(1, 2).reshape(h.shape[0], -1, 2),
    "movedim": lambda h: h.movedim(2, 0).flatten(2).permute(1, 0, 2),
    "windows": lambda h: h.unfold(1, 2, 1).flatten(1),
    "parts": lambda h: torch.cat([part.flatten(1) for part in h.split(2, 2)], 1),
    "complex": lambda h: torch.view_as_complex(h.reshape(h.shape[0], 3, 2, 2).contiguous()).abs(),
    "real": lambda h: torch.view_as_real(torch.complex(h, h.sin())).flatten(1),
    "bits": lambda h: h * (1 + _signs(h)),
    "diagonal": lambda h: h.diagonal(0, 1, 2).unsqueeze(1).flatten(1),
    "unfolded": lambda h: nn.functional.unfold(h[:, None], 2).flatten(1),
}
"""Each is possible in plain PyTorch however `h[b, 3, 4]` lies in memory."""

MADE: dict[str, View] = {
    "fft": lambda h: torch.fft.rfft(h, dim=1).abs(),
    "transposed": lambda h: h.transpose(1, 2).sin().transpose(1, 2)[:, :3],
    "expanded": lambda h: h.sum(1, keepdim=True).expand(-1, 3, -1),
    "sliced": lambda h: h[:, ::2],
    "convolved": lambda h: nn.functional.avg_pool2d(
        h[:, :, :, None].to(memory_format=torch.channels_last).expand(-1, -1, -1, 3), 1
    )[:, :3, :, 1],
}
"""`[b, 5, 4]` -> `[b, 3, 4]`, in memory as torch's kernels leave it."""


def every_view(h: Tensor) -> Tensor:
    return torch.cat([view(h).reshape(h.shape[0], -1) for view in VIEWS.values()], 1)


class Viewed(nn.Module):
    """A linear layer, and what is made of its output."""

    def __init__(self, after: View) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.linear(x))


def program(made: str, place: str) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    """The views in the model or in the loss; a loss of all their elements; a batch."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4, dtype=torch.float64)

    def after(h: Tensor) -> Tensor:
        return every_view(MADE[made](h))

    if place == "loss":
        return Viewed(lambda h: h).double(), lambda out: wavy(after(out), 0, "mean"), x
    return Viewed(after).double(), lambda out: wavy(out, 0, "mean"), x


@pytest.mark.parametrize(("made", "place"), one_in(5, [(made, place) for made in MADE for place in ("model", "loss")]))
def test_views_in_a_step(made: str, place: str) -> None:
    model, loss_fn, x = program(made, place)
    losses, want = oracle.loop_grads(model, loss_fn, x)
    out = psg_fx.transform(model, loss_fn, quantities=[Grads()], backend="eager")(x)
    assert oracle.relative_error(out.losses, losses) < 1e-12
    assert oracle.worst_error(out.grads, want) < 1e-10


@pytest.mark.parametrize("made", one_in(2, ["convolved", "fft"]))
def test_views_without_a_loss(made: str) -> None:
    model, _, x = program(made, "model")
    _, want = oracle.loop_grads(model, lambda out: wavy(out, 0, "sum"), x)
    wavy(psg_fx.transform(model, backend="eager")(x), 0, "sum").backward()
    found = {name: p.grad_sample for name, p in model.named_parameters()}
    assert oracle.worst_error(found, want) < 1e-10


INPUTS: dict[str, View] = {
    "samples-inside": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
    "one-sample": lambda x: x[:1].expand_as(x),
    "gaps": lambda x: torch.cat([x, x], -1)[..., :4],
}


@pytest.mark.parametrize("layout", INPUTS)
def test_views_of_inputs(layout: str) -> None:
    model, loss_fn = Viewed(lambda h: h), lambda out: wavy(out, 0, "mean")
    views = nn.Sequential(nn.Flatten(0, 1), nn.Unflatten(0, (-1, 5)), model).double()
    x = INPUTS[layout](torch.randn(3, 5, 4, dtype=torch.float64))
    _, want = oracle.loop_grads(views, loss_fn, x)
    assert oracle.worst_error(psg_fx.transform(views, loss_fn, backend="eager")(x).grads, want) < 1e-10


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.skipif(torch.__version__ < "2.12", reason="this version traces FFTs with other strides than they have")
def test_views_compiled() -> None:
    model, loss_fn, x = program("fft", "model")
    _, want = oracle.loop_grads(model, loss_fn, x)
    step = psg_fx.transform(model, loss_fn, quantities=[Grads()], backend="aot_eager")
    assert oracle.worst_error(step(x).grads, want) < 1e-10


def test_the_way_of_a_parameter_to_its_use() -> None:
    """Views of what is made of parameters alone."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.fft.rfft(self.weight, dim=0).abs().flatten(0)[:, None]

    torch.manual_seed(0)
    model, x = Spectral().double(), torch.randn(3, 12, dtype=torch.float64)
    _, want = oracle.loop_grads(model, lambda out: out.square().sum(), x)
    step = psg_fx.transform(model, lambda out: out.square().sum(), backend="eager")
    assert oracle.worst_error(step(x).grads, want) < 1e-10


@pytest.mark.parametrize("of", ["samples", "parameters"])
def test_strides_in_the_code_are_refused(of: str) -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            if of == "parameters":
                return x @ self.weight.as_strided((4, 2), (4, 2))
            return (x @ self.weight).as_strided((x.shape[0], 2), (4, 2))

    step = psg_fx.transform(Strided(), lambda out: out.square().sum(), backend="eager")
    with pytest.raises(NotYetSupported, match="it reads memory by strides") as caught:
        step(torch.randn(3, 4))
    assert "as_strided" in str(caught.value)
    assert "view, permute, slice or unfold" in str(caught.value)


def normalised(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Mean and 1/σ of the rows of one group or of all that is normalised, and what is x's there."""
    return [x.mean(-1), 1 / (x.var(-1, correction=0) + 1e-5).sqrt(), weight]


X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
ROWS_OF_X = [v.reshape(3, 1) for v in normalised(X.flatten(1), X[0, :, 0])[:2]]
POOLED = torch.randn(2, 3, 4, 6, 6, generator=torch.Generator().manual_seed(1))
HEADS = torch.randn(3, 2, 2, 4, 8, generator=torch.Generator().manual_seed(2))
UNLOOKED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "group-norm": (aten.native_group_norm.default, (X, X[0, :, 0], X[1, :, 1], 3, 4, 5, 2, 1e-5)),
    "group-norm-backward": (
        aten.native_group_norm_backward.default, (X.sin(), X, *ROWS_OF_X, X[0, :, 0], 3, 4, 5, 1, [True] * 3)
    ),
    "layer-norm-backward": (
        aten.native_layer_norm_backward.default,
        (X.sin(), X, [5], *[v.unsqueeze(-1) for v in normalised(X, X)[:2]], X[0, 0], X[1, 1], [True] * 3),
    ),
    "adaptive-max-pool-backward": (
        aten.adaptive_max_pool3d_backward.default,
        (torch.ones(2, 3, 2, 2, 2), POOLED, aten.adaptive_max_pool3d.default(POOLED, [2, 2, 2])[1]),
    ),
    "attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, tuple(HEADS)),
    "attention-backward": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        (HEADS[0].sin(), *HEADS, *aten._scaled_dot_product_flash_attention_for_cpu.default(*HEADS), 0.0, False),
    ),
    "pairs": (aten._pdist_forward.default, (X[0],)),
    "bags": (aten._embedding_bag.default, (X[0], torch.tensor([0, 3, 1, 2, 2]), torch.tensor([0, 2]))),
}  # fmt: skip
"""Ops whose kernels do not look at strides, or refuse some, and arguments."""


@pytest.mark.parametrize("again", [False, True], ids=["run", "traced"])
@pytest.mark.parametrize("name", UNLOOKED)
def test_kernels_that_do_not_look(name: str, again: bool) -> None:
    """Each argument has gaps in memory, or another order of its dims, where the graph was traced for none."""
    op, arguments = UNLOOKED[name]
    graph, tensors = Graph(), [a for a in arguments if isinstance(a, Tensor)]
    given = iter(graph.placeholder(f"x{i}") for i in range(len(tensors)))
    nodes = [next(given) if isinstance(a, Tensor) else a for a in arguments]
    for node, value in zip(graph.nodes, tensors, strict=True):
        node.meta["val"] = value
    graph.output(graph.call_function(op, tuple(nodes)))
    gm = laid_out_as_read(GraphModule({}, graph), again)
    want = op(*[a.contiguous() if isinstance(a, Tensor) else a for a in arguments])
    for place, tensor in enumerate(tensors):
        for laid in (gaps(tensor), tensor.transpose(0, -1).contiguous().transpose(0, -1)):
            found = gm(*tensors[:place], laid, *tensors[place + 1 :])
            for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(want), strict=True):
                torch.testing.assert_close(one, other, equal_nan=True)


def gaps(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1], -1)[..., 0]


class Normalised(nn.Module):
    """A table, a group norm and, in the loss, classes along a dim that is not the last."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(2, 4), nn.GroupNorm(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.table((x.detach() * 3).long().remainder(2)) * x.unsqueeze(-1)).transpose(2, 1)  # type: ignore[no-any-return]


def of_classes(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.nll_loss(out.log_softmax(1).transpose(1, 2).flatten(0, 1), y.flatten(), reduction="sum")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"backend": "eager"}, {"backend": "aot_eager"}, {"warm": "eager"}], ids=str)
def test_what_fake_kernels_lay_out_otherwise(options: dict[str, Any]) -> None:
    """The gradient of a log-softmax is contiguous, and that of a fake one lies as its cotangent does."""
    torch.manual_seed(0)
    model, x, y = Normalised().double(), torch.randn(3, 2, dtype=torch.float64), torch.randint(4, (3, 2))
    step = psg_fx.transform(model, of_classes, quantities=Grads(), **options)
    _, want = oracle.loop_grads(model, of_classes, x, y)
    assert oracle.worst_error(step(x, y).grads, want) < 1e-12
    step.wait()
