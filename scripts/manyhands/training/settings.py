"""The settings that every training of the language model has."""

import math
from dataclasses import dataclass

from manyhands.ranks.failures import BadInput


@dataclass(frozen=True)
class TrainConfig:
    """Settings that every training script has."""

    data: str = "embedded"
    """What to train on: embedded, a known name such as wikitext-2, or a folder of text."""
    splits: str = ""
    """Which of a folder's files are for what, where their names do not say it: joined takes all as
    one text, and train=PATTERN,valid=PATTERN,test=PATTERN names them."""
    vocab: int = 0
    """Tokens in the vocabulary; 0 takes the characters of the text."""
    block: int = 64
    """Length of a training sequence in tokens."""
    layers: int = 4
    """Size of the model: its layers, and with them its heads and its width."""
    batch: int = 16
    """Sequences in one step, over all ranks together."""
    steps: int = 300
    """Optimizer steps to take."""
    learning_rate: float = 3e-3
    """Highest learning rate, reached after a tenth of the steps."""
    valid_tokens: int = 32_768
    """Most tokens of the validation data, and of the test data, to compute a loss of; 0: all."""
    seed: int = 1
    """Start of every random number."""
    device: str = "auto"
    """Where to train: auto, cpu or cuda."""
    out: str = ""
    """Folder of the run; empty takes the next free one in runs/. An unfinished run goes on."""
    save_every: int = 100
    """Steps from one checkpoint, with its validation, to the next."""
    other_data: bool = False
    """Go on with a run although its data are no longer those that it was begun with."""


def check_settings(config: TrainConfig, num_shares: int, num_samples: int) -> None:
    """Refuse settings that no run can have.

    Args:
        num_shares: ranks that share a batch evenly.
        num_samples: sequences in the training data.

    Raises:
        BadInput: names the setting, and what to take.
    """
    for name in ("layers", "batch", "steps", "save_every"):
        if getattr(config, name) < 1:
            raise BadInput(f"{name} is {getattr(config, name)}: take at least 1")
    if config.valid_tokens < 0:
        raise BadInput(f"valid_tokens is {config.valid_tokens}: take 0 for all, or a number above")
    if config.batch % num_shares:
        raise BadInput(
            f"batch {config.batch} cannot be shared evenly by {num_shares} ranks: take a "
            f"multiple of {num_shares}"
        )
    if num_samples < config.batch:
        raise BadInput(
            f"batch {config.batch} but the training data holds only {num_samples} blocks of "
            f"{config.block}: take a smaller --batch or --block, or more data"
        )
    if not (math.isfinite(config.learning_rate) and config.learning_rate > 0):
        raise BadInput(f"learning_rate is {config.learning_rate}: take a number above 0")
