"""Specs of 13.5 and 13.6: the embedding and the loss, cut over ranks by the vocabulary."""

import warnings
import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import tensor
from manyhands.checks.tensor.common import (
    as_module,
    as_result,
    costs_no_more,
    doubled,
    lets_go,
    own_memory,
)
from manyhands.instruments.ledger import Ledger
from manyhands.tensor import vocabulary
from manyhands.tensor.layers import SumOverRanks, my_range

# ---- 13.5 -----------------------------------------------------------------------------------

LOOKUP = "F.embedding(rows, self.weight) * is_mine.unsqueeze(-1)"
LEFT = "return self.leave(part, self.group)"
SHIFTED = "torch.where(is_mine, inputs - self.mine.start, 0)"
WIDTH = 4


class Lookup(NamedTuple):
    """Which tokens are looked up, and whether `leave` doubles its part instead of summing."""

    tokens: str
    doubles: bool
    seed: int

    def inputs(self, vocab: int, mine: range) -> Tensor:
        """The tokens of this rank (2, 4); those of "all" are the same on all ranks, transposed."""
        others = [token for token in range(vocab) if token not in mine]
        tokens = {
            "own": list(mine),
            "next": [mine.stop] if mine.stop in others else list(mine),
            "others": others or list(mine),
        }
        if self.tokens != "all":
            return torch.tensor((tokens[self.tokens] * 8)[:8]).view(2, 4)
        draw = cases.generator(self.seed)
        return torch.randperm(vocab, generator=draw)[torch.arange(12) % vocab].view(6, 2).t()


def lookups(n: int) -> list[Lookup]:
    """A rank's own tokens, the next one, all others, all: without messages, then with."""
    kinds = ("own", "next", "others", "all")
    return [
        *(Lookup(kind, True, cases.draw_seed()) for kind in kinds),
        Lookup("all", False, cases.draw_seed()),
    ]


def lookup_seen(answer: object, case: Lookup, place: Place) -> dict:
    """What the module holds, what it hands to `leave`, what it returns, the gradient."""
    vocab = 2 * place.n + 1
    seed = case.seed + place.members[0]
    embedding = cases.build(seed, lambda: nn.Embedding(vocab, WIDTH))
    calls: list[bool] = []
    usual = SumOverRanks.apply if not case.doubles else lambda part, group: part
    region = {"leave": doubled(usual, place, calls)} if case.doubles else {}
    module = as_module(answer(embedding, **region, **place.options))
    weight = getattr(module, "weight", None)
    mine = getattr(module, "mine", None)
    whole = weakref.ref(embedding.weight)
    del embedding
    seen = {
        "mine": {"start": getattr(mine, "start", None), "stop": getattr(mine, "stop", None)},
        "weight": tensor(weight),
        "weight is the one parameter": [id(p) for p in module.parameters()] == [id(weight)],
        "weight wants a gradient": weight.requires_grad,
        "weight keeps no memory but that of its rows": own_memory(module, weight),
        "the whole embedding is let go": lets_go(whole, place),
    }
    inputs = case.inputs(vocab, my_range(vocab, 1, place.group))
    before = inputs.clone()
    with Ledger() as ledger:
        result = module(inputs)
    seen["the result"] = as_result(result)
    seen["inputs are unchanged"] = torch.equal(inputs, before)
    if case.doubles:
        seen["the calls of `leave`; True: with the group"] = calls
        seen["messages besides those of `leave`"] = len(ledger.entries)
    draw = cases.generator(seed)
    seen["the result has a gradient"] = result.requires_grad
    if result.requires_grad and not case.doubles:
        result.backward(torch.randn(result.shape, generator=draw))
        seen["the gradient of weight"] = weight.grad
    return seen


def tell_lookup(case: Lookup) -> str:
    """A case in words."""
    words = {"own": "its own tokens", "next": "the token after its own ones"}
    words |= {"others": "the other ranks' tokens", "all": "all tokens"}
    doubled_part = ", with a `leave` that doubles its part" if case.doubles else ""
    return f"2N + 1 tokens, looking up {words[case.tokens]}{doubled_part}"


