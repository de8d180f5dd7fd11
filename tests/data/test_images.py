"""Sets of images: the embedded digits, MNIST's own files, idx files in general, and bad input.

What fetches a set by its name is tested in test_corpus.py, with all of prepare_data.
"""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from manyhands.data import corpus, images
from manyhands.data.images import Images
from manyhands.ranks.failures import BadInput

pytestmark = pytest.mark.fast

MNIST = Path(__file__).resolve().parents[3] / "shared" / "data" / "mnist"
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte") + (
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def check_form(data: Images, num_train: int, num_test: int, height: int, width: int) -> None:
    for inputs, labels, number in (
        (data.train_inputs, data.train_labels, num_train),
        (data.test_inputs, data.test_labels, num_test),
    ):
        assert inputs.shape == (number, 1, height, width) and inputs.dtype == torch.float32
        assert labels.shape == (number,) and labels.dtype == torch.int64
        assert inputs.min() == 0 and inputs.max() == 1
        assert 0 <= labels.min() and labels.max() < data.num_classes
    assert "\n" not in data.note
    for words in (f"{num_train:,} images to train", f"{num_test:,} to test", f"{height} x {width}"):
        assert words in data.note


# ---- the embedded digits -------------------------------------------------------------------------


def test_the_embedded_digits_are_scikit_learns_each_with_its_own_label():
    data, digits = images.load("embedded"), load_digits()
    check_form(data, 1297, 500, 8, 8)
    assert data.num_classes == 10
    wanted = sorted(zip(map(bytes, digits.images.astype(np.uint8)), digits.target, strict=True))
    inputs = torch.cat([data.train_inputs, data.test_inputs])
    labels = torch.cat([data.train_labels, data.test_labels])
    pixels = (inputs[:, 0] * 16).to(torch.uint8).numpy()
    assert sorted(zip(map(bytes, pixels), labels.tolist(), strict=True)) == wanted


def test_no_digit_is_in_both_parts_and_both_have_all_kinds():
    data = images.load("embedded")
    train = {bytes(image.numpy()) for image in data.train_inputs}
    test = {bytes(image.numpy()) for image in data.test_inputs}
    assert len(train) == 1297 and len(test) == 500 and not train & test
    for labels in (data.train_labels, data.test_labels):
        assert torch.bincount(labels, minlength=10).min() > len(labels) / 15


def test_the_parts_are_the_same_each_time_and_torchs_random_numbers_stay():
    torch.manual_seed(1)
    one = images.load("embedded")
    drawn = torch.rand(1)
    torch.manual_seed(2)
    other = images.load("embedded")
    assert all(torch.equal(a, b) for a, b in zip(one[:4], other[:4], strict=True))
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))


# ---- idx files -----------------------------------------------------------------------------------


def idx(values: np.ndarray) -> bytes:
    shape = values.shape
    return struct.pack(f">i{len(shape)}i", 8 << 8 | len(shape), *shape) + values.tobytes()


def parts(num_train: int = 9, num_test: int = 4, size: tuple[int, int] = (3, 5)) -> dict:
    """Name -> array of a small set."""
    draw = np.random.default_rng(1)
    arrays = []
    for number in (num_train, num_test):
        arrays.append(draw.integers(0, 256, (number, *size), dtype=np.uint8))
        arrays[-1].flat[:2] = 0, 255
        arrays.append((np.arange(number) % 3).astype(np.uint8))
    return dict(zip(NAMES, arrays, strict=True))


def write(folder: Path, packed: bool = False, **changes: np.ndarray) -> dict:
    """A set in `folder`; `changes` are arrays by the beginning of the name, such as t10k_labels."""
    arrays = parts()
    for start, array in changes.items():
        name = next(name for name in NAMES if name.startswith(start.replace("_", "-")))
        arrays[name] = array
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        content = idx(array)
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)
    return arrays


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_of_idx_files_packed_or_not(tmp_path, packed):
    arrays = write(tmp_path / "own", packed)
    data = images.load(str(tmp_path / "own"))
    check_form(data, 9, 4, 3, 5)
    assert data.num_classes == 3 and "own" in data.note
    for found, name in zip(data[:4], NAMES, strict=True):
        wanted = arrays[name] / 255 if "images" in name else arrays[name]
        assert np.allclose(found.numpy().reshape(wanted.shape), wanted, atol=1e-7)


