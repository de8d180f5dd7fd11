"""Which random numbers are the same on which ranks of a mesh: a seed for each purpose and place.

                       along   pp        dp, shard, replicate   tp
    weights                    same      same                   same      all build one model
    data                       same      differs                same      augmentation, sampling
    dropout                    differs   differs                same      of whole activations
    own dropout                differs   differs                differs   of parts of activations

Weights: every rank builds the whole model and cuts it, so all have to begin alike; to draw each
part from a seed of its own would also give parts of one matrix the same numbers wherever two ranks'
seeds agree. Dropout: tensor ranks hold copies of one activation, which stay copies only if all drop
the same elements. Replicas with equal seeds would drop the same places of different samples, and
stages the same places of each layer: no error, only worse noise.

Price: nothing. PyTorch's generator on the CPU keeps the last 32 bits of a seed: two seeds that
differ only above them give the same numbers.
Source: Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053, appendix B.2.
"""

from collections.abc import Mapping

from manyhands.mesh.grid import DATA_AXES, Sizes

PURPOSES = ("weights", "data", "dropout", "own dropout")
MOST_RANKS = 2**20


def seed_of(what: str, seed: int, place: Mapping[str, int], sizes: Sizes) -> int:
    """The seed of a rank's random numbers for one purpose, from the seed of the training.

    For "weights" it is `seed` itself, as in one process. For every other purpose it depends on
    `seed`, is at least 0, and tells ranks apart by their places along these axes:

        data          the same along pp and tp, different along DATA_AXES
        dropout       the same along tp, different along all others
        own dropout   different along every axis

    Two ranks have the same seed exactly if the table says "the same" of every axis along which
    their places differ. An axis with any other name counts like pp. Two purposes never have a seed
    in common. All this also holds for the last 32 bits of the seeds, where `seed` is below 1024
    and there are at most 2**20 ranks.

    Args:
        what: weights, data, dropout or own dropout.
        place: of the rank, as coordinates() gives it.
    """
    if what == "weights":
        return seed
    number = 0
    for axis, size in sizes.items():
        is_same = {"data": axis not in DATA_AXES, "dropout": axis == "tp", "own dropout": False}
        number = number * size + (0 if is_same[what] else place[axis])
    return (len(PURPOSES) * seed + PURPOSES.index(what)) * MOST_RANKS + number


def table(sizes: Sizes, seed: int = 0) -> dict[str, dict[str, str]]:
    """What seed_of does along each axis: a purpose -> {an axis: "same" or "differs"}.

    Computed from the seeds of all places on each axis that has several.
    """
    start = dict.fromkeys(sizes, 0)
    return {
        what: {
            axis: ("same" if len(seeds_along(axis, what, seed, start, sizes)) == 1 else "differs")
            for axis, size in sizes.items()
            if size > 1
        }
        for what in PURPOSES
    }


def seeds_along(
    axis: str, what: str, seed: int, place: Mapping[str, int], sizes: Sizes
) -> set[int]:
    """The seeds of the ranks that differ from `place` in this axis only."""
    return {seed_of(what, seed, {**place, axis: number}, sizes) for number in range(sizes[axis])}
