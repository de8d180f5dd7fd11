"""The residual network: its size, its switch, and norms that keep nothing."""

import copy

import pytest
import torch
from torch import nn

from manyhands.models.resnet import ResNet, use_batch_statistics

pytestmark = pytest.mark.fast


def built(**options) -> ResNet:
    torch.manual_seed(3)
    return ResNet(**options)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_shapes_and_the_number_of_layers_with_weights(num_blocks, skip):
    model = built(num_classes=5, num_blocks=num_blocks, width=4, skip=skip, channels=3)
    assert model(torch.randn(2, 3, 9, 7)).shape == (2, 5)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 2 * num_blocks + 2
    kept = nn.Sequential(model.stem, model.blocks)
    assert kept(torch.randn(2, 3, 9, 7)).shape == (2, 4, 9, 7)  # the size of the image stays


def test_without_skips_nothing_goes_past_the_layers():
    for skip in (True, False):
        model = built(num_blocks=2, skip=skip)
        features = model.stem(torch.randn(4, 1, 6, 6))
        for block in model.blocks:
            nn.init.zeros_(block.layers[-1].weight)  # now the layers of a block give zeros
        assert torch.equal(model.blocks(features), features if skip else 0 * features)


def test_one_seed_gives_the_same_weights_with_and_without_skips():
    with_skips, without = built(skip=True), built(skip=False)
    pairs = zip(with_skips.state_dict().items(), without.state_dict().items(), strict=True)
    for (name, one), (other_name, other) in pairs:
        assert name == other_name and torch.equal(one, other)
    images = torch.randn(4, 1, 6, 6)
    assert not torch.allclose(with_skips(images), without(images))


def test_batch_statistics_keep_nothing_and_make_eval_equal_to_training():
    model, images = built(num_blocks=2), 3 * torch.randn(8, 1, 6, 6) + 1
    trained = copy.deepcopy(model).train()(images)
    assert not torch.allclose(copy.deepcopy(model).eval()(images), trained)
    use_batch_statistics(model)
    before = {name: value.clone() for name, value in model.named_buffers()}
    assert torch.equal(model.train()(images), trained)
    assert torch.equal(model.eval()(images), trained)
    after = dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
