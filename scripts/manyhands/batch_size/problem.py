"""What a sweep trains: data in two parts, and a model with its first weights.

    data  --> training part, on which every step is made
          '-> validation part, on which learning rates and stopping points are chosen
    model: "mlp" or "cnn" for images, "transformer" for text

The model gives scores for each label, and its accuracy is the share of labels whose score is the
highest. An image has one label. A sequence has one at each position, the next character. So one
loop trains all three. None of the models has batch norm, which would make a batch of one differ in
kind from the others. The test images of a set are not used: they stay for a final, honest number.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

HIDDEN = 32  # units of the MLP
CHANNELS = 8  # of the CNN's first layer
SHARE = 4  # one of so many training images is kept for validation,
MOST = 2000  # but no more than these


class Labelled(Protocol):
    """What `images.load` gives: inputs (N, 1, height, width), labels (N,), and their name."""

    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    num_classes: int
    name: str


class Blocks(Protocol):
    """What `corpus.load` gives: blocks of a text in two parts, and its name.

    Item i of a part is a pair (inputs, targets), each (T,) int64.
    """

    train: Dataset
    valid: Dataset
    name: str


class Problem(NamedTuple):
    """Data in two parts, and how to make the model that learns it."""

    train_inputs: Tensor  # (N, 1, height, width) of images, (N, T) of text
    train_labels: Tensor  # (N,) or (N, T), int64
    valid_inputs: Tensor
    valid_labels: Tensor
    build: Callable[[], nn.Module]
    every: int  # steps from one evaluation to the next, with batches of 16 or more
    note: str

    def to(self, device: torch.device) -> "Problem":
        """The same with its tensors on a device."""
        return Problem(*(part.to(device) for part in self[:4]), *self[4:])


def of_images(data: Labelled, model: str = "mlp") -> Problem:
    """Classify images with "mlp" or "cnn"; the last of the training images are for validation."""
    num_valid = min(MOST, len(data.train_inputs) // SHARE)
    num_train = len(data.train_inputs) - num_valid
    _, _, height, width = data.train_inputs.shape
    make = {"mlp": mlp, "cnn": cnn}[model]
    sizes = f"{num_train:,} images to train on and {num_valid:,} for validation"
    return Problem(
        data.train_inputs[:num_train],
        data.train_labels[:num_train],
        data.train_inputs[num_train:],
        data.train_labels[num_train:],
        build=partial(make, height, width, data.num_classes),
        every={"mlp": 1, "cnn": 5}[model],
        note=f"data: {data.name}, {sizes}, {height} x {width} pixels; model: {model}",
    )


def of_text(text: Blocks, build: Callable[[], nn.Module]) -> Problem:
    """Predict the next character at each position of a sequence, with the model that is built."""
    train_inputs, train_labels = _stacked(text.train)
    valid_inputs, valid_labels = _stacked(text.valid)
    block = train_inputs.shape[1]
    sizes = f"{len(train_inputs):,} sequences to train on and {len(valid_inputs):,} for validation"
    return Problem(
        train_inputs,
        train_labels,
        valid_inputs,
        valid_labels,
        build=build,
        every=5,
        note=f"data: {text.name} text, {sizes}, {block} characters each; model: transformer",
    )


def _stacked(blocks: Dataset) -> tuple[Tensor, Tensor]:
    """The inputs (N, T) and the targets (N, T) of all blocks."""
    pairs = [blocks[number] for number in range(len(blocks))]
    inputs, targets = zip(*pairs, strict=True)
    return torch.stack(inputs), torch.stack(targets)


def mlp(height: int, width: int, num_classes: int) -> nn.Module:
    """One hidden layer: images (B, 1, height, width) to scores (B, num_classes)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(height * width, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, num_classes),
    )


def cnn(height: int, width: int, num_classes: int) -> nn.Module:
    """Two convolutions, each of which halves the sides; shapes as in `mlp`."""
    num_left = -(-height // 4) * -(-width // 4)  # pixels, rounded up twice
    return nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * CHANNELS * num_left, num_classes),
    )
