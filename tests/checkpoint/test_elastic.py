"""Lesson 11's job on ranks whose number changes, and the history of samples that survives."""

from pathlib import Path

import pytest

import runs
import train_checkpoint
from commands import left_behind, losses, make_clone, settings
from manyhands.checkpoint import elastic
from manyhands.data.corpus import ShardedSampler
from manyhands.programs import elastic_run

STEPS, STEPS_PER_EPOCH = 20, 8  # of 12 samples


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"))


def config_of(clone: Path, out: Path, **changes: object) -> train_checkpoint.Config:
    small = {"batch": 12, "layers": 2, "steps": STEPS, "save_every": 50}
    return train_checkpoint.Config(**settings(clone, out=str(out), **small | changes))


def train(num_ranks: int, config: train_checkpoint.Config, until: int = STEPS) -> None:
    """Train; before the end of step `until`, if that is not the last, one rank is told to stop."""
    main = train_checkpoint.main
    main = runs.told_to_stop(until, main) if until < STEPS else main
    runs.train(train_checkpoint, num_ranks, config, main)


@pytest.fixture(scope="module")
def calm(clone: Path) -> Path:
    train(4, config_of(clone, clone / "calm"))
    return clone / "calm"


@pytest.mark.parametrize("impl", ["scratch", "torch"])
def test_four_ranks_then_two_then_three(clone, calm, tmp_path, impl):
    config = config_of(clone, tmp_path / "run", impl=impl)
    for num_ranks, until in ((4, 7), (2, 13), (3, STEPS)):
        train(num_ranks, config, until)
    assert losses(tmp_path / "run") == pytest.approx(losses(calm), abs=1e-5)
    lines = elastic.read_notes(tmp_path / "run" / "samples")
    assert {line["ranks"]: line["life"] for line in lines} == {4: 0, 2: 1, 3: 2}
    history = elastic.surviving_history(lines)
    assert not elastic.misused(history, STEPS, STEPS_PER_EPOCH)
    theirs = elastic.surviving_history(elastic.read_notes(calm / "samples"))
    assert {step: sorted(samples) for step, samples in history.items()} == {
        step: sorted(samples) for step, samples in theirs.items()
    }


def test_as_many_ranks_go_on_bit_for_bit_also_from_a_store(clone, calm, tmp_path):
    config = config_of(clone, tmp_path / "run", store=str(tmp_path / "store"))
    train(4, config, 11)
    assert not any((tmp_path / "run" / "checkpoints").iterdir())
    train(4, config)
    assert losses(tmp_path / "run") == losses(calm)
    assert (tmp_path / "run/model.pt").read_bytes() == (calm / "model.pt").read_bytes()


def test_a_rank_dies_then_a_node_and_a_node_comes_back(clone, tmp_path):
    """Two agents of torchrun; no sample is lost or used twice, and nothing outlives them."""
    out, steps = tmp_path / "run", 900
    events = elastic_run.rehearse(out, steps=steps)
    assert [event["event"].split()[1] for event in events] == ["rank", "node", "node"]
    lives = elastic_run.lives(out)
    assert [life["ranks"] for life in lives][:4] == [2, 2, 1, 2] and len(lives) == 4
    assert lives[3]["start"] == lives[2]["stop"], "the ranks saved before they were started anew"
    assert len(losses(out)) == steps
    history = elastic.surviving_history(elastic.read_notes(out / "samples"))
    assert not elastic.misused(history, steps, elastic_run.steps_per_epoch(out))
    assert not left_behind(out)


# ---- who takes what ------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_samples_are_those_of_the_other_jobs(world_size):
    batch = 12 // world_size
    for rank in range(world_size):
        sampler = ShardedSampler(100, rank, world_size, seed=7)
        sampler.set_epoch(1)
        theirs = list(sampler)
        for place in range(8):
            ours = elastic.samples_of_step(8 + place, rank, world_size, 100, 12, seed=7)
            assert ours == theirs[place * batch : (place + 1) * batch]


@pytest.mark.parametrize("world_size", [5, 7, 13])
def test_ranks_that_do_not_divide_the_batch_share_it_all_the_same(world_size):
    for step in (0, 7, 8, 20):
        parts = [
            elastic.samples_of_step(step, rank, world_size, 100, 12) for rank in range(world_size)
        ]
        whole = elastic.samples_of_step(step, 0, 1, 100, 12)
        assert sorted(sum(parts, [])) == sorted(whole)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_batches_begin_anywhere():
    whole, rest = (elastic.PlacedBatches(100, 12, 1, 2, seed=3) for _ in range(2))
    for batches in (whole, rest):
        batches.set_epoch(4)
    rest.begin_at(5)
    assert list(rest) == list(whole)[5:] and len(whole) == 8
    rest.set_epoch(5)
    assert len(list(rest)) == 8, "the next epoch begins at its beginning"


def line(life: int, rank: int, step: int, *samples: int) -> dict:
    return {"life": life, "rank": rank, "step": step, "samples": list(samples)}


LOST = [line(0, 0, 0, 1), line(0, 1, 0, 2), line(0, 0, 1, 3), line(1, 0, 1, 3, 4)]


def test_a_step_taken_twice_counts_once():
    assert elastic.surviving_history(LOST) == {0: [1, 2], 1: [3, 4]}
    assert elastic.misused({0: [1, 2], 1: [3, 4]}, 2, 2) == ""


@pytest.mark.parametrize(
    ("history", "words"),
    [
        ({0: [1, 2], 2: [3, 4]}, "step 1 is missing"),
        ({0: [1, 2], 1: [3, 2], 2: [0, 5]}, "sample 2 was used 2 times"),
        ({0: [1, 2], 1: [3], 2: [0, 5]}, "steps have [1, 2] samples"),
    ],
)
def test_what_is_wrong_with_a_history_is_said(history, words):
    assert words in elastic.misused(history, 3, 3)


def test_the_notes_of_a_killed_rank_can_be_read(tmp_path):
    notes = elastic.Notes(tmp_path, 0, 0, 2)
    notes.write(0, [1, 2])
    with open(tmp_path / "life-000-rank-00000.jsonl", "a") as file:
        file.write('{"life": 0, "ra')
    assert elastic.num_lives(tmp_path) == 1
    assert [one["samples"] for one in elastic.read_notes(tmp_path)] == [[1, 2]]
