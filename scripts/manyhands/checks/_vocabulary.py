"""Checks of lesson 13, second part: 13.5 to 13.9, and 13.13. tensor.py joins them.

Here are 13.5, 13.6 and 13.13; 13.7 to 13.9 stand in _sequence.py, with what all of them share.
"""

import logging
import math
import random
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module

from manyhands.checks import Lesson, _sequence
from manyhands.checks._sequence import (
    NUM_RANKS,
    GatherSequence,
    Guard,
    Mistakes,
    OwnRandom,
    Place,
    compare,
    draw,
    places,
    quiet,
    refuse,
    sum_gradients,
)
from manyhands.checks._wrapping import in_ranks
from manyhands.checks.shared import Reasons
from manyhands.collectives.trees import Group
from manyhands.instruments.ledger import Ledger, calls
from manyhands.models.transformer import Transformer
from manyhands.tensor import dtensor as course
from manyhands.tensor.layers import my_range

__all__ = [
    "GatherSequence",
    "OwnRandom",
    "VocabEmbedding",
    "part",
    "plan",
    "sum_gradients",
    "vocab_cross_entropy",
]

part = Lesson("tensor")

# ---- 13.5 -----------------------------------------------------------------------------------

VOCAB, WIDTH = 7, 4
ALL_GRADIENTS = (
    "the sum over ranks is used once, so its backward passes the gradient on as it is",
    "take `leave`, whose backward does not sum again",
)
NOT_SHIFTED = (
    "tokens count over the whole vocabulary, the rows of a part from 0",
    "inputs - self.mine.start",
)
PAST_THE_END = (
    "mine.stop is the first token of the next rank, not the last one of this",
    "inputs < self.mine.stop",
)
NOT_MASKED = (
    "other ranks have these tokens, so their rows must be zero here, or the sum is wrong",
    "multiply the rows by a mask that is 1 for tokens of `mine`",
)
TOO_LATE = (
    "a mask on the rows is too late: the lookup itself needs indices that exist",
    "torch.where(is_mine, inputs - self.mine.start, 0), and mask the rows afterwards",
)
SENDS = (
    "`leave` sums the ranks' parts; sequence parallelism hands over another one",
    "self.leave(part, self.group), once, and no all_reduce",
)
EMBEDDING: Reasons = {
    "has no attribute 'apply'": ("`leave` is a function already", "self.leave(part, self.group)"),
    "missing 1 required positional argument: 'group'": (
        "leave takes two arguments",
        "self.leave(part, self.group)",
    ),
    "before Module.__init__": ("nn.Module has to be set up first", "super().__init__()"),
}


@part.exercise(
    "13.5",
    "__init__: `mine` comes from my_range, `weight` from my_part along dimension 0; one row is one "
    "token, so the unit is 1.",
    "forward: which tokens are in `mine`? The row of such a token is token - mine.start. The "
    "others need some row that exists, such as 0, and then a factor of 0.",
    "F.embedding(rows, self.weight) is (B, T, D) and the mask (B, T): unsqueeze(-1) makes it fit. "
    "At the end self.leave(part, self.group).",
)
def VocabEmbedding(answer) -> None:
    """Seven tokens on 3 ranks, and on ranks 1 and 2 of 3."""
    in_ranks(_look_at_embeddings, NUM_RANKS, answer, random.randrange(10_000), reasons=EMBEDDING)


def _look_at_embeddings(answer, seed: int) -> bool:
    for place in places():
        torch.manual_seed(seed)
        embedding = nn.Embedding(VOCAB, WIDTH)
        mine = my_range(VOCAB, 1, place.group)
        leave = Leave(place)
        module = answer(embedding, leave=leave, group=place.group)
        _look_at_rows(module, embedding, mine, place)
        _look_at_lookup(module, leave, embedding, mine, place)
        _look_at_sum(answer(embedding, group=place.group), embedding, mine, place, seed)
    return True


