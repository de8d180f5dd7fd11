"""Text: the grammar and its floor, tokenizers, blocks, folders, the hub, and bad input.

Also all of prepare_data, which fetches images too.
"""

import dataclasses
import importlib
import math
import os
import random
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import prepare_data
from manyhands.data import corpus, images
from manyhands.ranks.failures import BadInput

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
SMALL = {  # sentences of unequal length and probability
    "SENTENCE": ["ann WALKS", "the KIND MAN WALKS near the MAN"],
    "KIND": ["old", "shy", "very DEGREE"],
    "DEGREE": ["old", "odd"],
    "MAN": ["baker", "cook", "pilot"],
    "WALKS": ["walks", "sits"],
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's own cache out of the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "manyhands"


@pytest.fixture(scope="module")
def embedded() -> corpus.Corpus:
    return corpus.load("embedded", block=64)


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# The grammar and its floor


def derivations(rules: corpus.Rules, symbols: list[str]) -> Iterator[tuple[float, str]]:
    """All (probability, sentence) that the symbols can become, one for each way to choose."""
    if not symbols:
        yield 1.0, ""
        return
    choices = rules.get(symbols[0])
    if choices is None:
        for chance, rest in derivations(rules, symbols[1:]):
            yield chance, f"{symbols[0]} {rest}"
        return
    for choice in choices:
        for chance, sentence in derivations(rules, choice.split() + symbols[1:]):
            yield chance / len(choices), sentence


def surprise(rules: corpus.Rules, words: list[str], symbols: list[str]) -> float:
    """Read `words` back into choices, each settled by the next word; return -log p in nats."""
    if not symbols:
        assert not words, f"left over: {words}"
        return 0.0
    if symbols[0] not in rules:
        assert words and words[0] == symbols[0], f"{symbols[0]} expected, found {words[:1]}"
        return surprise(rules, words[1:], symbols[1:])
    choices = rules[symbols[0]]
    fitting = [choice for choice in choices if words[0] in first_words(rules, choice)]
    assert len(fitting) == 1, f"{words[0]} could be any of {fitting}"
    return math.log(len(choices)) + surprise(rules, words, fitting[0].split() + symbols[1:])


def first_words(rules: corpus.Rules, choice: str) -> set[str]:
    symbol = choice.split()[0]
    if symbol not in rules:
        return {symbol}
    return set().union(*(first_words(rules, inner) for inner in rules[symbol]))


def test_the_rate_equals_a_sum_over_all_sentences_of_a_small_grammar():
    sentences: dict[str, float] = {}
    for chance, sentence in derivations(SMALL, ["SENTENCE"]):
        assert sentence not in sentences, "two ways to write one sentence"
        sentences[sentence] = chance
    assert sum(sentences.values()) == pytest.approx(1)
    entropy = -sum(p * math.log(p) for p in sentences.values())
    # `derivations` ends each word with a space, where `write` ends a sentence with ".\n".
    length = sum(p * (len(sentence) + 1) for sentence, p in sentences.items())
    assert corpus.entropy_rate(SMALL) == pytest.approx(entropy / length, rel=1e-12)


def test_write_gives_each_sentence_as_often_as_its_probability_says():
    lines = corpus.write(SMALL, "any seed", 300_000).splitlines()
    for chance, sentence in derivations(SMALL, ["SENTENCE"]):
        expected, seen = chance * len(lines), lines.count(sentence.strip() + ".")
        assert abs(seen - expected) < 5 * math.sqrt(expected), sentence


@pytest.mark.parametrize("rules", [SMALL, corpus.grammar()], ids=["small", "embedded"])
def test_the_text_can_be_read_back_in_one_way_only(rules):
    # Where the next word always settles the choice, no text has two derivations (an LL(1) grammar).
    # Words hold no space and no full stop, so that the words can be told apart.
    for symbol, choices in rules.items():
        seen: set[str] = set()
        for choice in choices:
            firsts = first_words(rules, choice)
            assert not firsts & seen, f"{symbol}: {firsts & seen} can begin two choices"
            seen |= firsts
        words = [word for choice in choices for word in choice.split() if word not in rules]
        assert not any("." in word or word.split() != [word] for word in words)


@pytest.mark.parametrize("rules", [SMALL, corpus.grammar()], ids=["small", "embedded"])
def test_the_surprise_of_a_long_text_agrees_with_the_rate(rules):
    rate = corpus.entropy_rate(rules)
    excess = []
    for line in corpus.write(rules, "surprise", 100_000).splitlines(keepends=True):
        assert line.endswith(".\n")
        excess.append(surprise(rules, line[:-2].split(" "), ["SENTENCE"]) - rate * len(line))
    excess = torch.tensor(excess, dtype=torch.float64)
    standard_error = excess.std() / len(excess) ** 0.5
    assert abs(excess.mean()) < 4 * standard_error
    assert standard_error < 0.01 * rate * 100_000 / len(excess)  # else the test would say nothing


def test_the_embedded_floor_is_far_below_what_short_contexts_reach(embedded):
    tokens, size = embedded.train.tokens, embedded.tokenizer.vocab_size
    pairs = torch.bincount(tokens[:-1] * size + tokens[1:], minlength=size**2).view(size, size)
    chances = pairs.double() / pairs.sum()
    given = chances / chances.sum(1, keepdim=True)
    bigram = -(chances * given.log()).nan_to_num().sum().item()
    assert 0.5 < embedded.entropy_floor < 1
    assert corpus.load("embedded", block=64, vocab=300).entropy_floor is None  # known for letters
    assert bigram > 2 * embedded.entropy_floor


def test_the_embedded_text_is_always_the_same_and_its_splits_differ(embedded):
    again = corpus.load("embedded", block=64)
    assert torch.equal(again.train.tokens, embedded.train.tokens)
    first = embedded.tokenizer.decode(embedded.train.tokens[:90])
    assert first.splitlines()[0] == "diver vat of bes mends 761 boats at 11:21."
    assert embedded.tokenizer.decode(embedded.valid.tokens[:90]) != first
    assert len(embedded.train.tokens) >= 1_000_000
    assert len(embedded.valid.tokens) >= 100_000 <= len(embedded.test.tokens)
    assert embedded.tokenizer.decode(embedded.test.tokens[:90]) not in (
        embedded.tokenizer.decode(part.tokens[:90]) for part in (embedded.train, embedded.valid)
    )


def test_a_loss_in_perplexity_and_in_bits_per_character(tmp_path, embedded):
    words = embedded.in_words(math.log(8))
    assert words == "perplexity 8.00, 3.000 bits per character"
    (tmp_path / "a.txt").write_text("one boat and one more boat\n" * 50)
    pairs = corpus.load(str(tmp_path), block=4, vocab=300)
    bits = 3 / pairs.characters_per_token
    assert pairs.characters_per_token > 1.5
    assert pairs.in_words(math.log(8)) == f"perplexity 8.00, {bits:.3f} bits per character"


def test_number_and_topic_decide_later_words():
    rules = corpus.grammar()
    ones = {word for topic, *_ in corpus.TOPICS for word in rules[f"{topic}-DOES"]}
    for line in corpus.write(rules, "agreement", 20_000).splitlines():
        words = line.split()
        assert (words[4] in ones) == (words[2] == "of") == (not words[0].endswith("s"))
        (topic,) = [t for t, who, *_ in corpus.TOPICS if words[0].removesuffix("s") in who.split()]
        assert words[6] in rules[f"{topic}-THINGS"]


# Tokenizers


def test_characters_know_their_alphabet_only(embedded):
    tokenizer = embedded.tokenizer
    assert tokenizer.decode(tokenizer.encode("a sailor at 7:35.\n")) == "a sailor at 7:35.\n"
    assert sorted(set(embedded.train.tokens.tolist())) == list(range(tokenizer.vocab_size))
    with pytest.raises(BadInput, match="'Q' is not among the 36") as error:
        tokenizer.encode("Q")
    one_line(error)


def test_byte_pairs_give_any_text_back():
    tokenizer = corpus.train_byte_pairs("one boat and one more boat\n" * 50, 300)
    assert 257 <= tokenizer.vocab_size <= 300
    generator = random.Random(0)
    codes = [*range(0xD800), *range(0xE000, 0x110000)]
    texts = ["", " ", "\n\n \r\n\t", "a\x00b", "\u2028x\x85y", "boat", " boat", "\u00e9e\u0301"]
    texts += ["".join(map(chr, generator.choices(codes, k=50))) for _ in range(50)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(torch.tensor(ids, dtype=torch.int64)) == text
    assert len(tokenizer.encode("one boat")) < 4


def test_byte_pairs_are_learned_from_the_train_text_only(tmp_path):
    (tmp_path / "train.txt").write_text("abababab" * 100)
    (tmp_path / "valid.txt").write_text("xyxyxyxy" * 100)
    tokenizer = corpus.load(str(tmp_path), block=4, vocab=260).tokenizer
    assert len(tokenizer.encode("abab")) < 4 and len(tokenizer.encode("xyxy")) == 4


def test_byte_pairs_come_from_the_cache_and_a_damaged_cache_is_made_again(cache, monkeypatch):
    text = "one boat and one more boat\n" * 50
    first = corpus.train_byte_pairs(text, 300).model.to_str()
    (file,) = cache.iterdir()
    other = corpus.train_byte_pairs("something else entirely " * 50, 280).model.to_str()
    assert other != first and len(list(cache.iterdir())) == 2
    file.write_text(other)
    assert corpus.train_byte_pairs(text, 300).model.to_str() == other, "the cache was not read"
    for damage in (b"", first[: len(first) // 2].encode(), b"\xff\xfe", b"[]"):
        file.write_bytes(damage)
        assert corpus.train_byte_pairs(text, 300).model.to_str() == first
        assert file.read_text() == first
    file.unlink()
    file.mkdir()
    assert corpus.train_byte_pairs(text, 300).model.to_str() == first
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert corpus.train_byte_pairs(text, 300).model.to_str() == first


# Blocks


@pytest.mark.parametrize("num_tokens", [5, 6, 12, 13, 14])
def test_each_token_is_a_target_once(num_tokens):
    blocks = corpus.Blocks(torch.arange(num_tokens), block=4)
    loader = DataLoader(blocks, batch_size=2, shuffle=True)
    pairs = [pair for x, y in loader for pair in zip(x.flatten(), y.flatten(), strict=True)]
    assert all(target == token + 1 for token, target in pairs)
    covered = (num_tokens - 1) // 4 * 4
    assert sorted(target.item() for _, target in pairs) == list(range(1, covered + 1))
    assert num_tokens - 1 - covered < 4
    assert len(list(blocks)) == len(blocks)
    with pytest.raises(IndexError):
        blocks[len(blocks)]


# Folders and files


@pytest.mark.parametrize(
    "names, splits, note",
    [
        ("test.txt train.txt valid.txt", "train.txt / valid.txt / test.txt", "test on test.txt"),
        (
            "train-a.raw train-b.raw validation.raw test.raw",
            "train-a.raw train-b.raw / validation.raw / test.raw",
            "train on train-a.raw + train-b.raw, validate on validation.raw, test on test.raw",
        ),
        (
            "wiki.train.tokens wiki.valid.tokens",
            "wiki.train.tokens / wiki.valid.tokens",
            "validate on the first half of wiki.valid.tokens, test on its second half",
        ),
        ("test.txt train.txt", "train.txt / test.txt", "on the first half of test.txt, test on"),
        ("test.txt valid.txt", "valid.txt / test.txt", "not comparable with published"),
        ("README.md a.txt b.txt", "a.txt b.txt", "20 characters, first 90% train / next 5%"),
        ("testament.txt trains.txt", "testament.txt trains.txt", "(testament.txt, trains.txt), 23"),
        (
            "ptb.test.txt ptb.train.txt ptb.valid.txt",
            "ptb.train.txt / ptb.valid.txt / ptb.test.txt",
            "train on ptb.train.txt, validate on ptb.valid.txt, test on ptb.test.txt",
        ),
        ("dev.txt test.txt train.txt", "train.txt / dev.txt / test.txt", "validate on dev.txt"),
        (
            "a.txt enTest.txt en_train_corpus.txt",
            "en_train_corpus.txt / enTest.txt",
            "test on its second half, leave out a.txt",
        ),
        ("train.txt", "train.txt", "first 90% train"),
    ],
)
def test_a_folder_is_split_by_its_file_names(tmp_path, names, splits, note):
    folder = tmp_path / "books"
    folder.mkdir()
    for name in reversed(names.split()):
        (folder / name).write_text(20 * name)
    texts = ["".join(20 * name for name in part.split()) for part in splits.split(" / ")]
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        texts = [texts[0][:cut], texts[0][cut:]]
        note = note.replace("20 char", "200 char").replace(", 23", ", 460 char")
    if len(texts) == 2:
        half = len(texts[1]) // 2
        texts[1:] = [texts[1][:half], texts[1][half:]]
    loaded = corpus.load(str(folder), block=1)
    parts = [loaded.train, loaded.valid, loaded.test]
    assert [loaded.tokenizer.decode(part.tokens) for part in parts] == texts
    assert note in loaded.note and "\n" not in loaded.note
    assert ("not comparable" in loaded.note) == (names == "test.txt valid.txt")
    assert loaded.name == "books" and loaded.entropy_floor is None


def test_one_text_file_and_a_byte_order_mark(tmp_path):
    file = tmp_path / "diary.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "caf\u00e9 ".encode() * 20)
    loaded = corpus.load(str(file), block=3)
    assert loaded.characters_per_token == 1
    assert loaded.tokenizer.decode(loaded.train.tokens) == "caf\u00e9 " * 18
    assert loaded.note == (
        "data: file diary.txt, 100 characters, first 90% train / next 5% validation / last 5% "
        "test; 5 characters; 90 / 5 / 5 tokens"
    )


@pytest.mark.parametrize(
    "files, block, vocab, message",
    [
        ({}, 4, 0, "no .txt file among the 0 entries"),
        ({"photo.jpg": b"\xff\xd8"}, 4, 0, "no .txt file among the 1 entries"),
        ({"a.txt": b""}, 4, 0, "a.txt: empty"),
        ({"train.txt": b"text", "valid.txt": b""}, 4, 0, "valid.txt: empty"),
        ({"a.txt": b"good text \x00"}, 4, 0, "a.txt is no text: its byte 10 is zero"),
        ({"a.txt": b"good\xff"}, 4, 0, "a.txt is no UTF-8 text, see its byte 4"),
        ({"a.txt": b"x" * 1000}, 100, 0, "validation text .* 50 tokens, .* needs 101"),
        ({"a.txt": b"hello"}, 2, 0, "validation text of given holds 0 tokens, .* more text"),
        ({"train.txt": b"to be or not", "test.txt": b"x"}, 1, 0, "validation text .* more text"),
        ({"a.txt": b"x" * 30000}, 512, 400, "its 27,000 characters .* a smaller --vocab, or 0"),
        ({"test.txt": b"x" * 1000}, 4, 0, "test.txt says test, and nothing is for the others"),
        ({"test.txt": b"x", "b.txt": b"x"}, 4, 0, "test.txt says test, and b.txt nothing"),
        ({"train.txt": b"x", "b.txt": b"x"}, 4, 0, "train.txt says train, .*--splits joined"),
        ({"train-test.txt": b"x", "b.txt": b"x"}, 4, 0, "train-test.txt names more than one"),
        ({"a.txt": b"x" * 1000}, 0, 0, "--block is 0"),
        ({"a.txt": b"x" * 1000}, 4, 256, "--vocab is 256: .* 257"),
        ({"a.txt": b"x" * 1000}, 4, -1, "--vocab is -1"),
    ],
)
def test_what_cannot_be_used_is_named_in_one_line(tmp_path, files, block, vocab, message):
    folder = tmp_path / "given"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(BadInput, match=message) as error:
        corpus.load(str(folder), block, vocab)
    one_line(error)


def test_a_person_says_which_file_is_which(tmp_path):
    for name in ("a1.txt", "a2.txt", "b-test.txt"):
        (tmp_path / name).write_text(200 * name)

    def texts(splits: str) -> list[str]:
        loaded = corpus.load(str(tmp_path), block=1, splits=splits)
        parts = (loaded.train, loaded.valid, loaded.test)
        return [loaded.tokenizer.decode(part.tokens) for part in parts]

    a = 200 * "a1.txt" + 200 * "a2.txt"
    train, valid, test = texts("joined")
    assert train + valid + test == a + 200 * "b-test.txt" and len(train) == 3960
    assert texts("train=a*.txt,test=b*")[0] == a
    assert texts("train=a1.txt,valid=a2.txt,test=b*") == [a[:1200], a[1200:], 200 * "b-test.txt"]
    for splits, words in (
        ("all", "take joined, or name files"),
        ("train=a*.txt", "take joined, or name files"),
        ("train=a*.txt,dev=b*", "take joined, or name files"),
        ("train=a*.txt,test=c*", "test=c.: no such text file"),
        ("train=*.txt,test=b*", "b-test.txt would be in two of them"),
    ):
        with pytest.raises(BadInput, match=words) as error:
            texts(splits)
        one_line(error)


READERS = [path.stem for path in (ROOT / "scripts").glob("*.py") if " corpus." in path.read_text()]


@pytest.mark.parametrize("name", sorted(READERS))
def test_every_job_on_text_has_the_flag_that_settles_the_doubt(name):
    """The line of a doubt advises it."""
    config = importlib.import_module(name).main.__annotations__["config"]
    assert "splits" in {field.name for field in dataclasses.fields(config)}


def test_line_ends_of_windows_are_told(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a line\r\n" * 100)
    assert "800 characters, first 90%" in (note := corpus.load(str(tmp_path), block=1).note)
    assert ", 100 of them CR, as Windows ends lines; 8 characters" in note


@pytest.mark.parametrize("data", ["", "wikitext2", "~nobody-here/x", "x" * 5000])
def test_an_unknown_name_lists_the_known_ones(data):
    with pytest.raises(BadInput, match="embedded, wikitext-2|cannot read") as error:
        corpus.load(data, block=4)
    one_line(error)


def real(name: str) -> str:
    if not (DATA / name).is_dir():
        pytest.skip(f"the real data is not there: {DATA / name}")
    return str(DATA / name)


def test_tinyshakespeare_is_read_whole():
    loaded = corpus.load(real("tinyshakespeare"), block=64)
    assert loaded.note == (
        "data: folder tinyshakespeare, 1,115,394 characters, first 90% train / next 5% "
        "validation / last 5% test; 65 characters; 1,003,854 / 55,770 / 55,770 tokens"
    )


def test_wikitext_without_its_train_split_says_so():
    loaded = corpus.load(real("wikitext-2"), block=64, vocab=1000)
    assert "not comparable with published perplexities" in loaded.note
    assert loaded.tokenizer.vocab_size == 1000
    text = (DATA / "wikitext-2" / "test.txt").read_text("utf-8")
    halves = (
        loaded.tokenizer.decode(loaded.valid.tokens),
        loaded.tokenizer.decode(loaded.test.tokens),
    )
    assert "".join(halves) == text and len(halves[0]) == len(text) // 2
    assert loaded.characters_per_token == len(halves[1]) / len(loaded.test.tokens)


# The hub


def test_hub_data_that_is_not_there_is_refused_at_once_with_the_command_to_run():
    with pytest.raises(BadInput, match="scripts/prepare_data.py --data wikitext-2`") as error:
        corpus.load("wikitext-2", block=4)
    command = one_line(error).split("`")[1]
    done = subprocess.run([*shlex.split(command), "--help"], capture_output=True, cwd="/")
    assert done.returncode == 0, "it runs as it stands, from any folder, with torch"
    assert "login node" in one_line(error) and "--data embedded" in one_line(error)


def publish(hub: Path, config: str, splits: dict[str, dict[str, list]]) -> None:
    """A data set in the hub's own layout, but in a folder: `datasets` itself reads it."""
    import datasets

    hub.mkdir()
    for split, columns in splits.items():
        datasets.Dataset.from_dict(columns).to_parquet(hub / f"{split}.parquet")
    files = "".join(f"  - {{split: {split}, path: {split}.parquet}}\n" for split in splits)
    (hub / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    )


@pytest.fixture
def no_hub(tmp_path, monkeypatch) -> None:
    """Let nothing come from another machine, nor from what `datasets` has kept of another test."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "kept by datasets")


def test_prepare_data_fetches_what_load_then_reads(tmp_path, cache, monkeypatch, no_hub, capsys):
    lines = {split: [f" = {split} = \n", "", " some words \n"] * 9 for split in ("train", "test")}
    lines["validation"] = ["", " other words \n"] * 9
    publish(tmp_path / "hub", "raw-v1", {split: {"text": rows} for split, rows in lines.items()})
    monkeypatch.setitem(corpus.HUB, "wikitext-2", (str(tmp_path / "hub"), "raw-v1"))
    prepare_data.main(prepare_data.Config())
    printed = capsys.readouterr().out.splitlines()
    assert sorted(os.listdir(cache)) == ["wikitext-2"], "something half-written was left"
    assert [line.split(": ")[0] for line in printed[1:4]] == [
        str(cache / "wikitext-2" / f"{split}.txt") for split in ("test", "train", "validation")
    ]
    assert "sha256" in printed[1] and printed[4].endswith("--data wikitext-2")
    loaded = corpus.load("wikitext-2", block=4)
    expected = "".join(line or "\n" for line in lines["train"])
    assert loaded.tokenizer.decode(loaded.train.tokens) == expected
    assert "train on train.txt, validate on validation.txt" in loaded.note


def pictures(number: int, *shape: int) -> tuple[np.ndarray, list[int], dict[str, list]]:
    """Pixels (number, *shape), labels, and the two columns of the hub that hold them."""
    pixels = np.random.default_rng(number).integers(0, 256, (number, *shape), dtype=np.uint8)
    labels = [(3 * i) % 10 for i in range(number)]
    return pixels, labels, {"image": [Image.fromarray(one) for one in pixels], "label": labels}


@pytest.mark.parametrize("name", images.HUB)
def test_prepare_data_fetches_images(name, tmp_path, cache, monkeypatch, no_hub, capsys):
    pixels, labels, train = pictures(23, 4, 6)
    test_pixels, test_labels, test = pictures(9, 4, 6)
    publish(tmp_path / "hub", "pictures", {"train": train, "test": test})
    monkeypatch.setitem(images.HUB, name, (str(tmp_path / "hub"), None))
    prepare_data.main(prepare_data.Config(data=name))
    note, *files, last = capsys.readouterr().out.splitlines()
    assert note.startswith(f"data: {name}, 23 images to train and 9 to test on, 4 x 6 pixels")
    for line, file, num_bytes in zip(
        files,
        ("t10k-images-idx3", "t10k-labels-idx1", "train-images-idx3", "train-labels-idx1"),
        (16 + 9 * 24, 8 + 9, 16 + 23 * 24, 8 + 23),
        strict=True,
    ):
        assert line.startswith(f"{cache / name / file}-ubyte: {num_bytes} bytes, sha256 ")
    script = str(ROOT / "scripts/train_batch_size.py")
    assert last == f"next: {corpus.program('launch.py', script, '--data', name)}"
    assert os.listdir(cache) == [name], "something half-written was left"
    loaded = images.load(name)
    assert torch.equal(loaded.train_inputs[:, 0] * 255, torch.tensor(pixels).float())
    assert torch.equal(loaded.test_inputs[:, 0] * 255, torch.tensor(test_pixels).float())
    assert (loaded.train_labels.tolist(), loaded.test_labels.tolist()) == (labels, test_labels)
    shutil.rmtree(tmp_path / "hub")
    prepare_data.main(prepare_data.Config(data=name))  # what is there is not fetched again
    assert capsys.readouterr().out.splitlines() == [note, *files, last]


COLOUR, UNEVEN = pictures(5, 4, 6, 3)[2], pictures(5, 4, 6)[2]
UNEVEN["image"] = [*UNEVEN["image"][:4], Image.new("L", (7, 7))]
CHANGED = {  # words of the message -> the hub's test split
    "the test images are (5, 4, 6, 3) uint8, not grey": COLOUR,
    "must have the same shape": UNEVEN,
    "out of bounds for uint8": {**pictures(5, 4, 6)[2], "label": [0, 1, 2, 3, -1]},
    "not 'NoneType'": {"image": pictures(5, 4, 6)[2]["image"]},  # no labels
    "File too large": pictures(500, 40, 40)[2],
}


@pytest.mark.parametrize("words", CHANGED)
def test_images_that_cannot_be_stored_whole_leave_nothing(
    words, tmp_path, cache, monkeypatch, no_hub
):
    publish(tmp_path / "hub", "pictures", {"train": pictures(9, 4, 6)[2], "test": CHANGED[words]})
    monkeypatch.setitem(images.HUB, "mnist", (str(tmp_path / "hub"), None))
    import datasets

    datasets.load_dataset(str(tmp_path / "hub"))  # its own files are written before the limit
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if words == "File too large":  # the third file of four
            resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, before[1]))
        with pytest.raises(BadInput, match="cannot fetch mnist .*machine with internet") as error:
            prepare_data.main(prepare_data.Config(data="mnist"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert words in one_line(error)
    assert not cache.exists() or not os.listdir(cache)


def test_byte_pairs_are_for_text():
    with pytest.raises(BadInput, match="--vocab is for text: leave it out with --data mnist"):
        prepare_data.main(prepare_data.Config(data="mnist", vocab=300))


@pytest.mark.parametrize("name", ["wikitext-2", "mnist"])
def test_prepare_data_without_internet_ends_soon_with_one_line(name, tmp_path):
    environ = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hf"),
        "COLUMNS": "80",
    }
    environ.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "prepare_data.py", "--data", name],
        capture_output=True,
        text=True,
        env=environ,
        timeout=60,  # it takes 3 s; retrying would print lines on standard error
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "machine with internet" in done.stderr
    assert f"prepare_data.py --data {name}`" in done.stderr and "None" not in done.stderr
    assert not (tmp_path / "cache" / "manyhands").exists()


def test_a_server_that_answers_with_an_error_can_be_reached():
    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            """Keep the test's output clean."""

    with HTTPServer(("127.0.0.1", 0), Refuse) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert not prepare_data.unreachable(address)
    assert prepare_data.unreachable(address)


def test_addresses_and_proxies_that_cannot_be_are_one_line(tmp_path, cache, monkeypatch):
    """A server that is none of the web answers on the port that is given as proxy or endpoint."""
    import datasets  # else it would read HF_HUB_OFFLINE, which the first of these sets

    assert datasets.config.HF_HUB_OFFLINE
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=greet_like_ssh, args=[server], daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for changes, words in (
            ({"HF_ENDPOINT": "hub.example"}, "HF_ENDPOINT is 'hub.example': give an address"),
            ({"HF_ENDPOINT": f"http://{address}"}, f"http://{address} does not .*BadStatusLine"),
            ({"HF_ENDPOINT": "", "https_proxy": "http://proxy:port"}, "https_proxy .*nonnumeric"),
            ({"https_proxy": f"http://{address}"}, "https_proxy .*BadStatusLine SSH"),
            ({"https_proxy": f"socks5://{address}"}, "https_proxy .*BadStatusLine SSH"),
        ):
            with monkeypatch.context() as patch:
                for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "https_proxy", "HTTPS_PROXY"):
                    patch.delenv(name, raising=False)
                for name, value in changes.items():
                    patch.setenv(name, value)
                patch.setattr(
                    "urllib.request._opener", None
                )  # it keeps the proxies of its first use
                with pytest.raises(BadInput, match=words) as error:
                    prepare_data.fetch("wikitext-2")
            one_line(error)
    assert not cache.exists() or not os.listdir(cache)


def greet_like_ssh(server: socket.socket) -> None:
    """Answer whoever connects as a server does that knows nothing of the web."""
    with suppress(OSError):  # it is closed at the end
        while True:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"SSH-2.0-OpenSSH_9\r\n")


def test_of_two_that_fetch_the_same_both_succeed(tmp_path, cache, monkeypatch, no_hub):
    lines = {split: {"text": [" some words \n"] * 9} for split in ("train", "test", "validation")}
    publish(tmp_path / "hub", "raw-v1", lines)
    monkeypatch.setitem(corpus.HUB, "wikitext-2", (str(tmp_path / "hub"), "raw-v1"))
    store = prepare_data._store

    def beaten(files: dict[str, bytes], folder: Path) -> None:
        store(files, folder)  # the other one
        store(files, folder)

    monkeypatch.setattr(prepare_data, "_store", beaten)
    assert prepare_data.fetch("wikitext-2") == cache / "wikitext-2"
    assert os.listdir(cache) == ["wikitext-2"]


@pytest.mark.parametrize(
    "read",
    [
        lambda: corpus.load("wikitext-2", block=4),
        lambda: prepare_data.main(prepare_data.Config()),
    ],
)
def test_what_is_only_a_part_of_a_data_set_is_to_be_deleted(cache, read):
    folder = cache / "wikitext-2"
    folder.mkdir(parents=True)
    with pytest.raises(
        BadInput, match="lacks train.txt, .* delete it and run `.*scripts/prepare_data.py"
    ):
        read()
    folder.rmdir()
    folder.write_text("x")
    with pytest.raises(BadInput, match="is a file where .* belongs: delete it"):
        read()


def test_prepare_data_checks_a_folder_and_learns_its_tokenizer(tmp_path, cache, capsys):
    folder = tmp_path / "my text"
    folder.mkdir()
    (folder / "a.txt").write_text("one boat and one more boat\n" * 50)
    prepare_data.main(prepare_data.Config(data=str(folder), vocab=300))
    *_, file_line, last = capsys.readouterr().out.splitlines()
    assert file_line.startswith(f"{folder / 'a.txt'}: 1,350 bytes, sha256 ")
    assert last.endswith(f"--data '{folder}' --vocab 300")
    assert len(list(cache.iterdir())) == 1


def test_validation_on_some_blocks_spread_evenly(tmp_path):
    (tmp_path / "train.txt").write_text("ab" * 50)
    numbers = "".join(f"{number:03d}" for number in range(34))
    (tmp_path / "valid.txt").write_text(numbers[:101])  # 10 blocks, all of them different
    (tmp_path / "test.txt").write_text(numbers[:61])  # 6 blocks
    whole = corpus.load(str(tmp_path), block=10)
    some = corpus.load(str(tmp_path), block=10, valid_tokens=45)
    assert (len(whole.valid), len(some.valid)) == (10, 4)
    assert (len(whole.test), len(some.test)) == (6, 4)
    limit = ", losses on at most 45 of a split (--valid-tokens 0 takes all)"
    assert some.note == whole.note + limit
    for number, (inputs, targets) in zip((0, 2, 5, 7), some.valid, strict=True):
        assert torch.equal(inputs, whole.valid[number][0])
        assert torch.equal(targets, whole.valid[number][1])
    assert len(corpus.load(str(tmp_path), block=10, valid_tokens=3).valid) == 1
    assert len(corpus.load(str(tmp_path), block=10, valid_tokens=60).test) == 6
    enough = corpus.load(str(tmp_path), block=10, valid_tokens=100)
    assert len(enough.valid) == 10 and enough.note == whole.note
