"""Calls of operators that `op_db` does not reach, or reaches with arguments that say little."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from support.op_samples import Call, recorded

aten = torch.ops.aten

DONORS = """
    special_softmax:softmax special_log_softmax:log_softmax _logcumsumexp:logcumsumexp det:linalg_det
    slogdet:linalg_slogdet inverse:linalg_inv matrix_power:linalg_matrix_power
    _cholesky_solve_helper:cholesky_solve linalg_matmul:matmul _addmm_activation:addmm ger:outer
    _scaled_dot_product_attention_math:scaled_dot_product_attention __and__:bitwise_and __or__:bitwise_or
    __xor__:bitwise_xor _conj_copy:_conj conj:_conj _neg_view:neg _neg_view_copy:neg absolute:abs arccos:acos
    arccosh:acosh arcsin:asin arcsinh:asinh arctan:atan arctan2:atan2 arctanh:atanh detach_copy:detach fix:trunc
    greater:gt greater_equal:ge less:lt less_equal:le lift:clone multiply:mul negative:neg not_equal:ne
    special_digamma:digamma special_erf:erf special_erfc:erfc special_erfinv:erfinv special_exp2:exp2
    special_expit:sigmoid special_expm1:expm1 special_gammainc:igamma special_gammaincc:igammac special_gammaln:lgamma
    special_i0:i0 special_log1p:log1p special_logit:logit special_psi:digamma special_round:round special_sinc:sinc
    special_xlogy:xlogy _add_relu:add contiguous:clone lift_fresh_copy:clone rand_like:randn_like
    _unsafe_index_put:index_put _index_put_impl:index_put concat:cat concatenate:cat _stack:stack row_stack:vstack
    special_logsumexp:logsumexp _aminmax:aminmax _reshape_copy:reshape
    view_as_real_copy:view_as_real view_as_complex_copy:view_as_complex swapaxes:transpose swapdims:transpose
    moveaxis:movedim select_copy:select slice_copy:slice unsafe_split_with_sizes:split_with_sizes split_copy:split
    native_channel_shuffle:channel_shuffle _fused_rms_norm:rms_norm hamming_window:zeros adjoint:mT
    normal_functional:clone _efficientzerotensor:zeros broadcast_to:expand
"""


def real(*shape: int) -> Tensor:
    """Values that are the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def spd(*lead: int) -> Tensor:
    """A lower triangle with a large diagonal."""
    return (real(*lead, 3, 3) + 4 * torch.eye(3, dtype=torch.float64)).tril()


def _images() -> dict[str, list[tuple[Any, ...]]]:
    image, kernel = real(2, 2, 5, 4), real(3, 2, 3, 2)
    depth, cube = real(2, 2, 5, 4, 3), real(3, 2, 2, 2, 2)
    pair = [1, 1]
    return {
        "_convolution": [(image, kernel, None, pair, [0, 0], pair, False, [0, 0], 1, False, False, True, True)],
        "_convolution_mode": [(image, kernel, None, pair, "valid", pair, 1)],
        "thnn_conv2d": [(image, kernel, [3, 2])],
        "_slow_conv2d_forward": [(image, kernel, [3, 2], None, pair, [0, 0])],
        "slow_conv3d": [(depth, cube, [2, 2, 2])],
        "slow_conv_dilated2d": [(image, kernel, [3, 2])],
        "slow_conv_transpose2d": [(image, real(2, 3, 3, 2), [3, 2])],
        "mkldnn_convolution": [(image.float(), kernel.float(), None, [0, 0], pair, pair, 1)],
        "conv_tbc": [(real(5, 2, 3), real(2, 3, 4), real(4), 1)],
        "im2col": [(image, [2, 2], pair, [0, 0], pair)],
        "col2im": [(real(2, 8, 12), [5, 4], [2, 2], pair, [0, 0], pair)],
        "_upsample_bicubic2d_aa": [(image, [4, 3], False)],
        "_upsample_lanczos2d_aa": [(image, [4, 3], False)],
        "_upsample_nearest_exact3d": [(depth, [4, 3, 2])],
        "_pad_enum": [(image, [1, 1], 1), (image, [1, 1, 0, 1], 2)],
        "_pad_circular": [(image, [1, 1, 0, 0])],
        "affine_grid_generator": [(real(1, 2, 3), [1, 2, 4, 4], False)],
        "instance_norm": [(image, None, None, None, None, True, 0.1, 1e-5, False)],
        "native_group_norm": [(image, real(2), real(2), 2, 2, 20, 2, 1e-5)],
        "channel_shuffle": [(image, 2)],
    }


