"""Answers to 13.10 as students give them; answers/tensor.py takes them in."""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F

from manyhands.tensor import model as split_model
from manyhands.tensor.layers import my_range
from manyhands.tensor.vocabulary import vocab_cross_entropy


class InSteps(split_model.TensorParallel):
    """Written with two branches, narrow and matmul."""

    def forward(self, inputs, targets):
        length = inputs.size(1)
        places = self.positions(torch.arange(length))
        if self.sequence:
            size = length // dist.get_world_size(self.group)
            places = places.narrow(0, dist.get_rank(self.group) * size, size)
            with self.random.use():
                x = self.inside(inputs, places)
        else:
            x = self.inside(inputs, places)
        x = self.enter(self.norm(x), self.group)
        scores = (x @ self.tokens.weight.T).reshape(-1, len(self.tokens.mine))
        return vocab_cross_entropy(scores, targets.reshape(-1), self.tokens.mine, self.group)

    def inside(self, inputs, places):
        x = self.dropout(self.tokens(inputs) + places)
        for block in self.blocks:
            x = block(x)
        return x


class RandomByRank:
    """Own numbers from another seed than the course's."""

    def __init__(self, seed, device="cpu", group=None):
        common = torch.get_rng_state()
        torch.manual_seed(seed + dist.get_rank(group))
        self.state = torch.get_rng_state()
        torch.set_rng_state(common)

    @contextmanager
    def use(self):
        common = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(common)


class RandomInAFork:
    def __init__(self, seed, device="cpu", group=None):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1000 + dist.get_rank(group))
            self.state = torch.get_rng_state()

    @contextmanager
    def use(self):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            try:
                yield
            finally:
                self.state = torch.get_rng_state()


def by_range(kind):
    """A TensorParallel with the learner's own class of random numbers."""

    class ByRange(split_model.TensorParallel):
        def __init__(self, model, sequence=False, seed=0, group=None):
            super().__init__(model, sequence, seed, group)
            self.random = kind(seed, "cpu", group)

        def forward(self, inputs, targets):
            n = inputs.shape[1]
            r = my_range(n, 1, self.group) if self.sequence else range(n)
            with self.random.use() if self.sequence else nullcontext():
                x = self.tokens(inputs) + self.positions.weight[r.start : r.stop]
                x = self.dropout(x)
                for block in self.blocks:
                    x = block(x)
            x = self.enter(self.norm(x), self.group)
            scores = F.linear(x, self.tokens.weight).flatten(0, 1)
            return vocab_cross_entropy(scores, targets.flatten(), self.tokens.mine, self.group)

    return ByRange


def written(old: str, new: str) -> type:
    """The course's class, with another text in its forward."""
    lines = SOURCE.replace(old, new)
    assert lines != SOURCE, old
    names = dict(vars(split_model))
    exec(lines, names)
    return type("MyTensorParallel", (split_model.TensorParallel,), {"forward": names["forward"]})


def with_loss(lines: str) -> type:
    """`lines` make of `loss` what is returned."""
    start = SOURCE.index("    return vocab")
    new = SOURCE[start:].replace("return", "loss =") + lines
    return written(SOURCE[start:], new)


SOURCE = """
def forward(self, inputs, targets):
    places = self.positions.weight[: inputs.shape[1]]
    if self.sequence:
        n, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        places = places.chunk(n)[rank]
    with self.random.use() if self.sequence else nullcontext():
        x = self.dropout(self.tokens(inputs) + places)
        for block in self.blocks:
            x = block(x)
    x = self.enter(self.norm(x), self.group)
    scores = F.linear(x, self.tokens.weight).flatten(0, 1)
    return vocab_cross_entropy(scores, targets.flatten(), self.tokens.mine, self.group)
"""
OWN = "with self.random.use() if self.sequence else nullcontext()"
PLACES = "        places = places.chunk(n)[rank]\n"
LOSS = "return vocab_cross_entropy("
SUM = "self.dropout(self.tokens(inputs) + places)"
ENTER = "self.enter(self.norm(x), self.group)"
END = "self.tokens.mine, self.group)"

RIGHT = {"13.10": [split_model.TensorParallel, InSteps]}
RIGHT["13.10"] += [by_range(RandomByRank), by_range(RandomInAFork)]
WRONG = {
    "13.10": [
        (written(" + places", ""), "the positions are left out"),
        (
            written("self.dropout(self.tokens(inputs) + places)", "self.tokens(inputs) + places"),
            "self.dropout is left out",
        ),
        (written(OWN, "with nullcontext()"), "all ranks drop the same places"),
        (written(OWN, "with self.random.use()"), "they drop different places"),
        (written("x = block(x)", "block(x)"), "the blocks are left out"),
        (written("self.norm(x)", "x"), "the last norm is left out"),
        (written(PLACES, "        pass\n"), "a rank has T/N positions"),
        (
            written(
                "dist.get_rank(self.group)", "dist.get_rank() % dist.get_world_size(self.group)"
            ),
            "not in the group",
        ),
        (written("self.enter(self.norm(x), self.group)", "self.norm(x)"), "is a cut layer as well"),
        (
            written("self.enter(self.norm(x), self.group)", "self.norm(self.enter(x, self.group))"),
            "the norm comes before self.enter",
        ),
        (written("self.tokens.weight", "self.head.weight"), "the head's matrix is that"),
        (written(LOSS, "vocab_cross_entropy("), "not a scalar"),
        (written(LOSS, "return scores  # ("), "not a scalar"),
        (
            written("self.tokens.mine, self.group)", "self.tokens.mine, self.group).detach()"),
            "the loss has no graph",
        ),
        (written(LOSS, "return F.cross_entropy(scores, targets.flatten())  # ("), ""),
    ]
}

NOT_PASSED = "`self.group` is not passed on, so all ranks of the job take part"
WRONG["13.10"] += [
    (written(SUM, "self.dropout(self.tokens(inputs)) + places"), "dropout comes before the places"),
    (written("places.chunk(n)[rank]", "places.chunk(n)[0]"), "every rank adds the first T/N"),
    (
        written("places = places.chunk(n)[rank]", "places = places[: len(places) // n]"),
        "every rank adds the first T/N",
    ),
    (written(SUM, "self.dropout(self.tokens(inputs) + self.positions(inputs))"), "asked by place"),
    (
        written(PLACES, PLACES + "        inputs = inputs.chunk(n, dim=1)[rank]\n"),
        "self.tokens was given 4 of 12 tokens - it leaves each rank its positions",
    ),
    (written(ENTER, "self.enter(self.norm(x))"), NOT_PASSED),
    (written(END, "self.tokens.mine)"), NOT_PASSED),
    (
        written(
            SOURCE[SOURCE.index("    x = self.enter") :],
            SOURCE[SOURCE.index("    x = self.enter") :]
            .replace(ENTER, "self.enter(self.norm(x))")
            .replace(END, "self.tokens.mine)"),
        ),
        NOT_PASSED,
    ),
    (
        with_loss(
            "    dist.all_reduce(loss, group=self.group)\n"
            "    return loss / dist.get_world_size(self.group)\n"
        ),
        "averaged over the ranks once more",
    ),
    (
        with_loss(
            "    loss = SumOverRanks.apply(loss, self.group)\n"
            "    return loss / dist.get_world_size(self.group)\n"
        ),
        "averaged over the ranks once more",
    ),
    (
        with_loss("    dist.all_reduce(loss, group=self.group)\n    return loss\n"),
        "the loss is summed over the ranks once more",
    ),
    (
        with_loss("    return loss / dist.get_world_size(self.group)\n"),
        "the loss is divided by the ranks",
    ),
]
