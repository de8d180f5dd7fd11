"""Text: where it comes from, how it becomes tokens, and how tokens become a training set.

    name or path --> text of three splits --> tokenizer --> tokens (N,) --> Blocks of T tokens

    train       the weights are learned from it
    validation  chooses among the checkpoints of a run
    test        read once, at the end: what chose the weights cannot judge them

Three sources need no internet: the embedded text below, a folder of text files, and a set that
`scripts/prepare_data.py` has fetched before. Tokens are characters, or byte pairs (Sennrich et al.
2016, arXiv 1508.07909, on bytes as in GPT-2, Radford et al. 2019, section 2.2).

The embedded text has a known floor. A seeded grammar writes each sentence by a few independent,
equally likely choices. A sentence can be read back into its choices in one way only, so its
probability is exactly the product of theirs, and the surprise of an average sentence is the sum of
the logarithms of the numbers of choices. Divided by the average length that is the entropy rate, in
nats per character. No model's expected loss is below it, however large the model: nobody guesses a
fair die better than chance. A model that sees T characters must also guess what the text before
them was about, so it stays a little above. Source: Shannon 1948, sections 6 and 7.
"""

import hashlib
import json
import math
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset

from manyhands.data.splits import read_splits
from manyhands.ranks.failures import BadInput

if TYPE_CHECKING:
    import tokenizers

HUB: Mapping[str, tuple[str, str]] = {"wikitext-2": ("Salesforce/wikitext", "wikitext-2-raw-v1")}
HUB_FILES = ("train.txt", "validation.txt", "test.txt")
TOPICS = (  # name, who, what they do, with what
    ("SEA", "sailor diver pilot", "haul tow mend", "boat net oar"),
    ("SHOP", "baker cook grocer", "roast cut pack", "pie bean cake"),
)
Rules = Mapping[str, Sequence[str]]


def grammar() -> Rules:
    """Return the rules of the embedded text: a symbol and the equally likely ways to write it.

    What is no symbol is a word. The first word settles the topic and the number, and with them the
    verb and its ending four words later and the things after that: what a model must remember.
    """
    rules: dict[str, list[str]] = {
        "SENTENCE": [],
        "NAME": [a + b + c for a in "bdghjklmnrv" for b in "aeio" for c in "lmnrst"],
        "COUNT": [str(count) for count in range(100, 1000)],
        "TIME": [f"{hour}:{minute:02}" for hour in range(1, 13) for minute in range(60)],
    }
    for topic, who, do, things in TOPICS:
        end = f"COUNT {topic}-THINGS at TIME"
        rules["SENTENCE"].append(f"{topic}-ONE NAME of NAME {topic}-DOES {end}")
        rules["SENTENCE"].append(f"{topic}-MANY NAME and NAME {topic}-DO {end}")
        rules[f"{topic}-ONE"] = who.split()
        rules[f"{topic}-DO"] = do.split()
        for symbol, words in (("MANY", who), ("DOES", do), ("THINGS", things)):
            rules[f"{topic}-{symbol}"] = [word + "s" for word in words.split()]
    return rules


def measure(rules: Rules, symbol: str) -> tuple[float, float]:
    """Return the entropy (nats) and the mean length (characters) of what `symbol` is written as."""
    if symbol not in rules:
        return 0.0, len(symbol) + 1.0  # with the space or the full stop after the word
    choices = rules[symbol]
    parts = [measure(rules, part) for choice in choices for part in choice.split()]
    entropy = math.log(len(choices)) + sum(nats for nats, _ in parts) / len(choices)
    return entropy, sum(length for _, length in parts) / len(choices)


def entropy_rate(rules: Rules) -> float:
    """Return the entropy rate of the grammar's text, in nats per character."""
    nats, length = measure(rules, "SENTENCE")
    return nats / (length + 1)  # the line's end


def write(rules: Rules, seed: str, num_characters: int) -> str:
    """Return independent sentences, one a line, of at least `num_characters` in all."""
    parts = {symbol: [choice.split() for choice in choices] for symbol, choices in rules.items()}
    choose = random.Random(seed).choice
    lines: list[str] = []
    while num_characters > 0:
        words = []
        todo = ["SENTENCE"]
        while todo:
            symbol = todo.pop()
            if symbol in parts:
                todo.extend(reversed(choose(parts[symbol])))
            else:
                words.append(symbol)
        lines.append(" ".join(words) + ".\n")
        num_characters -= len(lines[-1])
    return "".join(lines)


