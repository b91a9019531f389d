"""Recurrent layers, attention, bags of tokens and rarer layers, in every layout and with their options."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from external.program import Problem, Program

B, T, E = 3, 3, 4
Input = tuple[int, ...] | Tensor | Callable[[], Any]
"""A shape of random numbers, a tensor, or its maker."""


class Model(nn.Module):
    """A function of itself and the inputs, and the parts that it uses."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def program(
    name: str, model: Callable[[], nn.Module], inputs: tuple[Input, ...] | Mapping[str, Input], batch_dim: Any = 0,
    out_dim: Any = 0, train: bool = True, **expected: str,
) -> Program:  # fmt: skip
    """`model` in float64 on random inputs, by position or by name."""

    def make() -> Problem:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "enable_nested_tensor is True", UserWarning)
            made = model().to(torch.float64).train(train)
        if isinstance(inputs, Mapping):
            data: Any = {key: _made(value) for key, value in inputs.items()}
        else:
            data = tuple(_made(value) for value in inputs)
        return Problem(made, data, batch_dim=(batch_dim, None), out_dim=out_dim)

    return Program(name, make, family="recurrent and attention", **expected)


def _made(value: Input) -> Any:
    if isinstance(value, Tensor):
        return value
    return torch.randn(value, dtype=torch.float64) if isinstance(value, tuple) else value()


def ids(*shape: int, of: int = 7) -> Callable[[], Tensor]:
    """Random numbers of tokens."""
    return lambda: torch.randint(of, shape)


# --- recurrent layers -----------------------------------------------------------------------------------------------


def _recurrent(
    name: str, kind: Callable[..., nn.Module], states: int = 0, train: bool = True, **options: Any
) -> Program:
    """`states`: how many initial states are given."""
    first = 0 if options.get("batch_first") else 1
    rows = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    x: Input = (B, T, 2) if first == 0 else (T, B, 2)
    hidden = [(rows, B, options.get("proj_size") or 3), (rows, B, 3)][:states]
    out_dim = (first, 1)
    inputs: Any = {"input": x}
    dims: dict[str, Any] = {"input": first}
    if states:
        inputs["hx"] = (lambda: tuple(_made(s) for s in hidden)) if states == 2 else hidden[0]
        dims["hx"] = 1
    return program(name, partial(kind, 2, 3, **options), inputs, dims, out_dim, train)


