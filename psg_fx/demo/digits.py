"""scikit-learn's bundled digits with some labels made wrong, and a small CNN for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

TRAIN = 1536
"""Training samples, a multiple of the batch size so that every step has the same shapes; the rest is for testing."""


@dataclass(frozen=True)
class Digits:
    """Images `[N, 1, 8, 8]` in [0, 1], the labels given and the true ones `[N]`, and clean test data."""

    images: Tensor
    given: Tensor
    true: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def corrupted(self) -> Tensor:
        """Which given labels are wrong, `[N]` of bool."""
        return self.given != self.true


def corrupted_digits(fraction: float, seed: int) -> Digits:
    """The digits in an order drawn from `seed`, with `fraction` of the training labels moved to another class."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=draw)
    images, labels = images[order], labels[order]
    wrong = torch.randperm(TRAIN, generator=draw)[: round(fraction * TRAIN)]
    given = labels[:TRAIN].clone()
    given[wrong] = (given[wrong] + torch.randint(1, 10, (len(wrong),), generator=draw)) % 10
    return Digits(images[:TRAIN], given, labels[:TRAIN], images[TRAIN:], labels[TRAIN:])


class DigitsCNN(nn.Module):
    """Two 3x3 convolutions, a pool, two linear layers: images `[B, 1, 8, 8]` -> logits `[B, 10]`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """`[B, 1, 8, 8]` -> `[B, 10]`."""
        h = F.relu(self.conv1(images))
        h = F.max_pool2d(F.relu(self.conv2(h)), 2)
        h = F.relu(self.fc1(torch.flatten(h, 1)))
        return self.fc2(h)  # type: ignore[no-any-return]