class Tokenizer(Protocol):
    """Turns text into numbers below `vocab_size`, and back."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def vocabulary(self) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class Characters:
    """One token for each character of `alphabet`."""

    alphabet: str

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet)

    @property
    def vocabulary(self) -> str:
        return self.alphabet

    def encode(self, text: str) -> list[int]:
        index = {character: i for i, character in enumerate(self.alphabet)}
        try:
            return [index[character] for character in text]
        except KeyError as error:
            raise BadInput(
                f"the character {error} is not among the {self.vocab_size} of this corpus: leave "
                "it out, or use a tokenizer that knows every text (--vocab 512)"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.alphabet[i] for i in ids)


@dataclass(frozen=True)
class BytePairs:
    """Tokens of one byte and more, merged by how often they meet; any text can be encoded."""

    model: "tokenizers.Tokenizer"

    @property
    def vocab_size(self) -> int:
        return self.model.get_vocab_size()

    @property
    def vocabulary(self) -> str:
        return json.dumps(sorted(self.model.get_vocab().items(), key=lambda item: item[1]))

    def encode(self, text: str) -> list[int]:
        lines = text.splitlines(keepends=True)  # one long string would take far more memory
        return [i for line in lines for i in self.model.encode(line).ids]

    def decode(self, ids: Iterable[int]) -> str:
        return self.model.decode([int(i) for i in ids])


def train_byte_pairs(text: str, vocab: int) -> BytePairs:
    """Learn at most `vocab` tokens from `text`, or take those learned from the same text before."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    key = hashlib.sha256(f"{vocab}\n{text}".encode()).hexdigest()
    # Whatever is wrong with the cache, the tokenizer can be made again; `from_str` raises a bare
    # Exception for a damaged file.
    with suppress(Exception):
        return BytePairs(Tokenizer.from_str((cache_folder() / f"{key}.json").read_text("utf-8")))
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    all_bytes = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=all_bytes, show_progress=False)
    model.train_from_iterator(text.splitlines(keepends=True), trainer)
    with suppress(OSError, BadInput):  # a cache that cannot be written costs time, no more
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            whole = Path(partial) / f"{key}.json"
            whole.write_text(model.to_str(), "utf-8")
            os.replace(whole, folder / whole.name)
    return BytePairs(model)