def _norms() -> dict[str, list[tuple[Any, ...]]]:
    x, one = real(2, 3, 4), real(3).abs()
    several = torch.tensor([0.2, 0.7], dtype=x.dtype)
    return {
        "_batch_norm_impl_index": [(x, one, one, one, one, False, 0.1, 1e-5, False)],
        "_native_batch_norm_legit_functional": [(x, one, one, one, one, False, 0.1, 1e-5)],
        "_batch_norm_no_update": [(x, one, one, one, one, 0.1, 1e-5)],
        "_masked_softmax": [(x, x > 0, 2, 2)],
        "frobenius_norm": [(x, [1]), (x, [0, 2], True)],
        "nuclear_norm": [(x, [1, 2]), (x, [0, 1], True)],
        "linalg_vector_norm": [(x, 2, [1]), (x, 3, [0], True)],
        "linalg_norm": [(x, None, [1]), (x, None, [0, 2])],
        "quantile": [(x, 0.5, 1), (x, 0.2, -1, True), (x, several, 1), (x, several, -1, True), (x, several[0], 1)],
        "nanquantile": [(x, 0.5, 1), (x, 0.2, -1, True), (x, several, 1), (x, several, -1, True)],
        "linalg__powsum": [(x, 2, [1])],
        "_linalg_eigvals": [(real(2, 3, 3),)],
        "_cholesky_solve_helper": [(real(2, 3, 2), spd(2), False)],
        "cholesky_solve": [(real(2, 3, 2), spd(2))],
        "_linalg_solve_ex": [(spd(2), real(2, 3, 2))],
        "_linalg_det": [(real(2, 3, 3),)],
        "_linalg_slogdet": [(real(2, 3, 3),)],
        "_linalg_svd": [(real(2, 4, 3),)],
    }


