"""The sweep: its training against torch's own SGD, and what it does with dear rates."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from manyhands.batch_size.scaling import best_rate
from manyhands.batch_size.sweep import Training, tune
from manyhands.data import images


@pytest.fixture
def data() -> SimpleNamespace:
    """30 images of 3 x 3 pixels in three classes: the brightest column says which."""
    torch.manual_seed(5)
    inputs = torch.rand(60, 1, 3, 3)
    labels = inputs.sum(dim=2).argmax(dim=2).flatten()
    parts = inputs[:30], labels[:30], inputs[30:], labels[30:]
    names = "train_inputs", "train_labels", "test_inputs", "test_labels"
    return SimpleNamespace(**dict(zip(names, parts, strict=True)), num_classes=3)


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
        (other.model(data.test_inputs).argmax(1) == data.test_labels).float().mean().item()
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
    data, means = images.load("embedded"), {}
    for batch in (2, 8, 64):
        means[batch] = best_rate(tune(data, batch, [0.2, 0.4, 0.1], [1, 2], 0.8, 1500))[1]
    assert means[2] > 1.5 * means[8] > 2 * means[64], means
    assert means[2] < 16 * means[64], means  # 32 times the samples save less than that
