"""Which of a folder's files are for training, for validation and for the test.

    ptb.train.txt   dev.txt   test_corpus.txt      by the words in their names
    a.txt           b.txt                          no such word: one text, cut 90 / 5 / 5
    train.txt       notes.txt                      refused: is notes.txt one of them?

What chose the weights cannot judge them: a text that is called test is never trained on. Where
names leave a doubt, --splits settles it, as "train=a*.txt,test=b.txt" or "joined".
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from manyhands.ranks.failures import BadInput

SPLITS = ("train", "validation", "test")
PAIRS = (("train", "valid"), ("train", "test"), ("valid", "test"))  # where not all three are there
SUFFIXES = (".txt", ".tokens", ".raw")
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")  # of a file's name
WORDS = {  # what a word in a name says; also with what KINDS add, as in trainset.txt
    "train": ("train", "training"),
    "valid": ("val", "valid", "validation", "dev", "development"),
    "test": ("test", "testing"),
}
KINDS = ("", "set", "data", "text", "corpus", "split")
JOINED = "joined"
SHOWN = 3  # names in a line


def read_splits(path: Path, splits: str = "") -> tuple[dict[str, str], str]:
    """The text of each of SPLITS in a folder or file, and how they were found.

    Where one text has to serve for validation and test, its first half is for validation.

    Args:
        splits: "" goes by the names, "joined" takes all as one text, and train=PATTERN,... names
            the files of train, valid and test.

    Raises:
        BadInput: nothing there is text, or it cannot be told what it is for.
    """
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    texts = [file for file in found if file == path or file.suffix in SUFFIXES]
    plain = [file for file in texts if file == path or file.suffix == ".txt"]
    files = _named(path, texts, splits) if path.is_dir() and splits != JOINED else {}
    if not files:
        if not plain:
            raise BadInput(
                f"no .txt file among the {len(found)} entries of {path}: give another --data"
            )
        return _cut(path, plain)
    where = f"folder {path.resolve().name}"
    names = {split: " + ".join(file.name for file in own) for split, own in files.items()}
    if len(files) == len(SPLITS):
        parts = dict(zip(SPLITS, map(join, (files[name] for name in WORDS)), strict=True))
        words = f"train on {names['train']}, validate on {names['valid']}, test on {names['test']}"
    else:
        train, other = next(pair for pair in PAIRS if files.keys() == set(pair))
        parts = _halved(join(files[train]), join(files[other]))
        words = f"train on {names[train]}, validate on the first half of {names[other]}, test "
        words += "on its second half"
        if train == "valid":
            words += " (there is no train file: not comparable with published perplexities)"
    if unused := [file for file in texts if file not in sum(files.values(), [])]:
        words += f", leave out {_listed(unused)}"
    return parts, f"{where}, {words}, {_counts(parts)}"


def _named(path: Path, files: Sequence[Path], splits: str) -> dict[str, list[Path]]:
    """The files of train, valid and test, of those that have some; {} where all are one text."""
    if splits:
        return _given(path, files, splits)
    says = {file: {split for split in WORDS if _says(file, split)} for file in files}
    found = {split: [file for file in files if says[file] == {split}] for split in WORDS}
    found = {split: own for split, own in found.items() if own}
    unclear = [file for file in files if len(says[file]) > 1]
    unnamed = [file for file in files if not says[file] and file.suffix == ".txt"]
    if unclear:
        raise _doubt(path, f"{_listed(unclear)} names more than one")
    if len(found) > 1:
        return found
    if not found or list(found) == ["train"] and not unnamed:
        return {}  # a text that is called train and has to serve for all
    split, own = next(iter(found.items()))
    others = f"and {_listed(unnamed)} nothing" if unnamed else "and nothing is for the others"
    raise _doubt(path, f"{_listed(own)} says {split}, {others}")


def _given(path: Path, files: Sequence[Path], splits: str) -> dict[str, list[Path]]:
    """The files that --splits names."""
    given = dict(pair.partition("=")[::2] for pair in splits.split(","))
    if not 2 <= len(given) or given.keys() - WORDS.keys() or not all(given.values()):
        raise BadInput(
            f"--splits is {splits!r}: take {JOINED}, or name files for two or three of train, "
            "valid and test, as train=a*.txt,test=b.txt"
        )
    found = {name: [file for file in files if fnmatch(file.name, given[name])] for name in given}
    for name, own in found.items():
        if not own:
            raise BadInput(f"--splits {name}={given[name]}: no such text file in {path}")
    taken = sum(found.values(), [])
    if twice := [file for file in files if taken.count(file) > 1]:
        raise BadInput(f"--splits {splits}: {_listed(twice)} would be in two of them")
    return found


def _says(file: Path, split: str) -> bool:
    words = {word.lower() for word in WORD.findall(file.stem)}
    return any(word + kind in words for word in WORDS[split] for kind in KINDS)


def _doubt(path: Path, why: str) -> BadInput:
    return BadInput(
        f"{path}: which file is for training, for validation and for the test? {why}. Take names "
        f"as train.txt, valid.txt and test.txt, or --splits train=PATTERN,valid=PATTERN,"
        f"test=PATTERN, or --splits {JOINED} to cut all of them as one text"
    )


def _listed(files: Sequence[Path]) -> str:
    names = ", ".join(file.name for file in files[:SHOWN])
    return names + (f" and {len(files) - SHOWN} more" if len(files) > SHOWN else "")


def _cut(path: Path, files: Sequence[Path]) -> tuple[dict[str, str], str]:
    """One text, cut in three."""
    text = join(files)
    cut = len(text) * 9 // 10
    kind = f"folder {path.resolve().name}" if path.is_dir() else f"file {path.resolve().name}"
    names = f" ({_listed(files)})" if len(files) > 1 else ""
    source = f"{kind}{names}, {len(text):,} characters"
    words = "first 90% train / next 5% validation / last 5% test"
    return _halved(text[:cut], text[cut:]), f"{source}, {words}"


def _halved(train: str, rest: str) -> dict[str, str]:
    """Three splits of two texts: the second is cut in the middle."""
    half = len(rest) // 2
    return dict(zip(SPLITS, (train, rest[:half], rest[half:]), strict=True))


def _counts(texts: Mapping[str, str]) -> str:
    """How long the texts are: "100 / 10 / 10 characters"."""
    return " / ".join(f"{len(text):,}" for text in texts.values()) + " characters"


def join(files: Sequence[Path]) -> str:
    """The text of the files, one after the other."""
    texts = []
    for file in files:
        data = file.read_bytes()
        if b"\0" in data:
            where = data.index(b"\0")
            raise BadInput(f"{file} is no text: its byte {where:,} is zero. Leave the file out")
        try:
            texts.append(data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise BadInput(
                f"{file} is no UTF-8 text, see its byte {error.start:,}: convert it or leave it out"
            ) from None
    text = "".join(texts)
    if not text:
        raise BadInput(f"{', '.join(map(str, files))}: empty. Give a --data that holds text")
    return text