class Leave:
    """Doubles the part instead of summing over ranks, and sends no message."""

    def __init__(self, place: Place) -> None:
        self.place, self.parts = place, []

    def __call__(self, part: Tensor, *args: Group, **kwargs: Group) -> Tensor:
        groups = [*args, *kwargs.values()]
        if len(groups) != 1 or groups[0] is not self.place.group:
            smell = "another group is summed than the one that holds the embedding"
            refuse(f"{self.place.told}: leave was called without this group", smell, "self.group")
        self.parts.append(part)
        return 2 * part


def _look_at_rows(module: nn.Module, embedding: nn.Embedding, mine: range, place: Place) -> None:
    at = f"{place.told}, {VOCAB} tokens"
    if not isinstance(module, nn.Module):
        refuse(f"{at}: the answer makes {type(module).__name__}", "", "a class of nn.Module")
    weight, found = getattr(module, "weight", None), getattr(module, "mine", None)
    if not isinstance(weight, nn.Parameter):
        shown = f"a {type(weight).__name__}"
        refuse(f"{at}: self.weight is {shown}", "only an nn.Parameter is trained", "my_part")
    mistakes = [(embedding.weight, "that is the whole matrix", "only the rows of `mine`")]
    hint = "my_part(embedding.weight, 0, 1, group)"
    smell = f"its rows have to be those of tokens {mine.start} to {mine.stop - 1}"
    compare(
        weight, embedding.weight[mine.start : mine.stop], f"{at}: weight", mistakes, smell, hint
    )
    if weight.untyped_storage().nbytes() > weight.nbytes:
        smell = "a view keeps the memory of the whole matrix"
        refuse(f"{at}: {weight.untyped_storage().nbytes()} bytes are kept", smell, hint)
    num = sum(param.numel() for param in module.parameters())
    if num != weight.numel():
        smell = "the whole embedding is still in the module, and so in memory"
        refuse(f"{at}: {num} parameters, not {weight.numel()}", smell, "keep the rows only")
    if not weight.requires_grad:
        refuse(f"{at}: self.weight wants no gradient", "from_pretrained freezes", hint)
    if (getattr(found, "start", None), getattr(found, "stop", None)) != (mine.start, mine.stop):
        smell = "the tokens whose rows this rank has: the first one, and the one after the last"
        refuse(f"{at}: self.mine is {found!r}, not {mine}", smell, "my_range(num, 1, group)")


def _look_at_lookup(
    module: nn.Module, leave: Leave, embedding: nn.Embedding, mine: range, place: Place
) -> None:
    """The part of a rank, for its own tokens and for others; no message is needed for it."""
    others = [token for token in range(VOCAB) if token not in mine]
    nexts = [mine.stop] if mine.stop < VOCAB else others
    silent = (f"{place.told} sends a message of its own", *SENDS)
    with Guard(place, silent):
        past = _takes_no_more_than(module, leave, nexts, others)
    for tokens, why, why_error in (
        (list(mine), NOT_SHIFTED, NOT_SHIFTED),
        (nexts, *([PAST_THE_END] * 2 if past else [NOT_MASKED, TOO_LATE])),
        (others, NOT_MASKED, TOO_LATE),
    ):
        inputs = torch.tensor((tokens * 8)[:8]).view(2, 4)
        before, leave.parts = inputs.clone(), []
        said = f"{place.told} has tokens {mine.start} to {mine.stop - 1}; of tokens {tokens}"
        try:
            with Guard(place, silent):
                out = module(inputs)
        except IndexError:
            refuse(f"{said} it looks up a row that it has not", *why_error)
        if not torch.equal(inputs, before):
            refuse(f"{place.told}: the caller's inputs were changed", "", "a new tensor, no _()")
        if len(leave.parts) != 1:
            refuse(f"{place.told} called leave {len(leave.parts)} times", *SENDS)
        is_mine = torch.tensor([token in mine for token in inputs.flatten().tolist()]).view(2, 4)
        wanted = embedding(inputs).detach() * is_mine.unsqueeze(-1)
        n = len(place.ranks)
        mean = ("the others' parts are zero: their sum is the embedding, not a mean", "no division")
        compare(leave.parts[0], wanted, f"{said} its part", [(wanted / n, *mean)], *why)
        unused = ("what leave returns is not used", "return self.leave(part, self.group)")
        table = [(wanted, *unused), (2 * wanted / n, *mean)]
        compare(out, 2 * wanted, f"{place.told}: the result", table, *unused)