def _pack(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(m.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def _unrolled(m: Any, x: Tensor) -> Tensor:
    state = None
    for now in x.unbind(1):
        state = m.cell(now, state)
    return state[0] if isinstance(state, tuple) else state


def _cell(name: str, kind: Callable[..., nn.Module], **options: Any) -> Program:
    return program(name, lambda: Model(_unrolled, cell=kind(2, 3, **options)), ((B, T, 2),))


RECURRENT = [
    _recurrent("rnn/plain", nn.RNN),
    _recurrent("rnn/relu-two-ways", nn.RNN, 1, nonlinearity="relu", bidirectional=True, batch_first=True),
    _recurrent("rnn/two-layers-no-bias", nn.RNN, num_layers=2, bias=False),
    _recurrent("lstm/plain", nn.LSTM, batch_first=True),
    _recurrent("lstm/states", nn.LSTM, 2),
    _recurrent("lstm/two-layers-states", nn.LSTM, 2, num_layers=2, batch_first=True),
    _recurrent("lstm/two-ways", nn.LSTM, bidirectional=True),
    _recurrent("lstm/projected", nn.LSTM, 2, proj_size=2, batch_first=True),
    _recurrent("lstm/projected-two-ways-no-bias", nn.LSTM, proj_size=2, bidirectional=True, bias=False),
    _recurrent("lstm/dropout-in-eval", nn.LSTM, num_layers=2, dropout=0.5, train=False),
    _recurrent("gru/plain", nn.GRU),
    _recurrent("gru/states-batch-first", nn.GRU, 1, batch_first=True),
    _recurrent("gru/two-ways", nn.GRU, 1, bidirectional=True, batch_first=True),
    _recurrent("gru/two-layers-no-bias", nn.GRU, num_layers=2, bias=False),
    _cell("cell/rnn", nn.RNNCell),
    _cell("cell/rnn-relu-no-bias", nn.RNNCell, nonlinearity="relu", bias=False),
    _cell("cell/lstm", nn.LSTMCell),
    _cell("cell/lstm-no-bias", nn.LSTMCell, bias=False),
    _cell("cell/gru", nn.GRUCell),
    _cell("cell/gru-no-bias", nn.GRUCell, bias=False),
    *[
        program(f"packed/{kind.__name__.lower()}", lambda kind=kind: Model(_pack, rnn=kind(2, 3, batch_first=True)),
                ((B, T, 2), lambda: torch.tensor([3, 1, 2])))
        for kind in (nn.LSTM, nn.GRU)
    ],
]  # fmt: skip


# --- attention ------------------------------------------------------------------------------------------------------

NO_MASKS: Mapping[str, Tensor] = MappingProxyType({})
PADDED = torch.tensor([[False, False, True], [False, False, False], [False, True, True]])
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
ADDED = torch.linspace(-1.0, 1.0, T * T, dtype=torch.float64).reshape(T, T)


def _attention(name: str, masks: Mapping[str, Any] = NO_MASKS, train: bool = True, **options: Any) -> Program:
    """Queries, keys and values of their own; masks by name."""
    first = 0 if options.get("batch_first") else 1
    flags = {key: masks[key] for key in masks if not isinstance(masks[key], Tensor)}
    sizes = {"query": E, "key": options.get("kdim", E), "value": options.get("vdim", E)}
    inputs: dict[str, Any] = {k: ((B, T, n) if first == 0 else (T, B, n)) for k, n in sizes.items()}
    dims: dict[str, Any] = dict.fromkeys(inputs, first)
    for key in ("key_padding_mask", "attn_mask"):
        if key in masks:
            inputs[key] = masks[key]
            dims[key] = 0 if key == "key_padding_mask" else None

    def model() -> nn.Module:
        return Model(lambda m, **named: m.part(**named, **flags), part=nn.MultiheadAttention(E, 2, **options))

    out_dim = (first, 0) if flags.get("need_weights", True) else first
    return program(name, model, inputs, dims, out_dim, train)


def _heads_mask(m: Any, x: Tensor, mask: Tensor) -> Any:
    """A mask for each sample and head: `[B, 2, T, T]` as torch takes it, `[B·2, T, T]`."""
    return m.part(x, x, x, attn_mask=mask.flatten(0, 1), need_weights=False)[0]


BOTH = {"key_padding_mask": PADDED, "attn_mask": CAUSAL & ~torch.eye(T, dtype=torch.bool)}

ATTENTION = [
    _attention("attention/plain"),
    _attention("attention/batch-first", batch_first=True),
    _attention("attention/eval", train=False, batch_first=True),
    _attention("attention/eval-masks-no-weights", BOTH | {"need_weights": False}, train=False, batch_first=True),
    _attention("attention/other-sizes", kdim=3, vdim=5),
    _attention("attention/other-sizes-batch-first-no-bias", kdim=3, vdim=5, batch_first=True, bias=False),
    _attention("attention/bias-kv", add_bias_kv=True),
    _attention("attention/zero", add_zero_attn=True, batch_first=True),
    _attention("attention/bias-kv-zero-masks", BOTH, add_bias_kv=True, add_zero_attn=True),
    _attention("attention/weights-of-each-head", {"average_attn_weights": False}, batch_first=True),
    _attention("attention/no-weights", {"need_weights": False}),
    _attention("attention/causal", {"attn_mask": CAUSAL, "need_weights": False, "is_causal": True}, batch_first=True),
    _attention("attention/added-mask", {"attn_mask": ADDED}),
    _attention("attention/padding", {"key_padding_mask": PADDED}, batch_first=True),
    program("attention/mask-of-each-head",
            lambda: Model(_heads_mask, part=nn.MultiheadAttention(E, 2, batch_first=True)),
            ((B, T, E), (B, 2, T, T))),
]  # fmt: skip


# --- transformers ---------------------------------------------------------------------------------------------------


def _encoder(
    name: str, depth: int = 0, train: bool = True, frozen: bool = False, masks: Any = NO_MASKS, **options: Any
) -> Program:
    """A layer, or `depth` of them in a stack; frozen: only a linear layer after it learns."""
    first = 0 if options.get("batch_first") else 1
    x = (B, T, E) if first == 0 else (T, B, E)
    dims = {"src": first} | {key: 0 if "padding" in key else None for key in masks}

    def model() -> nn.Module:
        layer = nn.TransformerEncoderLayer(E, 2, 6, dropout=0.0, **options)
        made = nn.TransformerEncoder(layer, depth) if depth else layer
        head = nn.Linear(E, 2)
        made.requires_grad_(not frozen)
        return Model(lambda m, **named: m.head(m.part(**named)), part=made, head=head)

    expected = {"refused": "returns zeros at padded positions"} if frozen and depth else {}
    return program(name, model, {"src": x} | dict(masks), dims, first, train, **expected)


def _decoder(
    name: str, kind: Callable[..., nn.Module], masks: Any = NO_MASKS, train: bool = True, **options: Any
) -> Program:
    """Source and target of different lengths; `masks` by name."""
    first = 0 if options.get("batch_first") else 1
    shapes = [(B, n, E) if first == 0 else (n, B, E) for n in (T, 2)]
    names = ("src", "tgt") if kind is nn.Transformer else ("memory", "tgt")
    inputs = dict(zip(names, shapes, strict=True)) | dict(masks)
    dims = dict.fromkeys(names, first) | {key: 0 if "padding" in key else None for key in masks}
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1} if kind is nn.Transformer else {}
    make = partial(kind, E, 2, dim_feedforward=6, dropout=0.0, **sizes, **options)
    return program(name, make, inputs, dims, first, train)


TARGETS = {"tgt_mask": torch.ones(2, 2, dtype=torch.bool).triu(1), "memory_key_padding_mask": PADDED}

TRANSFORMERS = [
    _encoder("encoder/layer"),
    _encoder("encoder/layer-batch-first-eval", train=False, batch_first=True),
    _encoder("encoder/layer-norm-first-gelu", norm_first=True, activation="gelu", batch_first=True),
    _encoder("encoder/layer-masks", masks={"src_mask": CAUSAL, "src_key_padding_mask": PADDED}, batch_first=True),
    _encoder("encoder/layer-frozen-eval", train=False, frozen=True, batch_first=True,
             masks={"src_key_padding_mask": PADDED}),
    _encoder("encoder/stack-mask", 2, masks={"mask": CAUSAL}),
    _encoder("encoder/stack-padding-eval", 1, train=False, batch_first=True, masks={"src_key_padding_mask": PADDED}),
    _encoder("encoder/stack-padding-frozen-eval", 1, train=False, frozen=True, batch_first=True,
             masks={"src_key_padding_mask": PADDED}),
    _decoder("decoder/layer", nn.TransformerDecoderLayer, TARGETS),
    _decoder("decoder/layer-norm-first-eval", nn.TransformerDecoderLayer, train=False, norm_first=True,
             batch_first=True),
    _decoder("transformer/masks", nn.Transformer, TARGETS | {"src_key_padding_mask": PADDED}, batch_first=True),
    _decoder("transformer/norm-first", nn.Transformer, norm_first=True),
]  # fmt: skip


# --- bags of tokens and rarer layers --------------------------------------------------------------------------------


def _bag(name: str, refused: str = "", **options: Any) -> Program:
    return program(name, partial(nn.EmbeddingBag, 7, E, **options), (ids(B, 4),), refused=refused)


def _offsets(m: Any, places: Tensor) -> Tensor:
    return m.part(torch.arange(6), places)


def _table(function: Callable[..., Any], *shape: int) -> Callable[[], nn.Module]:
    return lambda: Model(function, w=nn.Parameter(torch.randn(shape)))


def _lazy() -> nn.Module:
    made = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2))
    made(torch.zeros(1, E))
    return made