embedding = Spec(
    todo="13.5",
    truth=vocabulary.VocabEmbedding,
    layouts=cases.THREE,
    cases=lookups,
    observe=lookup_seen,
    tell=tell_lookup,
    hints=(
        "Which tokens are in the range self.mine? A comparison with its start and one with its "
        "stop give a mask of the shape of inputs.",
        "The row of such a token is token - self.mine.start. The others need some row that exists, "
        "such as 0: torch.where(mask, inputs - self.mine.start, 0). Then they get a factor of 0.",
        "F.embedding(rows, self.weight) is (B, T, D) and the mask (B, T): unsqueeze(-1) makes it "
        "fit. At the end call self.leave(part, self.group).",
    ),
    mistakes=r"""
        {LOOKUP} => F.embedding(rows, self.weight) :: The rows of other ranks' tokens are not zero,
            so the sum is wrong. | Multiply the rows by a mask that is 1 for tokens of `mine`.
        {SHIFTED} => (inputs - self.mine.start).clamp(0, len(self.mine) - 1)
        {LOOKUP} => F.embedding(rows, self.weight) ::
            The indices are clamped, but the rows of other ranks' tokens are not zero.
        {SHIFTED} => inputs - self.mine.start ::
            Other ranks' tokens are looked up as well, in rows that do not exist. | Look up a row
            that exists, with torch.where, and mask the rows afterwards.
        {SHIFTED} => torch.where(is_mine, inputs, 0) :: Tokens count over the whole vocabulary, and
            the rows of a part count from 0. | Subtract self.mine.start.
        inputs < self.mine.stop => inputs <= self.mine.stop ::
            The token mine.stop is taken for one of this rank's. | It is the next rank's first.
        inputs < self.mine.stop => inputs <= self.mine.stop
        {SHIFTED} => (inputs - self.mine.start).clamp(0, len(self.mine) - 1) ::
            The token mine.stop is taken for one of this rank's.
        inputs >= self.mine.start => inputs > self.mine.start ::
            The first token of this rank's part is left out. | mine.start is in the part.
        {LEFT} => self.leave(part, self.group)\n        return part :: What `leave` returns is not
            used. | Return self.leave(part, self.group), once, and send nothing else.
        {LEFT} => return SumOverRanks.apply(part, self.group) ::
            The `leave` that is given is not used.
        {LEFT} => {LEFT} / len(dist.get_process_group_ranks(self.group)) :: This is a mean; the
            other ranks' parts are zero, so their sum is the embedding. | Divide by nothing.
        part = {LOOKUP} => part = ({LOOKUP}).detach() ::
            The rows get no gradient. | Leave out detach(), .data and no_grad().
    """,
    reasons="""
        missing 1 required positional argument: 'group' ::
            `leave` takes two arguments, and was given one. | Call self.leave(part, self.group).
    """,
    module=globals(),
)

# ---- 13.6 -----------------------------------------------------------------------------------

LARGEST = "scores.detach().amax(-1)"
COLUMN = "torch.where(is_mine, targets - mine.start, 0)"
BOTH = "SumOverRanks.apply(parts, group)"
END = "(total.log() - of_target).mean()"
EXP_SUM = "scores.exp().sum(-1)"
STACK = f"parts = torch.stack([{EXP_SUM}, of_target])"
ONE_MESSAGE = "torch.stack both parts of a rank, and call SumOverRanks.apply once."


class Scores(NamedTuple):
    """One call: scores with this scale; those of every third token are `spread` more, or less."""

    tokens: int
    vocab: int
    scale: float
    spread: float
    dtype: torch.dtype
    seed: int
    num_masked: int = 0  # of the last tokens the scores are -inf: nobody may say them


def losses(n: int) -> list[Scores]:
    """Uneven parts, few tokens and many, small scores and large ones, below zero and above."""
    seeds = [cases.draw_seed() for _ in range(5)]
    return [
        Scores(n, n, 1.0, 0.0, torch.float64, seeds[0]),
        Scores(7, 2 * n + 1, 1.0, 0.0, torch.float64, seeds[1]),
        Scores(31, 5 * n + 1, 200.0, 0.0, torch.float32, seeds[2]),
        Scores(6, 3 * n + 2, 1.0, 1000.0, torch.float64, seeds[3]),
        # All that the last rank has.
        Scores(6, 3 * n, 1.0, 0.0, torch.float64, seeds[4], num_masked=3 * (n > 1)),
    ]


def loss_seen(answer: object, case: Scores, place: Place) -> dict:
    """The loss, the gradient of this rank's scores, what is unchanged, and what travels."""
    draw = cases.generator(case.seed, place.members[0])
    shift = case.spread * (torch.arange(case.tokens) % 3 - 1).to(case.dtype)
    scores = torch.randn(case.tokens, case.vocab, generator=draw, dtype=case.dtype) * case.scale
    scores += shift.unsqueeze(-1)
    scores[:, case.vocab - case.num_masked :] = -torch.inf
    leaf = scores.requires_grad_()
    order = torch.randperm(case.tokens, generator=draw)
    targets = (torch.arange(case.tokens) % (case.vocab - case.num_masked))[order]
    mine = my_range(case.vocab, 1, place.group)
    given = leaf[:, mine.start : mine.stop]  # a view, as of a larger matrix
    before = given.detach().clone(), targets.clone()
    with Ledger() as ledger, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of all_reduce under autograd
        loss = answer(given, targets, mine, **place.options)
        seen = {
            "the loss": as_result(loss),
            "scores are unchanged": torch.equal(given.detach(), before[0]),
            "targets are unchanged": torch.equal(targets, before[1]),
            "the loss has a gradient": loss.requires_grad,
        }
        if loss.requires_grad:
            loss.sum().backward()
    seen["the gradient of the scores"] = None
    if leaf.grad is not None:
        seen["the gradient of the scores"] = leaf.grad[:, mine.start : mine.stop].clone()
    seen["messages"] = len(ledger.entries)
    seen["bytes that travel"] = sum(entry.nbytes for entry in ledger.entries)
    return seen