def _takes_no_more_than(
    module: nn.Module, leave: Leave, nexts: list[int], others: list[int]
) -> bool:
    """Are all other ranks' tokens zero, but for `nexts`?"""
    rest = torch.tensor([[token for token in others if token not in nexts] or nexts])
    try:
        module(rest)
    except IndexError:
        return False
    return bool(leave.parts) and not leave.parts[-1].any()


def _look_at_sum(
    module: nn.Module, embedding: nn.Embedding, mine: range, place: Place, seed: int
) -> None:
    """Values, and the gradient of the rows, with messages."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.cat([torch.randperm(VOCAB, generator=generator), torch.tensor([0, 3, 3])])
    inputs, scale = inputs.view(2, 5), draw(seed, 2, 5, WIDTH)
    embedding.zero_grad()
    wanted = embedding(inputs)
    (wanted * scale).sum().backward()
    n, grad = len(place.ranks), embedding.weight.grad[mine.start : mine.stop]
    with Guard(place):
        found = module(inputs)
    hint = "self.leave(part, self.group)"
    compare(found, wanted, f"{place.told}: the embeddings", [], "the sum over ranks", hint)
    if not found.requires_grad:
        smell = "it was detached, or looked up under torch.no_grad()"
        hint = "no no_grad(), .detach() or .data on the way: the rows want their gradient"
        refuse(f"{place.told}: the result has no gradient", smell, hint)
    with Guard(place):
        (found * scale).sum().backward()
    what = f"{place.told}: the gradient of weight"
    compare(module.weight.grad, grad, what, [(n * grad, *ALL_GRADIENTS)], *ALL_GRADIENTS)


# ---- 13.6 -----------------------------------------------------------------------------------

LOSS_CASES = [(7, 1, torch.float32), (31, 200, torch.float32), (8, 1, torch.float64)]
LOSS: Reasons = {
    "return_types.max": (
        "max(dim=-1) gives a pair: the largest scores, and where they stand",
        "scores.amax(-1), or .max(dim=-1).values",
    ),
    "a leaf Variable that requires grad": (
        "the caller's scores would be changed in place",
        "scores = scores - ... makes a new tensor",
    ),
    "modified by an inplace operation": (
        "a tensor that backward still needs was changed in place",
        "reduce a clone, or use SumOverRanks.apply",
    ),
    "out of bounds": (
        "the targets of other ranks have no column in this part",
        "column 0 for those, and a factor of 0 afterwards",
    ),
    "out of range": (
        "the targets of other ranks have no column in this part",
        "column 0 for those, and a factor of 0 afterwards",
    ),
    "incomplete type Tensor": ("all_reduce works in place, and returns None", "use its tensor"),
    "'NoneType' object": ("all_reduce works in place, and returns None", "use its tensor"),
    "different size or type": (
        "the ranks send tensors of different sizes; parts of the vocabulary may be uneven",
        "numbers of each token are sent, (tokens,), not the scores",
    ),
}
OWN_MAXIMUM = (
    "each rank subtracted its own largest score, so their sums do not fit together",
    "all_reduce the maximum with op=dist.ReduceOp.MAX before you subtract it",
)
LOG_FIRST = ("log(a) + log(b) is not log(a + b)", "sum over ranks first, then the log")
OTHERS_TARGETS = (
    "targets of other ranks are counted as well, with a column that is not theirs",
    "multiply by a mask: is the target in `mine`?",
)
OWN_SUM = ("only this rank's part was summed", "both sums go over all ranks: SumOverRanks")
OVERFLOW = (
    "exp(89) is more than float32 holds, and the log of a sum of zeros is -inf: the largest score "
    "of all ranks was not subtracted",
    "all_reduce the maximum with op=dist.ReduceOp.MAX, then subtract it from all scores",
)
ONE_MAXIMUM = (
    "one largest score was taken for all tokens: where a token's own scores lie far below it, "
    "their exp is 0",
    "one for each token: scores.detach().amax(-1), of shape (tokens,)",
)
BITS = ("log2 counts bits, and the loss is in nats", "torch.log, as exp has base e")
THREE_MESSAGES = (
    "right, but each message has a latency of its own; one is enough for both sums",
    "torch.stack both of a rank's parts, and one SumOverRanks.apply",
)
THROUGH_MAXIMUM = (
    "a gradient goes through the maximum: on one rank it does not cancel",
    "scores.detach().amax(-1)",
)


@part.exercise(
    "13.6",
    "The maximum first: of this rank's detached scores for each token, then an all_reduce with "
    "op=dist.ReduceOp.MAX. Subtract it from the scores with unsqueeze(-1).",
    "Two numbers for each token: the sum of exp over this rank's columns, and the score of the "
    "target, or 0 where another rank has the target. gather needs a column that exists.",
    "Both are parts of a sum, and travel in one message: torch.stack them, so that the step has "
    "two all-reduces, and SumOverRanks.apply(parts, group). Then (log(sum) - score).mean().",
)
def vocab_cross_entropy(answer) -> None:
    """Uneven vocabularies of 7, 31 and 8 on 3 ranks, and on ranks 1 and 2; scores around 200."""
    in_ranks(_look_at_losses, NUM_RANKS, answer, random.randrange(10_000), reasons=LOSS)


def _look_at_losses(answer, seed: int) -> bool:
    quiet()
    for place in places():
        for vocab, scale, dtype in LOSS_CASES:
            generator = torch.Generator().manual_seed(seed)
            targets = torch.randperm(vocab, generator=generator)  # each rank has some
            scores = scale * draw(seed, vocab, vocab, dtype=dtype)
            said = f"{place.told}, {vocab} tokens, scores around {scale}, {dtype}"
            _look_at_loss(answer, scores, targets, place, said.replace("torch.", ""))
    return True


def _look_at_loss(answer, scores: Tensor, targets: Tensor, place: Place, said: str) -> None:
    mine = my_range(scores.shape[1], 1, place.group)
    whole = scores.clone().requires_grad_()
    F.cross_entropy(whole, targets).backward()
    wanted = F.cross_entropy(scores, targets)
    leaf = scores[:, mine.start : mine.stop].clone().requires_grad_()
    before, given = leaf.detach().clone(), targets.clone()
    with Guard(place) as ledger:
        loss = answer(leaf, given, mine, place.group)
    if not torch.equal(leaf, before) or not torch.equal(given, targets):
        refuse(f"{said}: the caller's tensors were changed", "", "a = a - b makes a new one")
    if isinstance(loss, Tensor) and not loss.isfinite().all():
        single = any(entry.nbytes == leaf.element_size() for entry in ledger.entries)
        why = ONE_MAXIMUM if single else OVERFLOW
        refuse(f"{said}: the loss is {loss.flatten()[0].item()}", *why)
    mistakes = _loss_mistakes(scores, targets, place)
    otherwise = ("log(sum of exp(scores)) - score of the target, over all ranks", "see hint 2")
    compare(loss, wanted, f"{said}: the loss", mistakes, *otherwise)
    sent_bytes, num = sum(entry.nbytes for entry in ledger.entries), len(targets)
    if scores.shape[1] > 30 and sent_bytes > 3 * len(place.ranks) * 8 * num:
        seen = f"{said}: {sent_bytes / num:.0f} bytes a token were moved; 12 are enough"
        refuse(seen, "all scores travel", "per token the maximum, one sum, one target's score")
    if not loss.requires_grad:
        refuse(f"{said}: the loss has no gradient", "it was detached", "SumOverRanks.apply")
    with Guard(place):
        loss.backward()
    grad = whole.grad[:, mine.start : mine.stop]
    what = f"{said}: the gradient of the scores"
    compare(leaf.grad, grad, what, _gradient_mistakes(scores, grad, mine, place), *ALL_GRADIENTS)
    if len(ledger.entries) > 2:
        refuse(f"{said}: {len(ledger.entries)} messages, where 2 do", *THREE_MESSAGES)


def _loss_mistakes(scores: Tensor, targets: Tensor, place: Place) -> Mistakes:
    n, rank, num, vocab = len(place.ranks), place.rank, len(targets), scores.shape[1]
    sizes = [vocab // n + (r < vocab % n) for r in range(n)]
    starts = [sum(sizes[:r]) for r in range(n)]
    top, columns = scores.amax(-1), scores.split(sizes, dim=-1)
    sums = torch.stack([part.sub(top.unsqueeze(-1)).exp().sum(-1) for part in columns])
    target = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - top
    tops = torch.stack([part.amax(-1) for part in columns])
    owner = sum((targets >= start).long() for start in starts) - 1
    own_top, log = tops.gather(0, owner.unsqueeze(0))[0], sums.sum(0).log()
    own_sums = sums * (top - tops).exp()  # each rank with its own largest score
    own_log, right = own_sums.sum(0).log(), (log - target).mean()
    yield right / n, "each rank has the mean over all tokens already", "no division by the ranks"
    yield right * n, "each rank has the mean already, and it was summed", "one .mean() at the end"
    yield right * num, "that is the sum over the tokens", ".mean()"
    yield right * num / n, "all ranks have all tokens", ".mean()"
    yield -right, "the sign is turned: a loss is not below 0", "log(sum) - score"
    yield (log / math.log(2) - target).mean(), *BITS
    yield right / math.log(2), *BITS
    yield (own_log - target - top + own_top).mean(), *OWN_MAXIMUM
    yield (own_log - target).mean(), *OWN_MAXIMUM
    yield (sums.log().sum(0) - target).mean(), *LOG_FIRST
    yield (own_sums.log().sum(0) - target).mean(), *LOG_FIRST
    raw = "the largest score was subtracted in the sum, and not from the target's score"
    yield (log - target - top).mean(), raw, "take the target's score from the shifted scores"
    own = torch.where(owner == rank, target, 0)
    yield (sums[rank].log() - own).mean(), *OWN_SUM
    yield (log - own).mean(), *OWN_SUM
    yield (sums[rank].log() - target).mean(), *OWN_SUM
    parts = [part - top.unsqueeze(-1) for part in columns]
    yield from _target_mistakes(parts, log, targets, starts)


def _target_mistakes(
    parts: list[Tensor], log: Tensor, targets: Tensor, starts: list[int]
) -> Mistakes:
    """What other scores than those of the targets give; `parts` are shifted, one for each rank."""
    first, edge, even = (torch.zeros_like(log) for _ in range(3))
    for rank, (part, start) in enumerate(zip(parts, starts, strict=True)):
        size = part.shape[1]

        def chosen(columns: Tensor, part: Tensor = part) -> Tensor:
            return part.gather(-1, columns.unsqueeze(-1)).squeeze(-1)

        at, at_even = targets - start, targets - rank * size
        first += chosen(torch.where((at >= 0) & (at < size), at, 0))
        edge += chosen(at.clamp(0, size - 1))
        inside = (at_even >= 0) & (at_even < size)
        even += chosen(torch.where(inside, at_even, 0)) * inside
    yield (log - first).mean(), *OTHERS_TARGETS
    yield (log - edge).mean(), *OTHERS_TARGETS
    uneven = "rank * columns is not the first token where parts are uneven"
    yield (log - even).mean(), uneven, "mine.start and mine.stop"


def _gradient_mistakes(scores: Tensor, grad: Tensor, mine: range, place: Place) -> Mistakes:
    n, num = len(place.ranks), len(scores)
    softmax = scores.softmax(-1)[:, mine.start : mine.stop] / num
    yield n * grad, *ALL_GRADIENTS
    yield grad / n, "the loss is the same on all ranks, not a part of it", "no division by ranks"
    lost = "only one of the two sums has a gradient"
    yield softmax, lost, "SumOverRanks.apply for both"
    yield grad - softmax, lost, "SumOverRanks.apply for both"
    own = scores[:, mine.start : mine.stop]
    largest = own.amax(-1, keepdim=True)
    through = grad.sum(-1, keepdim=True) * (own == largest)
    yield grad - through, *THROUGH_MAXIMUM
    yield grad - through * (largest == scores.amax(-1, keepdim=True)), *THROUGH_MAXIMUM


# ---- 13.13 ----------------------------------------------------------------------------------

SIZES = {"vocab_size": 6, "block": 4, "heads": 2, "width": 8}
MEANING = {
    "ColwiseParallel": "cut by output features",
    "RowwiseParallel": "cut by input features (an embedding: by tokens)",
    "SequenceParallel": "whole weights, cut positions",
    "PrepareModuleOutput": "only the output is laid out anew",
}
SAME = ("", "")  # no difference
WHY = {  # what is laid out in another way -> why that matters
    "input_layouts": "how the input comes: whole on each rank, or cut by positions",
    "output_layouts": "how the output goes on: norms read it, or the loss",
    "desired_output_layouts": "how the output should go on",
    "use_local_output": "a plain tensor has forgotten that it is a part; loss_parallel must know",
    "desired_input_layouts": "how the module wants its input",
    "sequence_sharding": "positions are dimension 1 of (B, T, D)",
}


@part.exercise(
    "13.13",
    "In each block: qkv and up are cut by columns, out and down by rows. The names are those of "
    "model.named_modules(), such as blocks.0.attention.qkv.",
    "Embedding by rows with input_layouts=Replicate(). The head by columns; its scores stay cut: "
    "output_layouts=Shard(-1), and use_local_output=False so that they stay DTensors.",
    "With sequence, Shard(1) in place of Replicate() wherever x goes between layers, norms are "
    'SequenceParallel(), and "dropout" is PrepareModuleOutput from Replicate() to Shard(1).',
)
def plan(answer) -> None:
    """Two blocks without and with sequence, on 2 ranks against one process."""
    in_ranks(_look_at_plans, 2, answer, random.randrange(10_000), reasons={})


def _look_at_plans(answer, seed: int) -> bool:
    # A wrong plan is refused with a reason of its own; torch's traceback would come before it.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    for num_blocks, sequence in ((2, False), (2, True)):
        said = f"plan({num_blocks}, sequence={sequence})"
        styles = answer(num_blocks, sequence=sequence)
        if not isinstance(styles, Mapping):
            shown = "None" if styles is None else f"a {type(styles).__name__}"
            refuse(f"{said} is {shown}", "a dict: a module's name -> a style", "return styles")
        _look_at_names(styles, num_blocks, said)
        why = _difference(styles, course.plan(num_blocks, sequence))
        run = partial(_one_step, num_blocks=num_blocks, seed=seed)
        try:
            found = run(styles)
        except Exception as error:
            first = f"{type(error).__name__}: {error}".split("\n")[0][:150]
            refuse(f"{said}: training with it raises {first}", *why)
        _compare_truth(found, run(None), said, why)
        if why != SAME:
            _compare_course(found, run(course.plan(num_blocks, sequence)), said, why)
    return True


def _look_at_names(styles: Mapping, num_blocks: int, said: str) -> None:
    model = Transformer(layers=num_blocks, **SIZES)
    names = [name for name, _ in model.named_modules()]
    for name, style in styles.items():
        if name not in names and not any(sign in str(name) for sign in "*?["):
            hint = "as in model.named_modules(): blocks.0.mlp.up"
            refuse(f"{said}: no module has the name {name!r}", "torch passes over it", hint)
        if not isinstance(style, ParallelStyle):
            shown = f"{style.__name__}, a class" if isinstance(style, type) else repr(style)
            refuse(f"{said}: {name} has {shown}", "a style is an object", "ColwiseParallel()")


def _difference(styles: Mapping, wanted: Mapping[str, ParallelStyle]) -> tuple[str, str]:
    """Where a plan differs from the course's first: the reason if it does not work."""
    for name, style in wanted.items():
        kind = type(style).__name__
        if name not in styles:
            return f"{name} is not in the plan", f"wanted: {MEANING[kind]}"
        found = styles[name]
        if type(found) is not type(style):
            given = MEANING.get(type(found).__name__, "laid out in another way")
            return f"{name} is {given}", f"wanted: {MEANING[kind]}"
        for field, smell in WHY.items():
            given, value = getattr(found, field, None), getattr(style, field, None)
            if _layout(given) != _layout(value):
                words = f"{field} of {name} is {_words(given)}, not {_words(value)}"
                return words, smell
    extra = [name for name in styles if name not in wanted]
    if extra:
        return f"{extra[0]} is in the plan as well", "x already has the layout that it needs"
    return SAME


