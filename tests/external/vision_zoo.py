"""Image classifiers of torchvision and timm with random weights, narrow and shallow where they can be, on small images.

Batch norm runs on its running statistics (eval mode); models without it are also trained.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from external.torchvision_import import torchvision  # isort: skip

import timm
import torch
import torch.nn.functional as F
from torch import nn

from external.program import Problem, Program

B, CLASSES = 3, 4


def row(
    name: str,
    make: Callable[[], nn.Module],
    size: int = 32,
    *,
    train: bool = False,
    outside: bool = False,
    batch: int = 2,
    loss_fn: Callable[..., Any] = F.cross_entropy,
    mixes: str = "",
    refused: str = "",
) -> Program:
    """outside: with the sum over all outputs for a loss, so that both modes can run it."""

    def problem() -> Problem:
        model = make().double().train(train)
        _disturb(model)
        images, labels = torch.randn(batch, 3, size, size, dtype=torch.float64), torch.arange(batch) % CLASSES
        return Problem(model, images) if outside else Problem(model, images, labels, loss_fn=loss_fn)

    return Program(name, problem, mixes, refused, "vision")


def _disturb(model: nn.Module) -> None:
    """Zeros and ones of a fresh model become random, its running statistics too."""
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None:
            m.running_mean.normal_(0, 0.1)
            m.running_var.uniform_(0.5, 1.5)


def tv(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **options)


def tm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)


def torchvision_models() -> list[Program]:
    from torchvision.models import (
        efficientnet,
        inception,
        mobilenetv3,
        resnet,
        shufflenetv2,
        squeezenet,
        swin_transformer,
        vision_transformer,
    )
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt
    from torchvision.models.densenet import DenseNet
    from torchvision.models.googlenet import BasicConv2d, Inception
    from torchvision.models.maxvit import MaxVit
    from torchvision.models.regnet import BlockParams, RegNet
    from torchvision.models.vgg import make_layers

    def small_resnet(block: Any, **options: Any) -> Callable[[], nn.Module]:
        return lambda: resnet.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES, **options)

    def vgg() -> nn.Module:
        head = nn.Sequential(nn.Linear(8 * 49, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        return nn.Sequential(make_layers([4, "M", 8, 8, "M"]), nn.AdaptiveAvgPool2d(7), nn.Flatten(), head)

    def group_norm(channels: int) -> nn.Module:
        return nn.GroupNorm(4, channels)

    return [
        row("tv/resnet18-outside", small_resnet(resnet.BasicBlock), outside=True),
        row("tv/resnet-groupnorm", small_resnet(resnet.BasicBlock, norm_layer=group_norm), train=True),
        row("tv/resnet-train", small_resnet(resnet.BasicBlock), 64, train=True, mixes="batch_norm"),
        row("tv/resnext", small_resnet(resnet.Bottleneck, groups=4, width_per_group=4)),
        row("tv/densenet", lambda: DenseNet(4, (2, 2), 8, num_classes=CLASSES)),
        row("tv/densenet-checkpointed", lambda: DenseNet(4, (2, 2), 8, num_classes=CLASSES, memory_efficient=True)),
        row("tv/mobilenet-v2", tv("mobilenet_v2", width_mult=0.1,
            inverted_residual_setting=[[1, 8, 1, 1], [6, 8, 2, 2], [6, 16, 1, 2]])),
        row("tv/mobilenet-v3", lambda: mobilenetv3.MobileNetV3(
            [mobilenetv3.InvertedResidualConfig(8, 3, 8, 8, True, "RE", 2, 1, 1),
             mobilenetv3.InvertedResidualConfig(8, 5, 16, 8, False, "HS", 1, 1, 1)], 16, CLASSES)),
        row("tv/efficientnet", lambda: efficientnet.EfficientNet(
            [efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1), efficientnet.MBConvConfig(4, 5, 2, 8, 8, 2)], 0.0, 0.0,
            num_classes=CLASSES, last_channel=16)),
        row("tv/shufflenet", lambda: shufflenetv2.ShuffleNetV2([1, 2, 1], [8, 8, 16, 16, 32], num_classes=CLASSES)),
        row("tv/fire", lambda: nn.Sequential(squeezenet.Fire(3, 2, 4, 4), squeezenet.Fire(8, 2, 4, 4), nn.Flatten(1),
            nn.Linear(8 * 64, CLASSES)), 8),
        row("tv/vgg", vgg),
        row("tv/inception", lambda: nn.Sequential(BasicConv2d(3, 8, kernel_size=3),
            Inception(8, 4, 4, 8, 2, 4, 4), inception.InceptionA(20, 4), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(228, CLASSES)), 16),
        row("tv/regnet", lambda: RegNet(
            BlockParams([1, 1], [8, 16], [4, 4], [2, 2], [1, 1], 0.25), num_classes=CLASSES, stem_width=4)),
        row("tv/convnext", lambda: ConvNeXt(
            [CNBlockConfig(4, 8, 1), CNBlockConfig(8, None, 1)], stochastic_depth_prob=0.0, num_classes=CLASSES),
            train=True),
        row("tv/vit", lambda: vision_transformer.VisionTransformer(8, 4, 2, 2, 16, 24, num_classes=CLASSES), 8,
            train=True),
        row("tv/vit-outside", lambda: vision_transformer.VisionTransformer(8, 4, 2, 2, 16, 24, num_classes=CLASSES), 8,
            outside=True),
        row("tv/swin", lambda: swin_transformer.SwinTransformer(
            [2, 2], 8, [2, 1], [2, 2], [2, 2], stochastic_depth_prob=0.0, num_classes=CLASSES), 16, train=True),
        row("tv/swin-v2", lambda: swin_transformer.SwinTransformer(
            [2, 2], 8, [2, 1], [2, 2], [2, 2], stochastic_depth_prob=0.0, num_classes=CLASSES,
            block=swin_transformer.SwinTransformerBlockV2, downsample_layer=swin_transformer.PatchMergingV2), 16),
        row("tv/maxvit", lambda: MaxVit((16, 16), 8, 2, [8], [1], 4, 0.0, num_classes=CLASSES), 16),
        row("tv/fcn-outside", Segmenter, 16, outside=True),
    ]  # fmt: skip


class Segmenter(nn.Module):
    """A fully convolutional head on one convolution, resized back to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.head = torchvision.models.segmentation.fcn.FCNHead(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(self.head(self.stem(x)), size=x.shape[-2:], mode="bilinear", align_corners=False)


def timm_models() -> list[Program]:
    from timm.layers import BlurPool2d, GatedMlp, GroupNormAct, StdConv2d
    from timm.models._efficientnet_builder import decode_arch_def
    from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
    from timm.models.convnext import ConvNeXt
    from timm.models.efficientnet import EfficientNet
    from timm.models.focalnet import FocalNet
    from timm.models.ghostnet import GhostNet
    from timm.models.metaformer import MetaFormer
    from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock, SpatialGatingBlock
    from timm.models.res2net import Bottle2neck
    from timm.models.resnet import BasicBlock, Bottleneck, ResNet
    from timm.models.resnetv2 import ResNetV2
    from timm.models.sknet import SelectiveKernelBasic

    vit = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    swin = {"img_size": 16, "patch_size": 2, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4,
            "drop_path_rate": 0.0}  # fmt: skip
    mixer = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "num_blocks": 2, "num_classes": CLASSES}
    narrow = {"channels": (8, 16, 16, 16), "stem_width": 8, "num_classes": CLASSES}
    staged = {"depths": (1, 1, 1, 1), "dims": (4, 8, 8, 8)}

    def res(block: Any, **options: Any) -> Callable[[], nn.Module]:
        return lambda: ResNet(block, (1, 1, 1, 1), **{**narrow, **options})

    def blocks(arch: list[list[str]]) -> nn.Module:
        args = decode_arch_def(arch)
        return EfficientNet(args, CLASSES, num_features=16, stem_size=8, round_chs_fn=lambda c, **_: c)

    def bit() -> nn.Module:
        norm = partial(GroupNormAct, num_groups=4)
        return ResNetV2((1, 1), (32, 64), num_classes=CLASSES, stem_chs=16, conv_layer=StdConv2d, norm_layer=norm)

    return [
        row("timm/resnet", res(BasicBlock)),
        row("timm/resnet-blur", res(BasicBlock, aa_layer=BlurPool2d)),
        row("timm/seresnet", res(BasicBlock, block_args={"attn_layer": "se"})),
        row("timm/ecaresnet", res(BasicBlock, block_args={"attn_layer": "eca"})),
        row("timm/resnet-deep-stem", res(Bottleneck, stem_type="deep", avg_down=True, channels=(4, 8, 8, 8))),
        row("timm/res2net", res(Bottle2neck, base_width=32, block_args={"scale": 4}, channels=(8, 8, 8, 8))),
        row("timm/sknet", res(SelectiveKernelBasic, channels=(16, 32, 32, 32))),
        row("timm/bit", bit, train=True),
        row("timm/bit-outside", bit, outside=True),
        row("timm/nfnet", tm("nf_resnet26", channels=(16, 16, 32, 32), stem_chs=16)),
        row("timm/nfnet-scaled", tm("nfnet_l0", channels=(32, 32), depths=(1, 1), group_size=8, stem_chs=16,
            num_features=32)),
        row("timm/convnext", lambda: ConvNeXt(num_classes=CLASSES, **staged), train=True),
        row("timm/convnext-v2", lambda: ConvNeXt(num_classes=CLASSES, use_grn=True, ls_init_value=None, **staged),
            train=True),
        row("timm/vit", tm("vit_tiny_patch16_224", **vit), 16, train=True),
        row("timm/vit-outside", tm("vit_tiny_patch16_224", **vit), 16, outside=True),
        row("timm/vit-gap-scale", tm("vit_tiny_patch16_224", init_values=0.1, class_token=False, global_pool="avg",
            qk_norm=True, **vit), 16, train=True),
        row("timm/vit-relpos", tm("vit_relpos_small_patch16_224", **vit), 16),
        row("timm/eva", tm("eva02_tiny_patch14_224", **vit), 16, train=True),
        row("timm/deit-distilled", tm("deit_tiny_distilled_patch16_224", **vit), 16),
        row("timm/beit", tm("beit_base_patch16_224", **vit), 16, train=True),
        row("timm/swin", tm("swin_tiny_patch4_window7_224", **swin), 16, train=True),
        row("timm/swin-v2", tm("swinv2_tiny_window8_256", **swin), 16, train=True),
        row("timm/mixer", lambda: MlpMixer(**mixer), 16, train=True),
        row("timm/gmlp", lambda: MlpMixer(
            block_layer=SpatialGatingBlock, mlp_ratio=2, mlp_layer=GatedMlp, **mixer), 16, train=True),
        row("timm/resmlp", lambda: MlpMixer(block_layer=ResBlock, mlp_ratio=2, norm_layer=Affine, **mixer), 16,
            train=True),
        row("timm/cait", tm("cait_xxs24_224", **vit), 16, train=True),
        row("timm/coat", tm("coat_lite_tiny", img_size=32, embed_dims=(16, 16, 16, 16), serial_depths=(1, 1, 1, 1),
            num_heads=8)),
        row("timm/mobilenet", lambda: blocks([["ds_r1_k3_s1_c8_se0.25_nhs"], ["ir_r1_k5_s2_e2_c16_se0.25"]])),
        row("timm/fused-mixed", lambda: blocks([["er_r1_k3_s1_e2_c8"], ["ir_r1_k3.5_s1_e2_c8"]])),
        row("timm/condconv", lambda: blocks([["ir_r1_k3_s1_e2_c8_cc2"]])),
        row("timm/ghostnet", lambda: GhostNet([[[3, 16, 16, 0, 1]], [[3, 24, 16, 0.25, 2]]], CLASSES, 0.5)),
        row("timm/repvgg", lambda: ByobNet(
            ByoModelCfg((ByoBlockCfg("rep", 1, 8, 1), ByoBlockCfg("rep", 2, 8, 2)), stem_type="3x3", stem_chs=8),
            num_classes=CLASSES)),
        row("timm/poolformer", lambda: MetaFormer(num_classes=CLASSES, **staged), train=True),
        row("timm/focalnet", lambda: FocalNet(
            num_classes=CLASSES, embed_dim=4, depths=(1, 1), drop_path_rate=0.0), train=True),
    ]  # fmt: skip


def programs() -> list[Program]:
    """All of the family."""
    return [*torchvision_models(), *timm_models()]
