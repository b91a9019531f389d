"""Image models: a small CNN, a residual network with GroupNorm, a vision transformer."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx.zoo.block import TransformerBlock

Stem = Literal["imagenet", "cifar"]


class SimpleCNN(nn.Module):
    """The CNN of the per-sample-gradients tutorial of torch.func, without its dropout.

    Images `[B, 1, S, S]` -> log-probabilities `[B, classes]`; at the default S = 28 the flattened features are 9216.
    """

    def __init__(self, *, image: int = 28, width: int = 32, hidden: int = 128, classes: int = 10) -> None:
        super().__init__()
        if image < 6:
            raise ValueError(f"image must be at least 6 pixels wide for two 3x3 convolutions and a pool, got {image}")
        side = (image - 4) // 2
        self.conv1 = nn.Conv2d(1, width, 3)
        self.conv2 = nn.Conv2d(width, 2 * width, 3)
        self.fc1 = nn.Linear(2 * width * side * side, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        """`[B, 1, S, S]` -> `[B, classes]`."""
        h = F.relu(self.conv1(images))
        h = F.relu(self.conv2(h))
        h = F.max_pool2d(h, 2)
        h = torch.flatten(h, 1)
        h = F.relu(self.fc1(h))
        return F.log_softmax(self.fc2(h), dim=1)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm and a residual path: `[B, in, H, W]` -> `[B, out, H/stride, W/stride]`."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.GroupNorm(groups, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """`[B, in, H, W]` -> `[B, out, H/stride, W/stride]`."""
        h = F.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return F.relu(h + self.shortcut(x))


class ResNetGN(nn.Module):
    """A ResNet of basic blocks with GroupNorm for BatchNorm; the defaults are ResNet18's.

    Images `[B, 3, S, S]` -> logits `[B, classes]`. `stem="imagenet"` starts with a 7x7 convolution of stride 2 and a
    max-pool, `stem="cifar"` with a 3x3 convolution of stride 1.
    """

    def __init__(
        self,
        *,
        width: int = 64,
        blocks: tuple[int, ...] = (2, 2, 2, 2),
        groups: int = 32,
        classes: int = 10,
        stem: Stem = "imagenet",
    ) -> None:
        super().__init__()
        if stem not in ("imagenet", "cifar"):
            raise ValueError(f"stem must be 'imagenet' or 'cifar', got {stem!r}")
        self.pool: nn.Module = nn.Identity()
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
            self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, width)
        stages: list[nn.Module] = []
        channels = width
        for depth, count in enumerate(blocks):
            outputs = width * 2**depth
            for index in range(count):
                stride = 2 if depth > 0 and index == 0 else 1
                stages.append(BasicBlock(channels, outputs, stride, groups))
                channels = outputs
        self.blocks = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """`[B, 3, S, S]` -> `[B, classes]`."""
        h = self.pool(F.relu(self.norm1(self.conv1(images))))
        h = self.blocks(h)
        h = torch.flatten(F.adaptive_avg_pool2d(h, 1), 1)
        return self.fc(h)  # type: ignore[no-any-return]


class VisionBlock(TransformerBlock):
    """A transformer block without a mask."""

    def attend(self, qkv: Tensor) -> Tensor:
        """`[B, T, 3 D]` -> `[B, heads, T, D/heads]`."""
        b, t, _ = qkv.shape
        q, k, v = qkv.reshape(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v)


class VisionTransformer(nn.Module):
    """A vision transformer with a class token: images `[B, 3, S, S]` -> logits `[B, classes]`."""

    def __init__(
        self,
        *,
        image: int = 32,
        patch: int = 4,
        layers: int = 6,
        width: int = 192,
        heads: int = 3,
        classes: int = 10,
    ) -> None:
        super().__init__()
        if image % patch or width % heads:
            raise ValueError(f"patch={patch} must divide image={image}, and heads={heads} must divide width={width}")
        tokens = (image // patch) ** 2 + 1
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.blocks = nn.Sequential(*(VisionBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """`[B, 3, S, S]` -> `[B, classes]`."""
        h = self.patches(images).flatten(2).transpose(1, 2)
        h = torch.cat([self.class_token.expand(h.shape[0], -1, -1), h], dim=1) + self.position
        h = self.norm(self.blocks(h))
        return self.head(h[:, 0])  # type: ignore[no-any-return]