def _layout(value: object) -> object:
    """Shard(-1) and Shard(2) are one place of a tensor (B, T, D)."""
    if isinstance(value, tuple | list):
        return [_layout(item) for item in value]
    return ("shard", value.dim % 3) if isinstance(value, Shard) else value


def _words(value: object) -> str:
    items = value if isinstance(value, tuple | list) else [value]
    return ", ".join(_word(item) for item in items)


def _word(item: object) -> str:
    """A layout as it is written in Python."""
    if isinstance(item, Shard):
        return f"Shard({item.dim})"
    return "Replicate()" if isinstance(item, Replicate) else str(item)


class Step(NamedTuple):
    """What one forward and backward gives."""

    loss: Tensor
    grads: dict[str, Tensor]
    scores: str  # how they are laid out
    num_local: int  # parameters on this rank
    made: dict[str, int]  # collectives
    sent_bytes: int


def _one_step(styles: Mapping | None, num_blocks: int, seed: int) -> Step:
    """With a plan, the steps of torch_tensor_parallel; without one, a process alone."""
    torch.manual_seed(seed)
    model = Transformer(layers=num_blocks, **SIZES)
    inputs, targets = torch.randint(6, (2, 3, 4))
    with torch.no_grad():  # with the small weights of a new model, norms hardly get a gradient
        [param.mul_(10) for param in model.parameters() if param.dim() == 2]
    if styles is not None:
        model = parallelize_module(model, init_device_mesh("cpu", (2,)), dict(styles))
        model.head.weight = model.tokens.weight
    with Ledger() as ledger, loss_parallel():
        scores = model(inputs)
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        loss.backward()
    named = dict(model.named_parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in named.values()]
    return Step(
        _whole(loss.detach()),
        {name: _whole(param.grad) for name, param in named.items()},
        _words(scores.placements) if isinstance(scores, DTensor) else "a plain tensor",
        sum(param.numel() for param in local),
        dict(calls(ledger.entries)),
        sum(entry.nbytes for entry in ledger.entries),
    )


