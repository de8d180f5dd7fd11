"""A small residual network for images, with a switch that takes the skip connections out.

    image -> conv, norm, ReLU -> block -> block -> ... -> mean over pixels -> linear -> logits

    block:   x --+-> conv -> norm -> ReLU -> conv -> norm --(+)-> ReLU ->
                 |                                           ^
                 '------------- skip ------------------------'

Every convolution is 3 x 3 and keeps the size of the image. Nothing here is distributed.
Sources: He et al. 2015, https://arxiv.org/abs/1512.03385; Li et al. 2018 (without skips),
https://arxiv.org/abs/1712.09913.
"""

import torch
from torch import Tensor, nn

BATCH = 64  # images in a step of `train`


class Block(nn.Module):
    """Two convolutions, and past them the way that carries the input on unchanged."""

    def __init__(self, width: int, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),  # the norm has the bias
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, width, H, W) in and out."""
        out = self.layers(x)
        return (out + x if self.skip else out).relu()


class ResNet(nn.Module):
    """The whole network: 2 * num_blocks + 2 layers with weights.

    Args:
        num_classes: numbers that it gives for an image.
        num_blocks: blocks of two convolutions.
        width: channels inside; the number of weights grows with its square.
        skip: with the skip connections, or without.
        channels: of an image.
    """

    def __init__(
        self,
        num_classes: int = 10,
        num_blocks: int = 10,
        width: int = 8,
        skip: bool = True,
        channels: int = 1,
    ) -> None:
        super().__init__()
        conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stem = nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*(Block(width, skip) for _ in range(num_blocks)))
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, channels, H, W)."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def use_batch_statistics(model: nn.Module) -> None:
    """Let each norm use the mean and variance of the batch at hand, also in eval mode.

    The averages that were kept in training are dropped: they belong to the weights of then.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = None


def train(
    model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int = 8, peak_rate: float = 0.1
) -> None:
    """Train on images (N, channels, H, W) with stochastic gradient descent and a falling rate.

    What an epoch leaves over after the last whole batch is left out.
    """
    recipe = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    optimizer = torch.optim.SGD(model.parameters(), lr=peak_rate, **recipe)
    num_batches = len(inputs) // BATCH
    step = 0
    num_steps = epochs * num_batches
    for _ in range(epochs):
        for chosen in torch.randperm(len(inputs)).split(BATCH)[:num_batches]:
            optimizer.param_groups[0]["lr"] = peak_rate * (1 - step / num_steps)
            nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
