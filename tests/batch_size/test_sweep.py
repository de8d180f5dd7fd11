"""The sweep: its problems, its training against torch's own SGD, and what expensive rates cost."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import train_batch_size
from manyhands.batch_size.problem import Problem, of_images
from manyhands.batch_size.scaling import best_rate
from manyhands.batch_size.sweep import Training, squares_on_the_way, tune
from manyhands.ranks.failures import BadInput
from manyhands.ranks.lab import run_ranks
from manyhands.training.storage import read_json


@pytest.fixture
def data() -> Problem:
    """Images of 3 x 3 pixels, 30 to train on and 10 for validation; class: the brightest column."""
    torch.manual_seed(5)
    inputs = torch.rand(40, 1, 3, 3)
    labels = inputs.sum(dim=2).argmax(dim=2).flatten()
    images = SimpleNamespace(train_inputs=inputs, train_labels=labels, num_classes=3, name="data")
    return of_images(images)


def load(model: str, data: str) -> Problem:
    return train_batch_size.load(train_batch_size.Config(model=model, data=data))


@pytest.fixture(scope="module")
def text() -> Problem:
    """The first 2,000 sequences of the embedded text, and 16 for validation."""
    found = load("transformer", "embedded")
    parts = found.train_inputs[:2000], found.train_labels[:2000]
    return Problem(*parts, found.valid_inputs[:16], found.valid_labels[:16], *found[4:])


def test_the_parts_of_images_have_no_image_in_common(data):
    assert (len(data.train_inputs), len(data.valid_inputs)) == (30, 10)
    whole = torch.cat([data.train_inputs, data.valid_inputs])
    assert len(whole.flatten(1).unique(dim=0)) == 40
    digits = load("mlp", "embedded")
    assert (len(digits.train_inputs), len(digits.valid_inputs)) == (973, 324)


@pytest.mark.parametrize("size", [(3, 3), (8, 8), (9, 28)])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_models_of_images_fit_any_size(model, size):
    images = SimpleNamespace(
        train_inputs=torch.rand(8, 1, *size),
        train_labels=torch.tensor([0, 1, 2, 3] * 2),
        num_classes=4,
        name="some",
    )
    made = of_images(images, model)
    assert made.build()(made.train_inputs).shape == (6, 4) and model in made.note


def test_a_text_labels_each_character_with_the_next(text):
    assert torch.equal(text.train_inputs[0, 1:], text.train_labels[0, :-1])
    assert text.train_inputs.shape == (2000, 32) and text.valid_inputs.shape == (16, 32)
    training = Training(text, 4, 0.3, 1)
    before = training.accuracy()
    for _ in range(60):
        training.step()
    assert before < 0.1 < 0.15 < training.accuracy()


def test_a_model_and_data_of_another_kind_are_refused():
    with pytest.raises(BadInput, match="no such folder"):
        load("transformer", "mnist")


def test_the_pieces_of_a_batch_have_longer_gradients_than_the_batch(text):
    own, mean = squares_on_the_way(text, 4, 16, 0.2, seed=1, target=0.9, max_steps=6)
    assert len(own) == len(mean) == 6
    assert all(a > b > 0 for a, b in zip(own, mean, strict=True))


def test_a_step_is_that_of_torchs_sgd(data):
    training, other = Training(data, 4, 0.3, 1), Training(data, 4, 0.3, 1)
    torch.manual_seed(9)
    chosen = [next(other.batches) for _ in range(10)]
    optimizer = torch.optim.SGD(other.parameters, lr=0.3)
    torch.manual_seed(9)
    for batch in chosen:
        training.step()
        optimizer.zero_grad()
        outputs = other.model(data.train_inputs[batch])
        nn.functional.cross_entropy(outputs, data.train_labels[batch]).backward()
        optimizer.step()
    for mine, torchs in zip(training.parameters, other.parameters, strict=True):
        assert torch.allclose(mine, torchs, rtol=0, atol=1e-6)
    assert training.accuracy() == pytest.approx(
        (other.model(data.valid_inputs).argmax(1) == data.valid_labels).float().mean().item()
    )


def test_one_seed_is_one_training(data):
    weights = []
    for seed in (1, 1, 2):
        training = Training(data, 7, 0.1, seed)
        for _ in range(9):
            training.step()
        weights.append(torch.cat([part.flatten() for part in training.parameters]))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_no_batch_is_smaller_and_an_epoch_has_no_image_twice(data):
    batches = Training(data, 7, 0.1, 1).batches
    epochs = [torch.cat([next(batches) for _ in range(4)]) for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch.tolist())) == 28
    assert not torch.equal(epochs[0], epochs[1])


def test_a_rate_that_diverges_has_none(data):
    steps = tune(data, 6, [1e30, 0.3], [1, 2], 0.6, 300)
    assert steps[1e30] == [None]  # the second seed is not tried
    assert None not in steps[0.3] and best_rate(steps)[0] == 0.3


def test_a_dear_rate_is_given_up(data):
    target, seeds = 0.6, [1, 2]
    cheap, dear = (tune(data, 6, [rate], seeds, target, 5000)[rate] for rate in (0.3, 0.02))
    assert min(dear) > sum(cheap)  # twice the mean of two seeds
    both = tune(data, 6, [0.3, 0.02], seeds, target, 5000)
    assert both == {0.3: cheap, 0.02: [None]}
    assert tune(data, 6, [0.02, 0.3], seeds, target, 5000) == {0.02: dear, 0.3: cheap}


def test_larger_batches_need_fewer_steps():
    data, means = load("mlp", "embedded"), {}
    for batch in (2, 8, 64):
        means[batch] = best_rate(tune(data, batch, [0.2, 0.4, 0.1], [1, 2], 0.8, 1500))[1]
    assert means[2] > 1.5 * means[8] > 2 * means[64], means
    assert means[2] < 16 * means[64], means  # 32 times the samples save less than that


@pytest.mark.parametrize(
    ("model", "target", "unit"), [("cnn", 0.3, "images"), ("transformer", 0.15, "sequences")]
)
def test_the_job_sweeps_other_models(model, target, unit, tmp_path):
    given = {"model": model, "target": target, "largest": 4, "networks": 1, "rates": (0.2,)}
    config = train_batch_size.Config(device="cpu", out=str(tmp_path / "run"), **given)
    run_ranks(train_batch_size.main, 1, config, join=False, quiet=True, timeout_s=120)
    found = read_json(tmp_path / "run/result.json")
    assert [one["batch"] for one in found["batches"]] == [1, 2, 4]
    assert f"--model {model}" in found["remake"] and unit in found["data"]
    assert found["noise_scale"] > 0