def tell_scores(case: Scores) -> str:
    """A case in words."""
    size = case.spread or case.scale
    name = str(case.dtype).removeprefix("torch.")
    masked = f", the last {case.num_masked} tokens' -inf" if case.num_masked else ""
    return f"{case.tokens} targets, {case.vocab} tokens, {name} scores of about +-{size:g}{masked}"


cross_entropy = Spec(
    todo="13.6",
    truth=vocabulary.vocab_cross_entropy,
    layouts=cases.THREE,
    cases=losses,
    observe=loss_seen,
    same=costs_no_more("messages", "bytes that travel", tolerance=1e-4),
    tell=tell_scores,
    advice={
        "messages": ONE_MESSAGE,
        "the loss": (
            "Each target's score comes from one rank, and the others add 0, by torch.where: a "
            "score may be -inf, and 0 times -inf is no number."
        ),
        "bytes that travel": "Per token the maximum, one sum and one target's score are enough.",
    },
    hints=(
        "The maximum first: of this rank's detached scores for each token, then an all_reduce with "
        "op=dist.ReduceOp.MAX. Subtract it from the scores with unsqueeze(-1).",
        "Two numbers for each token: the sum of exp over this rank's columns, and the score of the "
        "target, or 0 where another rank has the target. gather needs a column that exists.",
        "Both are parts of a sum, and travel in one message: torch.stack them, so that the step "
        "has two all-reduces, and SumOverRanks.apply(parts, group). The loss is "
        "(log(sum) - score).mean().",
    ),
    mistakes="""
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group) => pass ::
            Each rank subtracts its own largest score, so the ranks' sums do not fit together. |
            Call all_reduce with op=dist.ReduceOp.MAX before you subtract the maximum.
        op=dist.ReduceOp.MAX, => ::
            The ranks' largest scores are added up, and their maximum is needed.
        scores = scores - largest.unsqueeze(-1) => pass ::
            The largest score is not subtracted, so exp overflows.
        {LARGEST} => scores.detach().max().expand(len(scores)).clone() ::
            One largest score is taken for all tokens. | Each token has its own: amax(-1).
        {LARGEST} => {LARGEST}.clamp(min=0) ::
            The largest score is taken to be at least 0, and scores can all be far below it.
        {LARGEST} => scores.amax(-1) ::
            A gradient goes through the maximum. | scores.detach().amax(-1)
        torch.where(is_mine, scores.gather(-1, columns).squeeze(-1), 0) => scores.gather(-1,
            columns).squeeze(-1) :: Targets of other ranks are counted as well, with a column that
            is not theirs. | Take 0 where the target is not in `mine`.
        targets - mine.start, 0) => targets - dist.get_rank(group) * scores.shape[1], 0)
        targets >= mine.start => targets >= dist.get_rank(group) * scores.shape[1]
        targets < mine.stop => targets < (dist.get_rank(group) + 1) * scores.shape[1] ::
            The part's first token is taken to be rank * columns, and parts can be uneven. | Use
            mine.start and mine.stop.
        [{EXP_SUM} => [{EXP_SUM}.log()
        total.log() => total ::
            The log is taken before the sum over the ranks. | Sum first: log(a) + log(b) differs.
        {BOTH} => parts[0], {BOTH}[1] ::
            The sum of exp is this rank's own. | Both sums go over all ranks: SumOverRanks.
        of_target]) => of_target + is_mine * largest]) :: The largest score is subtracted in the
            sum, and not from the target's score. | Take the target's score from the shifted scores.
        {BOTH} => (SumOverRanks.apply(part, group) for part in parts) ::
            The result is right, but one message is enough for both sums. | {ONE_MESSAGE}
        of_target]) => of_target.detach()]) ::
            The target's score gets no gradient. | Leave out detach() there.
        .mean() => .sum() :: This is the sum over the tokens. | Every rank has all tokens: end with
            .mean(), and divide by nothing else.
        .mean() => .mean() / dist.get_world_size(group) ::
            The mean is divided by the number of ranks.
    """,
    reasons="""
        return_types.max :: max(dim=-1) gives a pair: the largest scores, and where they stand. |
            Take scores.amax(-1), or .max(dim=-1).values.
        out of bounds :: A column is asked for that this part of the scores does not have. | Take
            column 0 for targets of other ranks, and a score of 0 afterwards.
        eaf Variable that requires grad :: The caller's scores would be changed in place. | scores =
            scores - ... makes a new tensor.
        modified by an inplace operation :: A tensor that backward still needs was changed in place.
            | Reduce a clone, or use SumOverRanks.apply.
    """,
    module=globals(),
)