def _whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _compare_truth(found: Step, alone: Step, said: str, why: tuple[str, str]) -> None:
    compare(found.loss, alone.loss, f"{said}: the loss", [], *why)
    for name, grad in alone.grads.items():
        compare(found.grads[name], grad, f"{said}: the gradient of {name}", [], *why)


def _compare_course(found: Step, wanted: Step, said: str, why: tuple[str, str]) -> None:
    """What a plan has to reach that is not the course's: as small parts, as few messages."""
    if found.scores != wanted.scores:
        refuse(f"{said}: the scores are {found.scores}, not {wanted.scores}", *why)
    if found.num_local > wanted.num_local:
        shown = f"a rank holds {found.num_local} parameters, not {wanted.num_local}"
        refuse(f"{said}: {shown}", *why)
    counts = sum(found.made.values()), sum(wanted.made.values())
    if counts[0] > counts[1] or found.sent_bytes > wanted.sent_bytes:
        shown = f"{counts[0]} messages with {found.sent_bytes:,} bytes"
        enough = f"{counts[1]} with {wanted.sent_bytes:,} do"
        refuse(f"{said}: right, in {shown} a step, where {enough}", *why)


# In the order of the numbers.
part.exercises |= _sequence.part.exercises | {"13.13": part.exercises.pop("13.13")}