def _distances(p: float) -> Callable[[], nn.Module]:
    return _table(lambda m, x: torch.cdist(x, m.w, p=p), 5, E)


LAYERS = [
    _bag("bag/sum", mode="sum"),
    _bag("bag/mean", mode="mean"),
    _bag("bag/max", mode="max"),
    _bag("bag/mean-padding", mode="mean", padding_idx=2),
    _bag("bag/max-padding", mode="max", padding_idx=-1),
    program("bag/weights", partial(nn.EmbeddingBag, 7, E, mode="sum", padding_idx=2),
            {"input": ids(B, 4), "per_sample_weights": (B, 4)}),
    _bag("bag/by-frequency", mode="mean", scale_grad_by_freq=True, refused="scale_grad_by_freq"),
    _bag("bag/max-norm", max_norm=1.0, refused="writes into"),
    program("bag/offsets", lambda: Model(_offsets, part=nn.EmbeddingBag(7, E)), (torch.tensor([0, 2, 3]),),
            refused="ragged"),
    program("embedding/by-frequency", partial(nn.Embedding, 7, E, scale_grad_by_freq=True, padding_idx=2),
            (ids(B, 5),)),
    program("embedding/max-norm", partial(nn.Embedding, 7, E, max_norm=1.0), (ids(B, 5),), refused="writes into"),
    program("bilinear/seq", partial(nn.Bilinear, E, 3, 2), ((B, T, E), (B, T, 3))),
    program("lazy/linear", _lazy, ((B, E),)),
    program("prelu/channels", partial(nn.PReLU, T), ((B, T, E),)),
    program("rms-norm/two-dims", partial(nn.RMSNorm, (T, E)), ((B, T, E),)),
    program("cosine/to-prototypes", _table(lambda m, x: F.cosine_similarity(x.unsqueeze(1), m.w, dim=-1), 5, E),
            ((B, E),)),
    program("pairwise-distance/to-one", _table(lambda m, x: F.pairwise_distance(x, m.w), E), ((B, E),)),
    program("cdist/euclidean", _distances(2.0), ((B, T, E),)),
    program("cdist/one", _distances(1.0), ((B, T, E),)),
    program("cdist/three-flat", _distances(3.0), ((B, E),)),
    program("einsum/repeated-letter", _table(lambda m, x: torch.einsum("bi,ii->bi", x, m.w), E, E), ((B, E),)),
    program("fill/parameter", _table(lambda m, x: x * torch.full_like(x, 2.0).fill_(m.w)), ((B, E),)),
    program("parametrized/orthogonal", lambda: parametrizations.orthogonal(nn.Linear(E, E)), ((B, E),)),
    program("parametrized/orthogonal-cayley",
            lambda: parametrizations.orthogonal(nn.Linear(E, E), orthogonal_map="cayley"), ((B, E),)),
    program("parametrized/weight-norm", lambda: parametrizations.weight_norm(nn.Linear(E, 3)), ((B, E),)),
    program("parametrized/spectral-eval", lambda: parametrizations.spectral_norm(nn.Linear(E, 3)), ((B, E),),
            train=False),
    program("parametrized/sorted", _table(lambda m, x: x * m.w.sort().values, E), ((B, E),)),
]  # fmt: skip


def programs() -> list[Program]:
    """All of them."""
    return [*RECURRENT, *ATTENTION, *TRANSFORMERS, *LAYERS]
