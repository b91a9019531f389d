"""Programs that a look at single ops would refuse although their samples do not mix, each against the loop."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import BadArgument, CaptureFailed, ClippedSum, Grads, Gram, NotYetSupported, PsgError, SamplesMixed
from support import oracle

B, T, C = 3, 5, 3
Make = Callable[..., Tensor]


class Program(nn.Module):
    """A function of data and parameters `[shape]`."""

    def __init__(self, function: Callable[..., Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.5 * torch.randn(shape)))

    def forward(self, *data: Tensor) -> Any:
        return self.function(*data, **dict(self._parameters))


@dataclass
class Row:
    """A model, a loss, and a maker of `(inputs, targets)` for a batch size.

    at: the batch sizes of the calls.
    """

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    draw: Callable[[int], tuple[Any, Any]]
    at: tuple[int, ...] = (B, 1)


def head() -> nn.Module:
    return nn.Linear(4, C)


def program(function: Callable[..., Any], **shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: Program(function, **shapes)


def square(o: Tensor, *_: Tensor) -> Tensor:
    return o.square().mean()


def flat(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4).double(), torch.randn(size, C).double()


def classes(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4).double(), torch.randint(C, (size,))


def tokens(size: int) -> tuple[Tensor, None]:
    return torch.randn(size, T, 4).double(), None


def ids(*shape: int) -> Callable[[int], tuple[Tensor, None]]:
    return lambda size: (torch.randint(7, (size, *shape)), None)


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 2, 5, 5).double(), torch.randn(size, 2, 5, 5).double()


def total(o: Tensor, y: Tensor) -> Tensor:
    return (o - y).square().sum()


def conv() -> nn.Module:
    return nn.Conv2d(2, 2, 3)


TAKEN = {
    "take_along_dim": Row(head, lambda o, y: -o.log_softmax(-1).take_along_dim(y[:, None], 1).mean(), classes),
    "take_along_dim, broadcast": Row(
        head, lambda o, y: torch.take_along_dim(o, torch.tensor([[1, 2]]), -1).square().mean(), classes
    ),
    "take_along_dim in the model": Row(
        program(lambda x, w: torch.take_along_dim(x @ w, (x @ w).argsort(-1), -1)[..., 0], w=(4, 3)), square, tokens
    ),
    "elements of a parameter": Row(program(lambda i, p: p.gather(0, i), p=(7,)), square, ids()),
    "columns of a parameter": Row(program(lambda i, p: p.gather(0, i), p=(7, 4)), square, ids(4)),
    "an expanded parameter": Row(program(lambda i, p: p.expand(len(i), -1).gather(1, i), p=(7,)), square, ids(4)),
    "take of a parameter": Row(program(lambda i, p: torch.take(p, -i) + p.sum(), p=(4, 2)), square, ids(4)),
    "diff with prepend": Row(
        program(lambda x, w: torch.diff(x @ w, dim=1, prepend=x.new_zeros(x.shape[0], 1, 3)), w=(4, 3)), square, tokens
    ),
    "diff with append, twice": Row(
        program(lambda x, w: (x @ w).diff(n=2, dim=1, append=(x @ w)[:, :1]), w=(4, 3)), square, tokens
    ),
    "diff with a parameter": Row(
        program(lambda x, w, p: torch.diff(x @ w, dim=1, prepend=p.expand(x.shape[0], 1, 3)), w=(4, 3), p=(3,)),
        square, tokens,
    ),
}  # fmt: skip

COUNTED = {
    "tensor of the length": Row(head, lambda o, y: total(o, y) / torch.tensor(len(o)), flat),
    "as_tensor": Row(head, lambda o, y: total(o, y) / torch.as_tensor(o.shape[0], dtype=torch.float64), flat),
    "full": Row(head, lambda o, y: total(o, y) / torch.full((), len(o)), flat),
    "new_tensor of several": Row(
        head, lambda o, y: (total(o, y) / o.new_tensor([[len(o), 2.0], [0.1 * len(o), 1 / len(o)]])).sum(), flat
    ),
    "a float multiple": Row(head, lambda o, y: total(o, y) / (0.3 * len(o)), flat),
    "in the model": Row(program(lambda x, w: x @ w / torch.tensor(len(x)), w=(4, 3)), square, tokens),
    "interpolate": Row(conv, lambda o, y: F.interpolate(o, scale_factor=2.0).square().sum() / len(o), images),
    "interpolate, bicubic": Row(
        conv, lambda o, y: (F.interpolate(o, size=y.shape[-2:], mode="bicubic") - y).square().sum() / len(o), images
    ),
    "take_along_dim and the length": Row(
        head, lambda o, y: o.take_along_dim(y[:, None], 1).square().sum() / len(o), classes
    ),
}  # fmt: skip

ONE_NUMBER = {
    "[1]": Row(head, lambda o, y: (o - y).square().mean(-1).mean(0, keepdim=True), flat),
    "[1, 1]": Row(head, lambda o, y: (o - y).square().mean((0, 1), keepdim=True), flat),
    "[B, 1]": Row(head, lambda o, y: (o - y).square().mean(-1, keepdim=True), flat),
    "[1, B, 1]": Row(head, lambda o, y: (o - y).square().mean(-1, keepdim=True)[None], flat),
    "reshaped": Row(head, lambda o, y: F.mse_loss(o, y).reshape(1), flat),
}


class Logging(nn.Module):
    """A layer, and a buffer that `write(self, h)` writes while its output h is passed on."""

    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, C), write
        self.extra = nn.Parameter(torch.randn(C))
        self.register_buffer("seen", torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        with torch.no_grad():
            self.write(self, h)
        return h.sin()


class Reading(Logging):
    """The buffer enters the output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.seen


