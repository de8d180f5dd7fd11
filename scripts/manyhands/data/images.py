"""Images: small sets of labelled pictures, and where they come from.

    "embedded"          1,797 digits of 8 x 8 pixels, written by people; they come with scikit-learn
    "mnist"             70,000 digits of 28 x 28 pixels, which scripts/prepare_data.py has fetched
    "fashion-mnist"     as many pictures of clothes, of the same size and fetched in the same way
    a folder            four files in the idx format, named like MNIST's

All pixels are between 0 and 1. A set is small enough to lie in memory whole.
Sources: E. Alpaydin and C. Kaynak 1998, https://doi.org/10.24432/C50P49 (the digits);
https://yann.lecun.org/exdb/mnist/ (MNIST and the idx format); Xiao, Rasul and Vollgraf 2017, arXiv
1708.07747 (Fashion-MNIST).
"""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.data.corpus import fetched, program
from manyhands.ranks.failures import BadInput

HUB: Mapping[str, tuple[str, None]] = {
    "mnist": ("ylecun/mnist", None),
    "fashion-mnist": ("zalando-datasets/fashion_mnist", None),
}
NUM_TEST_DIGITS = 500
FILES = {"train": "train", "test": "t10k"}  # a part -> how the names of its two files begin
UNSIGNED_BYTE = 8  # the idx format's number for this type of value


class Images(NamedTuple):
    """A labelled set in two parts, for training and for testing."""

    train_inputs: Tensor  # (N, 1, height, width) float32, 0 to 1
    train_labels: Tensor  # (N,) int64, 0 .. num_classes - 1
    test_inputs: Tensor
    test_labels: Tensor
    num_classes: int
    name: str
    note: str  # which data this is, in one line

    def to(self, device: torch.device) -> "Images":
        """The same set with its tensors on a device."""
        return Images(*(part.to(device) for part in self[:4]), *self[4:])


def load(data: str) -> Images:
    """Read a set of images.

    Args:
        data: "embedded", a name in HUB, or a folder with idx files (also packed with gzip).

    Raises:
        BadInput: the data is not there, or a file is missing or damaged.
    """
    if data == "embedded":
        return _digits()
    if data in HUB:
        folder = fetched(data)
        try:
            return _read(folder)
        except BadInput as problem:
            again = f"delete {folder} and run `{program('prepare_data.py', '--data', data)}`"
            raise BadInput(f"{problem}; for {data}, {again} where there is internet") from None
    folder = Path(os.path.expanduser(data))
    if not folder.is_dir():
        known = ", ".join(["embedded", *HUB])
        raise BadInput(
            f"there is no folder {data}: give one with MNIST's four idx files, or one of {known}"
        )
    return _read(folder)


def idx_file(values: Tensor) -> bytes:
    """Return what an idx file holds for `values`, uint8 of shape (N,) or (N, height, width)."""
    kind = UNSIGNED_BYTE << 8 | values.dim()
    return struct.pack(f">i{values.dim()}i", kind, *values.shape) + values.numpy().tobytes()


def _read(folder: Path) -> Images:
    """The set in a folder with idx files."""
    parts = [_part(folder, name) for name in FILES.values()]
    (train, train_labels), (test, test_labels) = parts
    if train.shape[1:] != test.shape[1:]:
        shapes = f"{_size(train)} and {_size(test)} pixels"
        raise BadInput(f"{folder}: the images to train and to test on have {shapes}")
    num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    return _with_note(folder.name, train, train_labels, test, test_labels, num_classes)


def _digits() -> Images:
    """The digits, with the same 500 of them kept for testing every time."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)[order]
    train = slice(NUM_TEST_DIGITS, None)
    test = slice(NUM_TEST_DIGITS)
    return _with_note(
        "embedded digits", inputs[train], labels[train], inputs[test], labels[test], 10
    )


def _with_note(name: str, *parts: Tensor | int) -> Images:
    train, _, test, _, num_classes = parts
    note = f"data: {name}, {len(train):,} images to train and {len(test):,} to test on, "
    return Images(*parts, name=name, note=f"{note}{_size(train)} pixels, {num_classes} classes")


def _size(inputs: Tensor) -> str:
    return " x ".join(str(side) for side in inputs.shape[2:])


def _part(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """The images and labels of `train` or `t10k`."""
    pixels = _idx(folder, f"{name}-images-idx3-ubyte", num_dims=3)
    labels = _idx(folder, f"{name}-labels-idx1-ubyte", num_dims=1)
    if len(pixels) != len(labels) or not len(pixels):
        raise BadInput(f"{folder}: {len(pixels)} {name} images but {len(labels)} labels")
    return pixels[:, None].float() / 255, labels.long()


def _idx(folder: Path, name: str, num_dims: int) -> Tensor:
    """An idx file, packed or not: 4 bytes of type, 4 for each dimension, then the values."""
    found = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not found:
        raise BadInput(f"{folder} holds no {name} or {name}.gz: name a folder with idx files")
    try:
        content = found[0].read_bytes()
        content = gzip.decompress(content) if found[0].suffix == ".gz" else content
        kind, *shape = struct.unpack_from(f">i{num_dims}i", content)
    except (OSError, EOFError, zlib.error, struct.error) as problem:
        raise BadInput(f"{found[0]} cannot be read ({problem}): fetch it again") from None
    values = content[4 * (1 + num_dims) :]
    if kind != UNSIGNED_BYTE << 8 | num_dims or len(values) != math.prod(shape) or not values:
        raise BadInput(
            f"{found[0]} is not an idx file of {num_dims} dimensions, or only a part of one: "
            "fetch it again"
        )
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).reshape(shape)
