"""Check of 13.10: the forward of a whole model that is cut over ranks. tensor.py joins it.

The course's own model is given the same weights, tokens and random numbers. Where the losses or the
gradients differ, both are computed once more with one mistake after the other, on all ranks of the
group, and the mistake that gives the same is named.
"""

import copy
import random
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from manyhands.checks import Lesson
from manyhands.checks._wrapping import Seen, in_ranks
from manyhands.checks.shared import Reasons
from manyhands.collectives.trees import Group
from manyhands.models.transformer import Transformer
from manyhands.tensor import model as split_model
from manyhands.tensor.vocabulary import vocab_cross_entropy

part = Lesson("tensor")

NUM_RANKS, V, T, D, B = 3, 11, 6, 24, 2
SIZES: Reasons = {
    "The size of tensor a": (
        "with self.sequence a rank has T/N positions, of tokens and of places",
        "cut the places by positions: places.chunk(n)[rank], in the group",
    ),
    "index out of range": (
        "self.positions has T rows, one for each place: it is asked by place, not by token",
        "its first T rows: self.positions.weight[:T]",
    ),
    "'NoneType' object": ("something that is used returns None", "return the loss"),
    "has no attribute 'head'": (
        "the head's matrix is that of the embedding, and this rank has its part",
        "F.linear(x, self.tokens.weight)",
    ),
    "Expected target size": (
        "the loss wants (tokens, V/N) scores and (tokens,) targets",
        "flatten(0, 1) of the scores, flatten() of the targets",
    ),
    "out of bounds": (
        "cross_entropy of F wants the scores of all tokens; a rank has its own",
        "vocab_cross_entropy",
    ),
}


class Change(NamedTuple):
    """What a forward does otherwise than it should."""

    positions: bool = True
    dropout: bool = True
    own: bool | None = None  # draw from the rank's own numbers; None: as it should be
    blocks: bool = True
    norm: bool = True
    enter: str = "after"  # the norm; or before it, or never
    part: str = "group"  # that of the rank in the group; or in the job, or always the first
    dropout_first: bool = False  # before the places are added
    enter_job: bool = False  # all ranks of the job take part
    loss_job: bool = False
    mean: str = ""  # what happens to the loss: summed, divided or averaged over the ranks


NO_GROUP = (
    "`self.group` is not passed on, so all ranks of the job take part",
    "self.group to self.enter, and as the last argument of the loss",
)
IS_MEAN = "return what vocab_cross_entropy gives: it is the same on every rank already"
MISTAKES: dict[Change, tuple[str, str]] = {
    Change(positions=False): ("the positions are left out", "add places to self.tokens(inputs)"),
    Change(dropout=False): ("self.dropout is left out", "self.dropout(embeddings + places)"),
    Change(own=False): (
        "all ranks drop the same places of their parts",
        "with self.sequence: inside `with self.random.use():`",
    ),
    Change(own=True): (
        "without self.sequence each rank has a copy of x, and they drop different places",
        "self.random.use() only where self.sequence",
    ),
    Change(blocks=False): ("the blocks are left out", "x = block(x) for each of self.blocks"),
    Change(norm=False): ("the last norm is left out", "self.norm(x) before the scores"),
    Change(dropout_first=True): (
        "dropout comes before the places are added: they are never dropped",
        "self.dropout(embeddings + places)",
    ),
    Change(part="first"): (
        "every rank adds the first T/N places",
        "the part of this rank: my_range, or places.chunk(n)[rank]",
    ),
    Change(part="job"): (
        "the rank is that among all ranks of the job, not in the group",
        "dist.get_rank(self.group)",
    ),
    Change(enter="never"): (
        "the head is a cut layer as well: x has to go in through self.enter",
        "self.enter(self.norm(x), self.group)",
    ),
    Change(enter="before"): (
        "the norm comes before self.enter: its copies see their own positions only",
        "self.enter(self.norm(x), self.group)",
    ),
    Change(enter_job=True): NO_GROUP,
    Change(loss_job=True): NO_GROUP,
    Change(enter_job=True, loss_job=True): NO_GROUP,
    Change(mean="averaged"): (
        "the loss is averaged over the ranks once more, which divides every gradient by N",
        IS_MEAN,
    ),
    Change(mean="divided"): ("the loss is divided by the ranks", IS_MEAN),
    Change(mean="summed"): ("the loss is summed over the ranks once more", IS_MEAN),
}


def _forward(
    model: split_model.TensorParallel, inputs: Tensor, targets: Tensor, change: Change
) -> Tensor:
    """The course's forward, with one thing changed."""
    n, rank = dist.get_world_size(model.group), dist.get_rank(model.group)
    places = model.positions.weight[: inputs.shape[1]]
    if model.sequence:
        part = {"group": rank, "job": dist.get_rank() % n, "first": 0}[change.part]
        places = places.chunk(n)[part]
    places = places if change.positions else 0
    own = model.sequence if change.own is None else change.own
    drop = model.dropout if change.dropout else torch.nn.Identity()
    with model.random.use() if own else nullcontext():
        x = model.tokens(inputs)
        x = drop(x) + places if change.dropout_first else drop(x + places)
        for block in model.blocks if change.blocks else ():
            x = block(x)
    enter_group = None if change.enter_job else model.group
    if change.enter == "before":
        x = model.enter(x, enter_group)
    x = model.norm(x) if change.norm else x
    if change.enter == "after":
        x = model.enter(x, enter_group)
    scores = F.linear(x, model.tokens.weight).flatten(0, 1)
    loss_group = None if change.loss_job else model.group
    loss = vocab_cross_entropy(scores, targets.flatten(), model.tokens.mine, loss_group)
    if change.mean == "summed":  # in place: backward knows nothing of it
        return loss + ((n - 1) * loss).detach()
    divided = loss / n if change.mean else loss
    return divided + (loss - divided).detach() if change.mean == "averaged" else divided