def running(m: Any, h: Tensor) -> None:
    m.seen.mul_(0.9).add_(0.1 * (h.mean(0) + m.extra * h.shape[0]))


def covered(m: Any, h: Tensor) -> None:
    """Ops that no rule allows over samples."""
    m.seen.copy_((h - h.mean(0)).abs().amax(0) + h.sort(0).values[0] + h.t().matmul(h).diagonal().cumsum(0))


def instance_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True, track_running_stats=True))


LOGGED = {
    "a mean": Row(lambda: Logging(lambda m, h: m.seen.copy_(h.mean(0))), square, flat),
    "a running mean": Row(lambda: Logging(running), square, flat),
    "anything": Row(lambda: Logging(covered), square, flat),
    "the first sample": Row(lambda: Logging(lambda m, h: m.seen.copy_(h[0])), square, flat),
    "instance norm": Row(instance_norm, square, images),
    "momentum": Row(lambda: nn.InstanceNorm2d(2, True, 0.3, affine=True, track_running_stats=True), square, images),
}


class Checked(nn.Module):
    """A layer whose labels are looked at by `check(y)`."""

    def __init__(self, check: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.check = nn.Linear(4, C), check

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if y.max() >= C or not (y >= -100).all():
            raise ValueError(f"label out of range: {y}")
        self.check(y)
        return F.cross_entropy(self.layer(x), y)


def in_helper(y: Tensor) -> None:
    with torch.no_grad():
        if not bool_of(y):
            message = "no label is small"
            raise ValueError(message)


def bool_of(y: Tensor) -> Tensor:
    return (y < C).any()


def after_a_flag(y: Tensor, strict: bool = True) -> None:
    if strict and y.min() < 0:
        raise ValueError


def asserted(y: Tensor) -> None:
    assert (y < C).all(), f"labels must be below {C}"
    torch._assert((y >= 0).all(), "labels must be positive")


def known(y: Tensor) -> None:
    """A condition that is known while the program is captured."""
    if torch.tensor(3.0) > 4:
        raise ValueError


def labelled(size: int) -> tuple[Any, None]:
    return (torch.randn(size, 4).double(), torch.randint(C, (size,))), None


def itself(o: Tensor) -> Tensor:
    return o


CHECKS = {f.__name__: f for f in (in_helper, after_a_flag, asserted, known)}
CHECKED = {name: Row(lambda f=f: Checked(f), itself, labelled) for name, f in CHECKS.items()}


def padded(size: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Labels of which some are -100, all of them in the second sample; and a mask."""
    labels = torch.randint(C, (size, T))
    labels[torch.rand(size, T) < 0.4] = -100
    labels[0, 1] = 2
    labels[1:2] = -100
    return torch.randn(size, T, 4).double(), (labels, (labels >= 0))


def picked(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """The labels as `o` is shaped, and 0 where they say nothing."""
    return F.one_hot(y.clamp(min=0), C).to(o)


def each(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.transpose(1, 2), y, reduction="none")


MASKED = {
    "mean": Row(head, lambda o, y, m: each(o, y)[m].mean(), padded),
    "sum over count": Row(head, lambda o, y, m: each(o, y)[m].sum() / m.sum(), padded),
    "sum over size": Row(head, lambda o, y, m: 2 * each(o, y)[m].sum() / each(o, y)[m].shape[0], padded),
    "sum over numel": Row(head, lambda o, y, m: o[m].square().sum() / o[m].numel(), padded),
    "rows of logits": Row(head, lambda o, y, m: F.cross_entropy(o[y != -100], y[y != -100]), padded),
    "flat rows": Row(
        head, lambda o, y, m: F.cross_entropy(o.reshape(-1, C)[y.view(-1) >= 0], y.view(-1)[y.view(-1) >= 0]), padded
    ),
    "masked_select": Row(
        head, lambda o, y, m: torch.masked_select((o - picked(o, y, m)).square(), m[..., None]).mean(), padded
    ),
    "two masks": Row(
        head, lambda o, y, m: o[y == 1].square().sum() - (o[y == 2].sin().sum(-1) * 3).mean().nan_to_num(), padded
    ),
    "an op that only the picked rows allow": Row(
        head, lambda o, y, m: (o[o > 0].log().sum() + (o[m] - 1).norm(dim=-1).sum() + o[m].exp().sum(0).norm()), padded
    ),
    "folded rows": Row(
        head, lambda o, y, m: (o[m].reshape(-1).sin() * 2).mean() + o[m].view(-1, C, 1).flatten().cos().sum(), padded
    ),
    "a parameter after the mask": Row(
        program(lambda x, m, w, v: F.layer_norm(x[m] @ w, (C,), v).square().mean(), w=(4, C), v=(C,)), itself,
        lambda n: ((torch.randn(n, T, 4).double(), padded(n)[1][1]), None),
    ),
    "time major": Row(head, lambda o, y, m: each(o, y).t()[m.t()].mean(), padded),
    "columns that all samples share": Row(
        head, lambda o, y, m: o[:, torch.tensor([True, False, True, True, False])].square().mean(), padded
    ),
    "any": Row(head, lambda o, y, m: o.square().sum() * (o[m] > 0.5).any() * (o[m] > -9).all(), padded),
}  # fmt: skip


def rows_of(pick: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """`pick(h, n, c)`: of h `[B·T, C]`, with the numbers n of the samples and places c of each, `[B]` in 0..T-1."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        places = (x.sum(-1) * 3).long().abs().remainder(T)[:, 0]
        return pick((x @ w).reshape(-1, C), torch.arange(x.shape[0]), places)

    return program(function, w=(4, C))


FLAT = {
    "clamped": Row(rows_of(lambda h, n, c: h[n * T + (3 * c).clamp(0, T - 1)]), square, tokens),
    "remainder": Row(rows_of(lambda h, n, c: h[c + T * n]), square, tokens),
    "last": Row(rows_of(lambda h, n, c: h[n * T + T - 1] * h[(n + 0) * T]), square, tokens),
    "several": Row(rows_of(lambda h, n, c: h[(n[:, None] * T + torch.arange(2, T)).view(-1)]), square, tokens),
    "argmax": Row(rows_of(lambda h, n, c: h[n * T + h.view(-1, T, C).sum(-1).argmax(-1)]), square, tokens),
    "elements": Row(rows_of(lambda h, n, c: h.view(-1)[(n * T + c) * C + 1]), square, tokens),
    "index_select": Row(rows_of(lambda h, n, c: h.index_select(0, n * T + (c - 1).clamp(min=0))), square, tokens),
    "embedding": Row(rows_of(lambda h, n, c: F.embedding(n[:, None] * T + c[:, None], h)), square, tokens),
}


def spoken(size: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Labels 1 and 2 with a repetition, their lengths (one of them 0), and the lengths of the inputs."""
    labels = torch.tensor([[1, 2, 2], [2, 1, 1], [1, 1, 2]]).repeat(size, 1)[:size]
    lengths = torch.tensor([2, 0, 1]).repeat(size)[:size]
    return torch.randn(size, 6, 4).double(), (labels, torch.tensor([6, 4, 5]).repeat(size)[:size], lengths)


def ctc(reduction: str, **options: Any) -> Callable[..., Tensor]:
    def loss(o: Tensor, y: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        time_major = o.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(time_major, y, steps, lengths, reduction=reduction, **options)

    return loss


def ctc_of_all_steps(o: Tensor, y: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    size = o.shape[0]
    return nn.CTCLoss(zero_infinity=True)(o.log_softmax(-1).transpose(0, 1), y, [6] * size, [3] * size)


CTC = {
    "mean": Row(head, ctc("mean"), spoken),
    "sum": Row(head, ctc("sum", blank=2 - 2), spoken),
    "none": Row(head, ctc("none"), spoken),
    "impossible targets": Row(
        head, lambda o, y, s, n: ctc("mean", zero_infinity=True)(o, y, s - 4, torch.full_like(n, 3)) + o.mean(), spoken
    ),
    "numbers for lengths": Row(head, ctc_of_all_steps, spoken),
}


def kernels(size: int) -> tuple[Any, None]:
    """Images and the kernels of each sample."""
    return (torch.randn(size, 2, 5, 5).double(), torch.randn(size, 3, 2, 3, 3).double()), None


def grouped(x: Tensor, k: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Each sample a group of its own."""
    size = x.shape[0]
    out = F.conv2d((x * w).reshape(1, -1, 5, 5), (k * v).reshape(-1, 2, 3, 3), groups=size)
    return out.view(size, 3, 3, 3)


def shared_image(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One image that all samples share, under the kernels of each."""
    image = torch.linspace(-1, 1, 50, dtype=k.dtype).view(1, 2, 5, 5).sin()
    return F.conv2d(image, (k * v).reshape(-1, 2, 3, 3), padding=1).view(k.shape[0], 3, 5, 5) * x[:, :1]


def learned_image(x: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """The image is a parameter."""
    return F.conv2d(p, k.reshape(-1, 2, 3, 3), padding=1).view(k.shape[0], 3, 5, 5) * x[:, :1]


KERNELS = {
    "groups": Row(program(grouped, w=(2, 1, 1), v=(3, 1, 1, 1)), square, kernels),
    "a shared image": Row(program(shared_image, v=(3, 1, 1, 1)), square, kernels),
}

GROUPS = {
    "kernels": KERNELS,
    "ctc": CTC,
    "flat": FLAT,
    "masked": MASKED,
    "taken": TAKEN, "counted": COUNTED, "one number": ONE_NUMBER, "logged": LOGGED, "checked": CHECKED,
}  # fmt: skip
ROWS = {f"{group}: {name}": row for group, rows in GROUPS.items() for name, row in rows.items()}


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", ROWS)
def test_equals_the_loop(name: str) -> None:
    row = ROWS[name]
    torch.manual_seed(0)
    model = row.model().double()
    step = psg_fx.transform(model, row.loss, quantities=[Grads(), ClippedSum(0.3), Gram()], backend="eager")
    for size in row.at:
        x, y = row.draw(size)
        ordinary = copy.deepcopy(model)
        ordinary(*(x if isinstance(x, tuple) else (x,)))
        out = step(x) if y is None else step(x, y)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, ordinary.get_buffer(name), rtol=1e-9, atol=1e-12, equal_nan=True)
        losses, grads = oracle.loop_grads(model, row.loss, x, y)
        torch.testing.assert_close(out.losses, losses, rtol=1e-7, atol=1e-9, equal_nan=True)
        rows = torch.cat([g.flatten(1) for g in grads.values()], 1)
        for name, want in grads.items():
            torch.testing.assert_close(out.grads[name], want, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(out.norms, rows.norm(dim=1), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(out.gram, rows @ rows.T, rtol=1e-7, atol=1e-9)
        for name, want in oracle.clipped_sum(grads, 0.3).items():
            torch.testing.assert_close(out.clipped_sum[name], want, rtol=1e-7, atol=1e-9)


def two_arms(y: Tensor) -> Tensor:
    if y.max() > 1:
        return y + 1
    return y


def caught(y: Tensor) -> Tensor:
    try:
        if y.max() > 1:
            raise ValueError
    except ValueError:
        y = y + 1
    return y


def caught_outside(y: Tensor) -> None:
    with contextlib.suppress(TypeError):
        try:
            asserted(y)
        except AssertionError:
            y.sum()


Refused = tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[int], tuple[Any, Any]], type[PsgError], str]

REFUSED: dict[str, Refused] = {
    "rows of a parameter by the sample's number": (
        program(lambda i, p: p[: i.shape[0]].gather(1, i), p=(9, 7)), square, ids(4), PsgError, "",
    ),
    "take from the samples": (
        program(lambda x, w: torch.take(x @ w, torch.tensor([0, 1])), w=(4, 3)), square, tokens, SamplesMixed,
        "counts places through the rows of all samples",
    ),
    "diff over the samples": (
        program(lambda x, w: torch.diff(x @ w, dim=0, prepend=(x @ w)[:1]), w=(4, 3)), square, tokens, SamplesMixed, "",
    ),
    "a tensor of the length squared": (
        head, lambda o, y: total(o, y) / torch.tensor(len(o) ** 2), flat, NotYetSupported, "in no simple way",
    ),
    "a logged mean that is read": (
        lambda: Reading(lambda m, h: m.seen.copy_(h.mean(0))), square, flat, SamplesMixed, "reduced over them by %mean",
    ),
    "a branch of two arms": (
        lambda: Checked(two_arms), itself, labelled, CaptureFailed, "branches on values of a tensor",
    ),
    "an error that is caught": (
        lambda: Checked(caught), itself, labelled, CaptureFailed, "branches on values of a tensor",
    ),
    "an error that is caught outside": (
        lambda: Checked(caught_outside), itself, labelled, CaptureFailed, "branches on values of a tensor",
    ),
    "a mask over samples in the model": (
        program(lambda x, w: (x @ w)[(x.sum((1, 2)) > 0)].mean() + (x @ w), w=(4, C)), square, tokens, PsgError, "",
    ),
    "a mean of masked rows in the model": (
        program(lambda x, w: (x @ w) - (x @ w)[x[..., 0] > 0].mean(0), w=(4, C)), square, tokens, SamplesMixed, "",
    ),
    "rows that the model returns": (
        program(lambda x, w: (x @ w)[x[..., 0] > 0].cumsum(0), w=(4, C)), square, tokens, PsgError, "a mask picks",
    ),
    "rows in an order": (
        head, lambda o, y, m: o[m].sort(0).values.cumsum(0).mean(), padded, PsgError, "a mask picks",
    ),
    "rows less their mean": (
        head, lambda o, y, m: (o[m] - o[m].mean(0)).square().mean(), padded, PsgError, "",
    ),
    "the largest row": (
        head, lambda o, y, m: o[m].max(), padded, PsgError, "a mask picks",
    ),
    "rows of one mask with those of another": (
        head, lambda o, y, m: (o[m] - o[~m]).sum(), padded, PsgError, "",
    ),
    "a variance of rows": (
        head, lambda o, y, m: o[m].var(), padded, PsgError, "a mask picks",
    ),
    "a flat index of any labels": (
        rows_of(lambda h, n, c: h[n * T + 2 * c]), square, tokens, SamplesMixed, "c may lie outside of 0..4",
    ),
    "a flat index with another step": (
        rows_of(lambda h, n, c: h[n * 4 + c.clamp(max=1)]), square, tokens, SamplesMixed, "does not number the rows",
    ),
    "a flat index that starts later": (
        rows_of(lambda h, n, c: h[n * T + c - 1]), square, tokens, SamplesMixed, "c may lie outside",
    ),
    "the numbers of the samples as values": (
        rows_of(lambda h, n, c: h[n * T] * (n * T + c)[:, None]), square, tokens, SamplesMixed, "the numbers of",
    ),
    "numbers taken from numbers": (
        rows_of(lambda h, n, c: h[c * T - n]), square, tokens, SamplesMixed, "",
    ),
    "targets of all samples in one dim": (
        head, lambda o, y, s, n: ctc("sum")(o, y[:, :2].reshape(-1), s, torch.full_like(n, 2)), spoken, NotYetSupported,
        "pass padded targets",
    ),
    "lengths as different numbers": (
        head, lambda o, y, s, n: ctc("sum")(o, y, [6, 5, 4], n), spoken, NotYetSupported, "pass them as tensors",
    ),
    "ctc over the samples": (
        head, lambda o, y, s, n: F.ctc_loss(o.log_softmax(-1), y[:1].expand(6, 3), [3] * 6, [2] * 6), spoken, PsgError,
        "",
    ),
    "kernels of all samples on every image": (
        program(lambda x, k, w: F.conv2d(x * w, k.reshape(-1, 2, 3, 3)), w=(2, 1, 1)), square, kernels, NotYetSupported,
        "groups=B",
    ),
    "a parameter as the image": (
        program(learned_image, p=(1, 2, 5, 5)), square, kernels, NotYetSupported, "conv2d has no gradient rule",
    ),
    "samples as channels of the kernel": (
        program(lambda x, k, w: F.conv2d(w[None], k[:, 0, 0][None]), w=(3, 5, 5)), square, kernels, PsgError, "",
    ),
    "two numbers": (
        head, lambda o, y: (o - y).square().mean(0)[:2], flat, BadArgument, "its shape is [2]",
    ),
    "two numbers a sample": (
        head, lambda o, y: (o - y).square()[:, :2], flat, BadArgument, "its shape is [B, 2]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_stays_refused(name: str) -> None:
    model, loss, draw, kind, words = REFUSED[name]
    torch.manual_seed(0)
    x, y = draw(B)
    step = psg_fx.transform(model().double(), loss, backend="eager")
    with pytest.raises(kind) as caught:
        step(x) if y is None else step(x, y)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["in_helper", "asserted"])
def test_a_check_is_looked_at_at_every_call(name: str) -> None:
    step = psg_fx.transform(Checked(CHECKS[name]).double(), itself, backend="eager")
    inputs, _ = labelled(B)
    step(inputs)
    x, y = inputs
    with pytest.raises(BadArgument) as caught:
        step((x, torch.full_like(y, C)))
    line = Checked.forward.__code__.co_firstlineno + 1
    assert str(caught.value).splitlines()[:2] == [
        "the code of the model or loss refuses these values",
        f"  where  test_answers.py:{line}: if y.max() >= C or not (y >= -100).all():",
    ]
    if name == "asserted":
        with pytest.raises(BadArgument, match=r"where  .*: torch\._assert"):
            step((x, torch.full_like(y, -100)))
    step(inputs)


def test_a_failed_check_leaves_buffers_as_they_were() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, C)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            h = self.layer(x)
            if h.abs().max() > 1e3:
                raise ValueError("too large")
            return h

    for loss in (square, None):
        model = Counting()
        step = psg_fx.transform(model, loss, backend="eager")
        step(torch.ones(B, 4))
        with pytest.raises(BadArgument, match=r"if h\.abs"):
            step(torch.full((B, 4), 1e6))
        assert model.seen == 1