def _others() -> dict[str, list[tuple[Any, ...]]]:
    x, ids, bit = real(3, 4), torch.tensor([2, 0, 1, 1]), real(3, 4) > 0
    image, only = real(1, 2, 5, 4), [True, False, False]
    return {
        "_upsample_bicubic2d_aa_backward": [(image, [5, 4], [1, 2, 4, 3], False)],
        "_upsample_lanczos2d_aa_backward": [(image, [5, 4], [1, 2, 4, 3], False)],
        "_upsample_nearest_exact3d_backward": [(real(1, 2, 5, 4, 3), [5, 4, 3], [1, 2, 4, 3, 2])],
        "affine_grid_generator_backward": [(real(1, 4, 4, 2), [1, 2, 4, 4], False)],
        "fake_quantize_per_tensor_affine": [(x, 0.1, 0, -8, 7)],
        "fake_quantize_per_tensor_affine_cachemask": [(x, 0.1, 0, -8, 7)],
        "binary_cross_entropy_backward": [(x, x.sigmoid(), bit.double(), None, 0)],
        "mse_loss_backward": [(x, x.cos(), x.sin(), 0)],
        "smooth_l1_loss_backward": [(x, x.cos(), x.sin(), 0, 1.0)],
        "huber_loss_backward": [(x, x.cos(), x.sin(), 0, 1.0)],
        "soft_margin_loss_backward": [(x, x.cos(), bit.double(), 0)],
        "convolution_backward": [
            (real(1, 3, 3, 3), image, real(3, 2, 3, 2), [3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, only)
        ],
        "native_group_norm_backward": [(image, image.cos(), real(1, 2), real(1, 2).abs(), real(2), 1, 2, 20, 2, only)],
        "slice_backward": [(real(3, 2), [3, 4], 1, 1, 3, 1), (real(2, 3), [4, 3], 0, 1, 3, 1)],
        "diagonal_backward": [(real(3, 2), [3, 2, 4], 0, 1, 2), (real(3, 2), [2, 3, 4], 1, 0, 2)],
        "_prelu_kernel_backward": [(x, x.cos(), real(3, 4).sin()), (x, x.cos(), real(3, 1).sin().expand(3, 4))],
        "_fused_rms_norm_backward": [(x, x.cos(), [4], x.abs()[:, :1], None, [True, False])],
        "_masked_softmax_backward": [(x, x.softmax(1), bit, 1)],
        "_int_mm": [(torch.arange(36).view(4, 9).char(), torch.arange(9).view(9, 1).char())],
        "_euclidean_dist": [(x, real(2, 4))],
        "_autocast_to_full_precision": [(x.half(), True, True)],
        "_autocast_to_reduced_precision": [(x.float(), False, True, torch.half, torch.bfloat16)],
        "rrelu_with_noise_functional": [(x, x.abs(), 0.1, 0.3, False)],
        "hann_window": [(5,)],
        "normal": [(0.5, x.abs())],
        "hamming_window": [(5,)],
        "fft_fftfreq": [(5,)],
        "fft_rfftfreq": [(5,)],
        "poisson": [(x.abs(),)],
        "_standard_gamma": [(x.abs(),)],
        "_standard_gamma_grad": [(x.abs(), x.abs() + 1)],
        "_sample_dirichlet": [(x.abs() + 1,)],
        "_dirichlet_grad": [(x.sigmoid(), x.abs() + 1, 9 * x.abs() + 5)],
        "binomial": [(torch.full((3, 4), 5.0), torch.rand(3, 4))],
        "diagonal_scatter": [(real(2, 3, 4), real(2, 3), 0, 1, 2)],
        "index_add": [(x, 1, ids, real(3, 4)), (real(4, 3), 0, ids, real(4, 3))],
        "index": [(real(1, 4), [torch.tensor([0]), torch.tensor([2])]), (real(1, 4, 2), [torch.tensor([0]), ids[:1]])],
        "index_put": [(real(1, 4), [torch.tensor([0]), torch.tensor([2])], real(1))],
        "searchsorted": [(torch.arange(5.0), real(2, 3).float()), (real(2, 5).sort()[0], real(2, 3))],
        "isin": [(torch.arange(6).view(2, 3), torch.tensor([1, 4]))],
        "_reshape_alias": [(real(2, 3), [6], [1])],
        "_unsafe_view": [(real(2, 3), [6]), (real(2, 3), [-1])],
        "binary_cross_entropy": [(x.sigmoid(), bit.double(), None, 0)],
        "binary_cross_entropy_with_logits": [(x, bit.double(), None, None, 0)],
        "arange": [(1,), (5,)],
        "one_hot": [(ids, 3)],
        "multinomial": [(torch.eye(3, dtype=torch.float64), 1)],
    }


def recurrences() -> dict[str, list[tuple[Any, ...]]]:
    """T = 3, one sample, states of 2: of four gates (LSTM), three (GRU) and one."""
    x, h, c = real(3, 1, 8), real(1, 2), real(1, 2)
    states, gru, square = real(3, 1, 2), real(3, 1, 6), real(2, 2)
    return {
        "psg_fx::lstm": [(x, h, c, real(8, 2), real(8), None), (x, real(1, 3), c, real(8, 3), None, real(3, 2))],
        "psg_fx::expert_mm": [(real(4, 2), real(3, 2, 5), torch.tensor([2, 0, 0, 1]))],
        "psg_fx::gru": [(gru, h, real(6, 2), real(6)), (gru, h, real(6, 2), None)],
        "psg_fx::rnn": [(real(3, 2, 3), real(2, 3), real(3, 3), None, f) for f in ("tanh", "relu")],
        "psg_fx::lstm_backward": [(states, c, x.sigmoid(), c.cos(), states.sin(), states.cos(), real(8, 2), None)],
        "psg_fx::gru_backward": [(states, states.sin(), gru.sigmoid(), states.cos(), h, real(6, 2))],
        "psg_fx::rnn_backward": [(states, states.sin(), square, f) for f in ("tanh", "relu")],
        "psg_fx::attach": [("tanh", [states, h], [states.sin()], [], [square])],
    }


@functools.cache
def written() -> Mapping[str, list[Call]]:
    """The calls of each operator by name: those below, and those borrowed from an operator with the same arguments."""
    found: dict[str, list[Call]] = {}
    for name, given in (_images() | _norms() | _others() | recurrences()).items():
        found[name] = [call for args in given if (call := fitting(name, args, {})) is not None]
    for pair in DONORS.split():
        name, donor = pair.split(":")
        calls = [c for op, cs in recorded().items() if op._schema.name == f"aten::{donor}" for c in cs[:3]]
        found.setdefault(name, []).extend(new for c in calls if (new := fitting(name, c.args, c.kwargs)) is not None)
    return found


def fitting(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """The overload that takes the arguments, if this torch has the operator."""
    space, _, name = name.rpartition("::")
    packet = getattr(getattr(torch.ops, space or "aten"), name, None)
    for overload in () if packet is None else packet.overloads():
        call = Call(getattr(packet, overload), args, kwargs)
        if call.op._schema.is_mutable:
            continue
        try:
            call.run()
        except Exception:
            continue
        return call
    return None