@pytest.mark.parametrize("packed", [False, True])
def test_fashion_mnist_is_read_from_files_of_its_format(tmp_path, monkeypatch, packed):
    """Its publisher's four files: names, sizes and header bytes are those of MNIST, classes ten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "manyhands" / "fashion-mnist"
    folder.mkdir(parents=True)
    arrays = parts(20, 10, (28, 28))
    for name in NAMES[1::2]:
        arrays[name] = (np.arange(len(arrays[name])) % 10).astype(np.uint8)
    for name, array in arrays.items():
        magic = b"\0\0\x08\x03" if "images" in name else b"\0\0\x08\x01"
        sides = b"".join(number.to_bytes(4, "big") for number in array.shape)
        content = magic + sides + array.tobytes()
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)
    data = images.load("fashion-mnist")
    check_form(data, 20, 10, 28, 28)
    assert data.num_classes == 10 and "fashion-mnist" in data.note
    for found, name in zip(data[:4], NAMES, strict=True):
        wanted = arrays[name] / 255 if "images" in name else arrays[name]
        assert np.allclose(found.numpy().reshape(wanted.shape), wanted, atol=1e-7)


def test_a_home_folder_and_classes_that_only_the_test_set_has(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "set", t10k_labels=np.array([0, 7, 1, 2], dtype=np.uint8))
    assert images.load("~/set").num_classes == 8


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


TRAIN, LABELS = NAMES[:2]
DAMAGE = {  # words of the message -> what is done to a folder of files that are not packed
    "holds no train-images-idx3-ubyte": lambda folder: (folder / TRAIN).unlink(),
    "holds no t10k-labels-idx1-ubyte": lambda folder: (folder / NAMES[3]).unlink(),
    "only a part of one": lambda folder: cut(folder / TRAIN, 100),
    "train-images-idx3-ubyte cannot be read": lambda folder: cut(folder / TRAIN, 7),
    "train-labels-idx1-ubyte cannot be read": lambda folder: (folder / LABELS).write_bytes(b""),
    "not an idx file of 1 dimensions": lambda folder: (folder / LABELS).write_bytes(
        (folder / TRAIN).read_bytes()
    ),
    "train-labels-idx1-ubyte is not an idx file": lambda folder: (folder / LABELS).write_text(
        "<html><head><title>404 Not Found</title></head></html>"
    ),
    "t10k-labels-idx1-ubyte is not": lambda folder: (folder / NAMES[3]).write_bytes(
        idx(parts()[NAMES[3]]) + b"more"
    ),
    "9 train images but 8 labels": lambda folder: write(
        folder, train_labels=np.zeros(8, dtype=np.uint8)
    ),
    "3 x 5 and 5 x 3 pixels": lambda folder: write(
        folder, t10k_images=np.zeros((4, 5, 3), dtype=np.uint8)
    ),
    "train-images-idx3-ubyte is not": lambda folder: write(
        folder, train_images=np.zeros((0, 3, 5), np.uint8), train_labels=np.zeros(0, np.uint8)
    ),
    "idx file of 3 dimensions": lambda folder: (folder / TRAIN).write_bytes(
        struct.pack(">4i", 0xD << 8 | 3, 9, 3, 5) + bytes(9 * 3 * 5 * 4)  # float numbers
    ),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_damage_is_told_in_one_line(tmp_path, words):
    write(tmp_path / "set")
    DAMAGE[words](tmp_path / "set")
    with pytest.raises(BadInput) as error:
        images.load(str(tmp_path / "set"))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [5, 40, -9, -1])
def test_a_packed_file_that_was_fetched_in_part(tmp_path, keep):
    write(tmp_path / "set", packed=True)
    cut(tmp_path / "set" / f"{TRAIN}.gz", keep)
    with pytest.raises(BadInput, match=r"train-images-idx3-ubyte\.gz cannot be read .*fetch it"):
        images.load(str(tmp_path / "set"))


@pytest.mark.parametrize("stretch", [slice(-8, -4), slice(10, 30)])  # the checksum; the content
def test_a_packed_file_with_bytes_of_something_else(tmp_path, stretch):
    write(tmp_path / "set", packed=True)
    path = tmp_path / "set" / f"{TRAIN}.gz"
    content = bytearray(path.read_bytes())
    content[stretch] = b"\xff" * len(content[stretch])
    path.write_bytes(content)
    with pytest.raises(BadInput, match="cannot be read") as error:
        images.load(str(tmp_path / "set"))
    assert "\n" not in str(error.value)


def test_no_folder_and_a_file_in_its_place(tmp_path):
    for name in ("nothing", "file"):
        (tmp_path / "file").touch()
        with pytest.raises(BadInput, match=f"there is no folder .*{name}: give one"):
            images.load(str(tmp_path / name))


# ---- sets by name --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", images.HUB)
def test_a_set_by_name_is_what_lies_in_the_cache(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BadInput) as error:
        images.load(name)
    assert str(error.value) == (
        f"the data set {name} is not on this machine: run "
        f"`{corpus.program('prepare_data.py', '--data', name)}` where there is internet (on a "
        "cluster the login node), or take --data FOLDER or --data embedded"
    )
    folder = tmp_path / "manyhands" / name
    folder.parent.mkdir()
    write(folder)
    data = images.load(name)
    check_form(data, 9, 4, 3, 5)
    assert data.note.startswith(f"data: {name}, 9 images")
    (folder / TRAIN).unlink()
    with pytest.raises(BadInput, match="holds no train-images-idx3-ubyte") as error:
        images.load(name)
    again = f"delete {folder} and run `{corpus.program('prepare_data.py', '--data', name)}`"
    assert again in str(error.value) and "\n" not in str(error.value)


def test_what_is_packed_is_read_back_the_same(tmp_path):
    arrays = write(tmp_path / "set")
    for name, array in arrays.items():
        assert images.idx_file(torch.from_numpy(array)) == (tmp_path / "set" / name).read_bytes()


# ---- MNIST ---------------------------------------------------------------------------------------


def test_mnist_itself():
    if not MNIST.is_dir():
        pytest.skip(f"MNIST's four files are not in {MNIST}")
    data = images.load(str(MNIST))
    check_form(data, 60_000, 10_000, 28, 28)
    assert data.num_classes == 10
    assert data.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.test_labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # as published
    assert torch.bincount(data.train_labels).tolist() == counts
    assert abs(data.train_inputs.mean() - 0.1307) < 1e-4
    assert abs(data.train_inputs.std() - 0.3081) < 1e-4
