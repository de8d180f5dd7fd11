"""The index of a sharded checkpoint, and whether its files are those that were written.

    {"format": ..., "files": {"rank-00000.pt": {"bytes", "sha256"}}, "values": {"step": 7},
     "tensors": {"model/w": {"shape", "dtype", "pieces": [{"offset", "size", "file"}]}},
     "sha256": ...}    of the rest of the index

It is read before any file of tensors, and says all that one has to know to find a number again.
Price: a few hundred bytes a piece.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from manyhands.saving.store import Store

FORMAT = "manyhands checkpoint 1"
INDEX = "index.json"


def read_index(store: Store) -> dict:
    """The index of a complete checkpoint.

    Raises:
        ValueError: there is none, it has another format, or it is damaged.
    """
    index = store.read_json(INDEX)
    if index.get("format") != FORMAT:
        raise ValueError(f"{store.address} has another format ({index.get('format')})")
    written = {name: part for name, part in index.items() if name != "sha256"}
    if index.get("sha256") != sealed(written)["sha256"]:
        raise ValueError(f"{store.address}/{INDEX} is damaged: its SHA-256 is not its own")
    return index


def sealed(index: Mapping) -> dict:
    """An index with the sum of its content, which tells a damaged one from the one written."""
    content = json.dumps(index, sort_keys=True).encode()
    return {**index, "sha256": hashlib.sha256(content).hexdigest()}


def damage(store: Store, rank: int = 0, num_ranks: int = 1) -> str:
    """What is wrong with a checkpoint, in words, or "".

    It reads every file once, or of `num_ranks` that share the work this rank's part of the files.
    """
    try:
        index = read_index(store)
    except ValueError as problem:
        return str(problem)
    for file in sorted(index["files"])[rank::num_ranks]:
        if found := _differs(store, file, index["files"][file]):
            return found
    return ""


def read_file(store: Store, file: str, expected: Mapping) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU, after its sum was found to be the index's.

    Raises:
        ValueError: it is missing or damaged.
    """
    if found := _differs(store, file, expected):
        raise ValueError(found)
    with store.open(file) as opened:
        return torch.load(opened, map_location="cpu", weights_only=True)


def _differs(store: Store, file: str, expected: Mapping) -> str:
    found = store.sums(file)
    if found == expected:
        return ""
    if found is None:
        return f"{store.address}/{file} is missing"
    if found["bytes"] != expected["bytes"]:
        return f"{store.address}/{file} has {found['bytes']:,} of {expected['bytes']:,} bytes"
    return f"{store.address}/{file} is damaged: its SHA-256 is not the index's"


def describe(writers: Mapping, shapes: Mapping, types: Mapping) -> dict[str, dict]:
    """The index's part on tensors."""
    tensors = {
        name: {"shape": list(shape), "dtype": types[name], "pieces": []}
        for name, shape in shapes.items()
    }
    for (name, box), rank in writers.items():
        stored = {"offset": box.offset, "size": box.size, "file": file_of(rank)}
        tensors[name]["pieces"].append(stored)
    return tensors


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.pt"


def key_of(name: str, offset: Sequence[int]) -> str:
    """What a stored box is called in its file: "model/w 3,0"."""
    return f"{name} {','.join(map(str, offset))}"
