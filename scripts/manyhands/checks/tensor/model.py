"""Specs of 13.10 to 13.12 and 13.14: a whole model, who gets which data, a step's messages."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Call, Place, Spec
from manyhands.checks.engine.values import integer, listing, record
from manyhands.checks.tensor.common import as_module, as_result, costs_no_more
from manyhands.instruments.ledger import Ledger
from manyhands.models.transformer import Transformer
from manyhands.tensor import model, sequence

# ---- 13.10 ----------------------------------------------------------------------------------

ADDED = "self.dropout(self.tokens(inputs) + {})"
WITH_PLACES = ADDED.format("self.positions.weight[: inputs.shape[1]]")
ENTERED = "self.enter(self.norm(self.through_blocks(inputs)), self.group)"
LOSS = "vocab_cross_entropy(scores, targets.flatten(), self.tokens.mine, self.group)"
RANKS = "dist.get_world_size(self.group)"


class Batch(NamedTuple):
    """How the model is made and called."""

    dropout: float
    training: bool
    seed: int


def batches(n: int) -> list[Batch]:
    """In eval, where nothing is dropped; and with dropout."""
    return [Batch(0.5, False, cases.draw_seed()), Batch(0.5, True, cases.draw_seed())]


class Numbers:
    """This rank's own random numbers, the same for every answer."""

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Draw from them in the block."""
        common = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(common)


def transformer(seed: int, n: int, dropout: float) -> nn.Module:
    """A small model with weights that are not small; it takes more positions than it is given."""
    made = cases.build(seed, lambda: Transformer(2 * n + 5, 3 * n, 1, 3, 12, dropout))
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn_like(param) * 0.4)
    return made.double()


def model_seen(answer: object, case: Batch, place: Place) -> dict:
    """The loss and all gradients of one batch, the messages, and the common random numbers."""
    seed = case.seed + place.members[0]
    given = transformer(seed, place.n, case.dropout)
    cut = as_module(answer(given, **place.options))
    cut.train(case.training)
    cut.random = Numbers(seed + 1000 * (1 + place.rank))
    draw = cases.generator(seed)
    inputs, targets = torch.randint(2 * place.n + 5, (2, 2, 2 * place.n), generator=draw)
    before = inputs.clone()
    torch.manual_seed(seed)
    with Ledger() as ledger:
        hidden = as_result(cut.through_blocks(inputs))
        seen = {"what through_blocks gives": hidden.detach()}
        seen["the common random number that comes next"] = torch.rand(()).item()
        loss = cut(inputs, targets)
        seen |= {"the loss": as_result(loss), "the loss has a gradient": loss.requires_grad}
        if loss.requires_grad:
            loss.sum().backward()
            cut.finish_gradients()
    for name, param in cut.named_parameters():
        seen[f"the gradient of {name}"] = param.grad
    seen["inputs are unchanged"] = torch.equal(inputs, before)
    seen["all modules are in train or eval as before"] = all(
        module.training == case.training for module in cut.modules()
    )
    seen["messages"] = len(ledger.entries)
    return seen


def tell_batch(case: Batch) -> str:
    """A case in words."""
    return f"a model with dropout {case.dropout} in {'train' if case.training else 'eval'}"


tensor_parallel = Spec(
    todo="13.10",
    truth=model.TensorParallel,
    at_once=5,
    layouts=cases.THREE,
    cases=batches,
    observe=model_seen,
    same=costs_no_more("messages"),
    limit_s=12.0,  # a whole model, forward and backward
    mistake_s=2.0,
    tell=tell_batch,
    advice={"": "In turn: embed, add places, drop, blocks, norm, enter, scores, loss."},
    hints=(
        "through_blocks: self.tokens(inputs) are the embeddings, already summed over the ranks. "
        "Those of the T positions are the first T rows of self.positions.weight. Add, drop out, "
        "and go through self.blocks.",
        "forward: self.norm, and then self.enter(x, self.group), because the head is cut by "
        "columns.",
        "The scores are F.linear(x, self.tokens.weight), flattened to (B T, V/N), and "
        "vocab_cross_entropy takes them with targets.flatten(), self.tokens.mine and self.group.",
    ),
    mistakes="""
        {WITH_PLACES} => self.dropout(self.tokens(inputs)) ::
            The positions are left out. | Add them to self.tokens(inputs).
        {WITH_PLACES} => self.tokens(inputs) + self.positions.weight[: inputs.shape[1]] ::
            self.dropout is left out. | {WITH_PLACES}
        {WITH_PLACES} => self.dropout(self.tokens(inputs)) + self.positions.weight[:inputs.shape[1]]
            :: Dropout comes before the places are added, so they are never dropped.
        x = block(x) => block(x) :: The blocks' results are not used. | x = block(x)
        {ENTERED} => self.enter(self.through_blocks(inputs), self.group) ::
            The last norm is left out. | {ENTERED}
        {ENTERED} => self.norm(self.through_blocks(inputs)) ::
            x does not go through self.enter, and the head is a cut layer as well.
        [: inputs.shape[1]] => [-inputs.shape[1] :] ::
            The last T rows of the positions are taken. | Take the first ones.
        {LOSS} => {LOSS} / {RANKS} :: The loss is divided by the number of ranks. | Return what
            vocab_cross_entropy gives: it is the same on every rank already.
        {LOSS} => SumOverRanks.apply({LOSS}, self.group) ::
            The loss is summed over the ranks once more.
        {LOSS} => SumOverRanks.apply({LOSS}, self.group) / {RANKS} ::
            The loss is averaged over the ranks once more, and every gradient is divided.
    """,
    reasons="""
        has no attribute 'head' :: This model has no head: its matrix is that of the embedding. |
            F.linear(x, self.tokens.weight)
    """,
    module=globals(),
)

# ---- 13.14 ----------------------------------------------------------------------------------

OWN_ADDED = ADDED.format("places")
MY_PLACES = "places = self.positions.weight[: inputs.shape[1]].chunk(n)[rank]"
OWN_PLACES = "Take this rank's part: self.positions.weight[:T].chunk(n)[rank]."

tensor_sequence_parallel = Spec(
    todo="13.14",
    truth=sequence.TensorSequenceParallel,
    at_once=5,
    layouts=cases.THREE,
    cases=batches,
    observe=model_seen,
    same=costs_no_more("messages"),
    limit_s=12.0,
    mistake_s=2.0,
    tell=tell_batch,
    advice={"": "In turn: embed, add this rank's places, drop, blocks; all with self.random."},
    hints=(
        "self.tokens(inputs) already has this rank's T/N positions only, because its `leave` is a "
        "reduce-scatter. Which rows of self.positions.weight belong to them?",
        "T is inputs.shape[1]. The first T rows, cut into as many parts as the group has ranks, "
        "with .chunk(n), and of these the part of this rank in the group.",
        "Everything that drops, from self.dropout to the last block, goes inside "
        "`with self.random.use():`. Else it is through_blocks of TensorParallel.",
    ),
    mistakes="""
        {OWN_ADDED} => self.dropout(self.tokens(inputs)) ::
            The positions are left out. | Add this rank's part of them to self.tokens(inputs).
        {OWN_ADDED} => self.tokens(inputs) + places :: self.dropout is left out. | {OWN_ADDED}
        {OWN_ADDED} => self.dropout(self.tokens(inputs)) + places ::
            Dropout comes before the places are added, so they are never dropped.
        with self.random.use() => if True ::
            All ranks drop the same places of their parts. | Use `with self.random.use():` there.
        x = block(x) => block(x) :: The blocks' results are not used. | x = block(x)
        .chunk(n)[rank] => .chunk(n)[0] :: Every rank adds the first T/N places. | {OWN_PLACES}
        .chunk(n)[rank] => .chunk(n)[dist.get_rank() % n] :: The rank that is used is the one in the
            job, not the one in the group. | dist.get_rank(self.group)
        .chunk(n)[rank] => .chunk(n)[n - 1 - rank] ::
            The parts are taken in reverse order. | {OWN_PLACES}
        {MY_PLACES} => places = self.positions.weight.chunk(n)[rank][: inputs.shape[1] // n] ::
            The whole table is cut into parts, and it can have more than T rows.
        {MY_PLACES} => places = self.positions.weight[rank : inputs.shape[1] : n] ::
            A rank's positions follow one another, and these are every N-th.
        for block in self.blocks => for block in list(self.blocks)[:-1] ::
            The last block is left out. | for block in self.blocks: x = block(x)
    """,
    module=globals(),
)

# ---- 13.11 ----------------------------------------------------------------------------------

SHARE = "rank // tensor_ranks, "
SHARES = "world_size // tensor_ranks\n"
CONSECUTIVE = "Consecutive ranks hold one model: rank // tensor_ranks."


def ranks_of_jobs() -> list[Call]:
    """Every rank of small and large jobs, in groups of one, of some, of all; groups that fail."""
    large = random.randint(4, 9)
    jobs = [(1, 1), (5, 1), (6, 6), (8, 2), (12, 3), (16 * large, large)]
    found = [(rank, *job) for job in jobs for rank in range(min(job[0], 40))]
    return [*found, (0, 8, 3), (1, 2, 4), (99, 100, 8)]


data_place = Spec(
    todo="13.11",
    truth=model.data_place,
    cases=ranks_of_jobs,
    form=listing(integer, "two whole numbers"),
    advice={"": CONSECUTIVE},
    refusal=("Some ranks are left without a group.", "Raise ValueError."),
    hints=(
        "With 2 ranks per model, ranks 0 and 1 hold one model, ranks 2 and 3 the next. How many "
        "models are there? Of which one is this rank a part?",
        "Number of the share: rank // tensor_ranks. Number of shares: world_size // tensor_ranks.",
    ),
    mistakes=r"""
        {SHARE} => rank,
        {SHARES} => world_size\n :: Every rank gets a share of its own, also those that hold one
            model. | Ranks of one model have to see the same batch: rank // tensor_ranks.
        {SHARE} => rank % tensor_ranks, ::
            The first number is the rank's place inside its group. | {CONSECUTIVE}
        {SHARE} => rank % tensor_ranks,
        {SHARES} => tensor_ranks\n ::
            These are the rank's place inside its group, and the group's size.
        {SHARE} => rank % (world_size // tensor_ranks), ::
            The models are taken to be on ranks that are not consecutive.
        {SHARES} => world_size\n :: There are fewer shares than ranks. | world_size // tensor_ranks
        {SHARES} => tensor_ranks\n ::
            The second number is the size of a group, not the number of groups.
        {SHARE} => rank // (world_size // tensor_ranks), ::
            The rank is divided by the number of groups, not by their size. | {CONSECUTIVE}
        {SHARE} => world_size // tensor_ranks,
        {SHARES} => rank // tensor_ranks\n ::
            The two numbers have changed places. | First comes the number of the share.
        {SHARE} => rank // tensor_ranks + 1, :: Shares are counted from 1. | Count them from 0.
        {SHARE} => world_size // tensor_ranks - 1 - rank // tensor_ranks, ::
            The shares are in reverse order. | Rank 0 has share 0.
        if world_size % tensor_ranks => if False ::
            Some ranks are left without a group. | Raise ValueError.
    """,
    module=globals(),
)

# ---- 13.12 ----------------------------------------------------------------------------------

OPS = ("all_reduce", "all_gather", "reduce_scatter")
EACH_WAY = "2 * num_blocks + 1"
PLAIN = '"all_reduce": 2 + 2 * each_way'
WITH_SEQUENCE = '"all_reduce": 2 + 1'
BOTH_HALVES = '"all_gather": 2 * each_way, "reduce_scatter": 2 * each_way'
BOTH_WAYS = "Each way it is 2L + 1: forward and backward 2 (2L + 1)."
OF_LOSS = "The loss adds 2: the maximum, and both sums in one message."


def as_counts(value: object) -> dict:
    """A dict of the three names; a Counter holds 0 for what is not in it."""
    if isinstance(value, Counter):
        value = Counter({name: 0 for name in OPS}) | value
        value = {name: value[name] for name in {*OPS, *value}}
    return record(OPS, integer)(value)


def numbers_of_blocks() -> list[Call]:
    """None, one, some and many, without and with sequence parallelism."""
    numbers = [0, 1, random.randint(2, 9), random.randint(10, 99)]
    return [(number, sequence) for sequence in (False, True) for number in numbers]


calls_per_step = Spec(
    todo="13.12",
    truth=model.calls_per_step,
    cases=numbers_of_blocks,
    form=as_counts,
    independent=True,
    advice={"": "Count by the picture: what sums over the ranks, and when?"},
    hints=(
        "Forward, what is left by rows sums: the embedding, and in each block the attention and "
        "the MLP. Backward, what is entered sums: in each block two, and the head.",
        "Each way that is 2L + 1. The loss has 2 more all-reduces, forward only.",
        "With sequence parallelism each of these all-reduces is one all_gather and one "
        "reduce_scatter, forward and backward; the loss keeps its 2, and finish_gradients has 1.",
    ),
    mistakes="""
        {PLAIN} => "all_reduce": 2 + each_way ::
            Without sequence parallelism only one way is counted. | {BOTH_WAYS}
        {BOTH_HALVES} => "all_gather": each_way, "reduce_scatter": each_way ::
            With sequence parallelism only one way is counted.
        {PLAIN} => "all_reduce": 2 * each_way ::
            The loss's two all-reduces are left out. | {OF_LOSS}
        {EACH_WAY} => 2 * num_blocks :: Only the blocks are counted: forward the embedding sums as
            well, and backward the head. | {BOTH_WAYS}
        {EACH_WAY} => 4 * num_blocks + 1 ::
            This counts every linear layer of a block, and only two of the four sum each way.
        {PLAIN} => "all_reduce": 3 + 2 * each_way :: This is one all-reduce too many without
            sequence parallelism. | finish_gradients sums nothing there. {OF_LOSS}
        {PLAIN} => "all_reduce": 4 + 2 * each_way ::
            These are two all-reduces too many: embedding and head sum one way each.
        {WITH_SEQUENCE} => "all_reduce": 2 :: One all-reduce is missing: finish_gradients sums the
            norms' and positions' gradients. | 2 + 1
        {WITH_SEQUENCE} => "all_reduce": 1 :: The loss's two all-reduces are left out. | {OF_LOSS}
        {WITH_SEQUENCE} => "all_reduce": 2 + 2 * each_way ::
            With sequence parallelism the all-reduces between the layers are counted as well. | An
            all_gather and a reduce_scatter take the place of each.
        {BOTH_HALVES} => "all_gather": 0, "reduce_scatter": 0 :: With sequence parallelism each
            all-reduce became an all_gather and a reduce_scatter. | {BOTH_WAYS}
        {WITH_SEQUENCE} => "all_reduce": 4 ::
            With sequence parallelism this is one all-reduce too many. | {OF_LOSS}
    """,
    module=globals(),
)