Result = tuple[Tensor, dict[str, Tensor]]


def _run(model: torch.nn.Module, call, seed: int) -> Result:
    """Loss and gradients, from one seed of the common random numbers."""
    torch.manual_seed(seed)
    loss = call(model)
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        words = ("not the mean loss of all tokens", "return what vocab_cross_entropy gives")
        raise Seen("\n".join([f"forward returns {what}, not a scalar", *words]))
    if not loss.requires_grad:
        words = ("backward cannot go through it", "return the tensor itself, with its graph")
        raise Seen("\n".join(["the loss has no graph", *words]))
    loss.backward()
    model.finish_gradients()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return loss.detach(), {name: grad for name, grad in grads.items() if grad is not None}


def _differ(one: Result, other: Result) -> list[str]:
    """What differs on some rank of the job: "the loss", or names of gradients."""
    names = ["the loss", *other[1]]
    pairs = [(one[0], other[0]), *((one[1].get(name), grad) for name, grad in other[1].items())]
    close = [a is not None and torch.allclose(a, b, atol=1e-6, rtol=1e-4) for a, b in pairs]
    flags = torch.tensor([0 if same else 1 for same in close])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]


def _look(answer, seed: int) -> bool:
    """All ranks, and then two groups; with and without sequence; with dropout.

    Rank 0 is a group of its own, so that one who forgets the group gets wrong numbers, not a hang.
    """
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    mine = groups[dist.get_rank() > 0]
    for group, dropout in ((None, 0.0), (None, 0.5), (mine, 0.0)):
        for sequence in (False, True):
            _case(answer, seed, group, sequence, dropout)
    return True


def _watch_inputs(tokens: torch.nn.Module) -> None:
    """End this rank where the embedding is asked for a part of the tokens only."""

    def look(_: torch.nn.Module, given: tuple) -> None:
        if isinstance(given[0], Tensor) and given[0].numel() < B * T:
            seen = f"self.tokens was given {given[0].numel()} of {B * T} tokens"
            smell = "it leaves each rank its positions: the ranks' parts of all tokens are summed"
            raise Seen("\n".join([seen, smell, "self.tokens(inputs), and cut the places only"]))

    tokens.register_forward_pre_hook(look)


def _case(answer, seed: int, group: Group, sequence: bool, dropout: float) -> None:
    torch.manual_seed(seed)
    whole = Transformer(V, T, 2, heads=3, width=D, dropout=dropout)
    with torch.no_grad():
        whole.norm.weight.uniform_(0.5, 1.5)  # else leaving it out could pass
        whole.positions.weight.normal_()
    inputs, targets = torch.randint(V, (2, B, T))
    inputs[0, 0] = V - 1  # no place has this number

    def result(call) -> Result:
        model = answer(copy.deepcopy(whole), sequence, seed, group)
        if isinstance(getattr(model, "tokens", None), torch.nn.Module):
            _watch_inputs(model.tokens)
        return _run(model, call, seed + 1)  # with the learner's own random numbers

    def changed(change: Change) -> Result:
        return result(lambda model: _forward(model, inputs, targets, change))

    found = result(lambda model: model(inputs, targets))
    wrong = _differ(found, changed(Change()))
    if not wrong:
        return
    where = "ranks 1 and 2 as a group" if group else f"{NUM_RANKS} ranks"
    with_what = f"{where}, sequence={sequence}, dropout {dropout}"
    what = wrong[0] if wrong[0] == "the loss" else f"the loss is right, the gradient of {wrong[0]}"
    seen = f"{what} is not that of the whole model ({with_what})"
    for change, words in MISTAKES.items():
        of_group = change.part == "job" or change.enter_job or change.loss_job
        if of_group != (group is not None):
            continue  # the cases before would have shown it, or it shows in a group only
        if sequence and (change.enter == "never" or change.enter_job or change.loss_job):
            continue  # its ranks would send each other other sizes
        if not _differ(found, changed(change)):
            raise Seen("\n".join([seen, *words]))
    raise Seen("\n".join([seen, "", "embed, add places, drop, blocks, norm, enter, scores, loss"]))


@part.exercise(
    "13.10",
    "self.tokens(inputs) are the embeddings, already summed over the ranks. The places are the "
    "first T rows of self.positions.weight.",
    "With self.sequence the embeddings are those of this rank's T/N positions, so take that part "
    "of the places, too, and go from dropout to the last block inside `with self.random.use():`.",
    "After the norm self.enter brings x to all ranks. The scores are F.linear(x, "
    "self.tokens.weight), and vocab_cross_entropy takes them with self.tokens.mine.",
)
def TensorParallel(answer) -> None:
    """Two groups, with and without sequence parallelism and dropout, loss and all gradients."""
    in_ranks(_look, NUM_RANKS, answer, random.randrange(1, 10_000), reasons=SIZES)