def cache_folder() -> Path:
    """Return the user's folder for tokenizers and fetched data: ~/.cache/manyhands as a rule."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manyhands"
    except RuntimeError:  # no HOME, and a user that the machine has no name for
        raise BadInput(
            f"user {os.getuid()} has no home folder for data: set XDG_CACHE_HOME to another folder"
        ) from None


def program(name: str, *flags: str) -> str:
    """A command that starts a program of scripts/ with this Python, from any folder.

    A bare `python` may be another one, without torch: the course's own stands in .venv as a rule.
    """
    return shlex.join([sys.executable, str(Path(__file__).parents[2] / name), *flags])


def fetched(name: str) -> Path:
    """Return the folder of a hub data set, text or images; BadInput where it was not fetched."""
    folder = cache_folder() / name
    if folder.is_file():
        raise BadInput(f"{folder} is a file where the data set {name} belongs: delete it")
    if not folder.is_dir():
        raise BadInput(
            f"the data set {name} is not on this machine: run "
            f"`{program('prepare_data.py', '--data', name)}` where there is internet (on a cluster "
            "the login node), or take --data FOLDER or --data embedded"
        )
    return folder


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """The tokens, cut into blocks; item i is (inputs, targets), each (T,) int64.

    Targets are the inputs' next tokens. Blocks do not overlap, so that in one pass each token but
    the first, and a tail shorter than T, is a target exactly once.
    """

    def __init__(self, tokens: Tensor, block: int) -> None:
        self.tokens = tokens
        self.block = block

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index * self.block
        stop = start + self.block
        return self.tokens[start:stop], self.tokens[start + 1 : stop + 1]


@dataclass(frozen=True)
class Corpus:
    """A text that is ready to train on."""

    name: str
    train: Blocks
    valid: Dataset[tuple[Tensor, Tensor]]  # blocks, or some of them
    test: Dataset[tuple[Tensor, Tensor]]  # likewise
    tokenizer: Tokenizer
    characters_per_token: float  # of the test text
    entropy_floor: float | None  # nats per token that no model can beat, where that is known
    note: str  # one line: which data, split, tokenizer and sizes are in use
    sha256: str  # of the tokens of all splits and of what they stand for

    def in_words(self, loss: float) -> str:
        """A test loss (nats per token) in the two units by which models are compared.

        Perplexity is per token, so it depends on the tokenizer; bits per character do not.
        """
        bits = loss / math.log(2) / self.characters_per_token
        return f"perplexity {math.exp(min(loss, 700)):.2f}, {bits:.3f} bits per character"


def load(data: str, block: int, vocab: int = 0, valid_tokens: int = 0, splits: str = "") -> Corpus:
    """Read or write the text that `data` names, and cut it into blocks.

    Args:
        data: "embedded", a name in HUB, a folder of text files, or one text file.
        block: tokens of a block.
        vocab: 0 for characters, else the number of byte pairs to learn from the training text.
        valid_tokens: most tokens to validate and to test on, in blocks spread evenly over the
            text; 0 for all.
        splits: which files of a folder are for what, where their names do not say so (splits.py).

    Raises:
        BadInput: there is no such text, it is no text, or it is shorter than a block.
    """
    if block < 1:
        raise BadInput(f"--block is {block}: a block holds at least 1 token")
    if vocab and vocab < 257:
        raise BadInput(f"--vocab is {vocab}: take 0 for characters, or 257 (256 bytes and more) up")
    name, texts, source = _texts(data, splits)
    tokenizer: Tokenizer = Characters("".join(sorted(set().union(*texts.values()))))
    kind = "characters"
    if vocab:
        tokenizer = train_byte_pairs(texts["train"], vocab)
        kind = "byte pairs learned from the train text"
    blocks = {}
    for split, text in texts.items():
        blocks[split] = Blocks(torch.tensor(tokenizer.encode(text), dtype=torch.int64), block)
        if not len(blocks[split]):
            raise _too_short(block, split, name, len(blocks[split].tokens), len(text), bool(vocab))
    sizes = " / ".join(f"{len(part.tokens):,}" for part in blocks.values())
    valid, test = (capped(blocks[split], valid_tokens) for split in ("validation", "test"))
    limit = ""
    if len(valid) < len(blocks["validation"]) or len(test) < len(blocks["test"]):
        limit = f", losses on at most {valid_tokens:,} of a split (--valid-tokens 0 takes all)"
    num_returns = sum(text.count("\r") for text in texts.values())
    ends = f", {num_returns:,} of them CR, as Windows ends lines" if num_returns else ""
    return Corpus(
        name=name,
        train=blocks["train"],
        valid=valid,
        test=test,
        tokenizer=tokenizer,
        characters_per_token=len(texts["test"]) / len(blocks["test"].tokens),
        entropy_floor=entropy_rate(grammar()) if data == "embedded" and not vocab else None,
        note=f"data: {source}{ends}; {tokenizer.vocab_size} {kind}; {sizes} tokens{limit}",
        sha256=fingerprint(tokenizer.vocabulary, *(part.tokens for part in blocks.values())),
    )


class Settings(Protocol):
    """What a job's settings say of its text; `load` explains them."""

    data: str
    block: int
    vocab: int
    valid_tokens: int
    splits: str


def load_for(config: Settings) -> Corpus:
    """Load the text of a job."""
    return load(config.data, config.block, config.vocab, config.valid_tokens, config.splits)


def _too_short(
    block: int, split: str, name: str, num_tokens: int, num_characters: int, has_pairs: bool
) -> BadInput:
    """What to say of a text that has not one block."""
    told = (
        f"the {split} text of {name} holds {num_tokens:,} tokens, and a block needs {block + 1:,}"
    )
    if has_pairs and num_characters > block:
        return BadInput(
            f"{told} of them: its {num_characters:,} characters are merged into few byte pairs, so "
            "take a smaller --vocab, or 0"
        )
    if num_tokens < 2:
        return BadInput(f"{told} of them: give it more text")
    return BadInput(f"--block {block} is too long: {told} of them")


