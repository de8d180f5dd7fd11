"""What every job of the language model begins with, and which of its settings cannot be."""

from manyhands.data.corpus import Corpus
from manyhands.models.transformer import flops_per_token
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World
from manyhands.training.checkpoints import ShardedCheckpoints
from manyhands.training.run import Run
from manyhands.training.settings import TrainConfig

Shape = tuple[int, int, int]


def shape_of(config: TrainConfig, data: Corpus) -> Shape:
    """Vocabulary, block and layers, in the order that a Transformer takes them."""
    return data.tokenizer.vocab_size, config.block, config.layers


def open_run(config: TrainConfig, world: World, name: str, data: Corpus, **options: object) -> Run:
    """The run of a job that trains the Transformer on this text.

    Args:
        options: of the Run, where they are not those of most jobs.
    """
    return Run(
        config,
        world,
        name,
        num_samples=len(data.train),
        flops_per_token=flops_per_token(*shape_of(config, data)),
        floor=data.entropy_floor,
        data_sha256=data.sha256,
        **{"checkpoints": ShardedCheckpoints, **options},
    )


# ---- settings of several jobs that cannot be ----------------------------------------------------


def check_clip(clip: float) -> None:
    """BadInput where a norm is no limit."""
    if not clip >= 0:
        raise BadInput(f"clip is {clip}: take a positive norm, or 0 for no limit")


def check_micro_batches(count: int) -> None:
    """BadInput where there are none."""
    if count < 1:
        raise BadInput(f"micro_batches is {count}: take at least 1")


def check_heads(layers: int, ranks: int, flag: str) -> None:
    """BadInput where some rank would have no head; `flag` sets the ranks that cut each matrix."""
    if layers < ranks:
        raise BadInput(
            f"{layers} heads cannot be shared by {ranks} ranks: take --layers {ranks} (it gives as "
            f"many heads), or a smaller {flag}"
        )


def check_even_cut(vocab_size: int, layers: int, ranks: int) -> None:
    """BadInput where PyTorch's plan of tensor parallelism does not cut evenly."""
    if vocab_size % ranks or layers % ranks:
        raise BadInput(
            f"PyTorch's plan cuts evenly, but {vocab_size} tokens and {layers} heads are not both "
            f"multiples of {ranks}: take --impl scratch, or fit --vocab and --layers"
        )


def check_1f1b_of_pytorch(m: int, ranks: int, noun: str) -> None:
    """BadInput where PyTorch's 1F1B has too few micro-batches; `noun` is what it runs on."""
    if m < ranks:
        raise BadInput(
            f"PyTorch's 1F1B with {m} micro-batches on {ranks} {noun}: take --micro-batches "
            f"{ranks} or more, or --impl scratch"
        )