def fingerprint(*parts: str | Tensor) -> str:
    """The SHA-256 of texts and tensors: equal for equal data, wherever they lie."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            total.update(f"text {len(part)} {part}".encode())
        else:
            total.update(f"{part.dtype} {tuple(part.shape)} ".encode())
            total.update(part.contiguous().cpu().numpy())
    return total.hexdigest()


def capped(blocks: Blocks, most_tokens: int) -> Dataset[tuple[Tensor, Tensor]]:
    """At most `most_tokens` of the blocks, spread evenly; all of them where that is 0."""
    num_blocks = max(1, most_tokens // blocks.block)
    if not most_tokens or num_blocks >= len(blocks):
        return blocks
    step = len(blocks) / num_blocks
    return Subset(blocks, [int(step * number) for number in range(num_blocks)])


def _texts(data: str, splits: str) -> tuple[str, dict[str, str], str]:
    """The name, the text of each split, and where they are from."""
    if data == "embedded":
        rules = grammar()
        sizes = {"train": 1_000_000, "validation": 100_000, "test": 100_000}
        seeds = {"train": "train", "validation": "valid", "test": "test"}
        texts = {split: write(rules, seeds[split], size) for split, size in sizes.items()}
        counts = " / ".join(f"{len(text):,} {split}" for split, text in texts.items())
        return data, texts, f"embedded text written by a grammar, characters: {counts}"
    path = fetched(data) if data in HUB else Path(os.path.expanduser(data))
    try:
        if not data or not path.exists():
            known = ", ".join(["embedded", *HUB])
            raise BadInput(f"--data is {data!r}: no such folder or file, nor one of {known}")
        missing = [name for name in HUB_FILES if data in HUB and not (path / name).is_file()]
        if missing:
            again = program("prepare_data.py", "--data", data)
            raise BadInput(
                f"{path} lacks {missing[0]}, so it is only a part of {data}: delete it and run "
                f"`{again}` where there is internet"
            )
        return path.resolve().name, *read_splits(path, splits)
    except OSError as error:
        raise BadInput(f"cannot read --data {path}: {error.strerror}") from None


# ---- which samples a rank reads ---------------------------------------------------------------


class ShardedSampler(Sampler[int]):
    """The sample numbers that one rank reads in an epoch: shuffled, disjoint and complete.

    All ranks shuffle 0 .. num_samples-1 in the same way, as RandomSampler does: by torch.randperm
    with a torch.Generator, seeded with seed + epoch. Then rank r of N takes every N-th number,
    starting with the r-th. So no two ranks share a sample, none is left out, and the N ranks' k-th
    batches of B/N together are the k-th batch of B of one process. Nothing is padded: the ranks'
    counts, `len(self)`, may differ by one.
    """

    def __init__(self, num_samples: int, rank: int, world_size: int, seed: int = 0) -> None:
        self.num_samples, self.rank, self.world_size = num_samples, rank, world_size
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows; call before every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's sample numbers in the order of the epoch, as plain integers."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.num_samples, generator=generator)
        return iter(order[self.rank :: self.world_size].tolist())

    def __len__(self) -> int:
        """Return how many sample numbers this rank reads in an epoch."""
        return len(range(self.rank, self.num_samples, self.world_size))


def held_out(data: Corpus, batch: int, rank: int, world_size: int) -> list[DataLoader]:
    """This rank's batches of the validation and of the test data: every N-th block, in order."""
    return [
        DataLoader(part, batch, sampler=range(rank, len(part), world_size))
        for part in (data.valid, data.test)
    ]


def torch_sampler(num_samples: int, rank: int, world_size: int, seed: int = 0) -> Sampler[int]:
    """PyTorch's `ShardedSampler`. It pads: up to world_size - 1 samples are read twice an epoch."""
    return DistributedSampler(range(num_samples), world_size, rank, seed=seed)
