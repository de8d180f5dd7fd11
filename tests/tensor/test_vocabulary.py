"""An embedding and a loss over a cut vocabulary: equal to torch's own, in value and gradient."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from manyhands.instruments.ledger import Ledger, calls
from manyhands.ranks.lab import run_ranks
from manyhands.tensor.layers import my_range
from manyhands.tensor.vocabulary import VocabEmbedding, vocab_cross_entropy

# Vocabulary, how large the scores are, their type; 7 over 2 and 3 ranks is uneven.
CASES = [(7, 1, torch.float32), (7, 200, torch.float32), (7, 1, torch.float64)]
NUM_TOKENS = 9


def loss_case(vocab, scale, dtype):
    generator = torch.Generator().manual_seed(vocab + scale)
    scores = scale * torch.randn(NUM_TOKENS, vocab, generator=generator, dtype=dtype)
    return scores, torch.randint(vocab, (NUM_TOKENS,), generator=generator)


def losses(cases, with_group):
    """Loss, gradient of this rank's scores, messages; on ranks 1 and 2 of 3 with a group."""
    group = dist.new_group([1, 2]) if with_group else None
    if with_group and dist.get_rank() == 0:
        return None
    found = []
    for case in cases:
        scores, targets = loss_case(*case)
        mine = my_range(case[0], 1, group)
        part = scores[:, mine.start : mine.stop].clone().requires_grad_()
        with Ledger() as ledger:
            loss = vocab_cross_entropy(part, targets, mine, group)
            loss.backward()
        sent_bytes = sum(entry.nbytes for entry in ledger.entries)
        found.append((loss.detach(), part.grad, dict(calls(ledger.entries)), sent_bytes))
    return found


def check_losses(results):
    for number, (vocab, scale, dtype) in enumerate(CASES):
        scores, targets = loss_case(vocab, scale, dtype)
        whole = scores.requires_grad_()
        wanted = F.cross_entropy(whole, targets)
        wanted.backward()
        for loss, *_ in (result[number] for result in results):
            assert loss.dtype == dtype
            torch.testing.assert_close(loss, wanted.detach(), atol=1e-6, rtol=1e-6)
        grad = torch.cat([result[number][1] for result in results], dim=1)
        torch.testing.assert_close(grad, whole.grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loss_and_gradient_are_those_of_cross_entropy(world_size):
    check_losses(run_ranks(losses, world_size, CASES, False))


def test_a_group_has_a_loss_of_its_own():
    check_losses(run_ranks(losses, 3, CASES, True)[1:])


def test_the_loss_moves_three_numbers_a_token():
    for result in run_ranks(losses, 2, CASES[:1], False):
        assert result[0][2:] == ({"all_reduce": 2}, 3 * 4 * NUM_TOKENS)


def test_all_targets_may_be_of_one_rank():
    def run():
        torch.manual_seed(3)
        scores, targets = torch.randn(4, 6), torch.full((4,), 5)
        mine = my_range(6)
        return vocab_cross_entropy(scores[:, mine.start : mine.stop], targets, mine), scores

    for loss, scores in run_ranks(run, 2):
        torch.testing.assert_close(loss, F.cross_entropy(scores, torch.full((4,), 5)))


def test_scores_of_minus_infinity_are_those_of_tokens_that_cannot_come():
    """A vocabulary that is padded to fit the ranks: rank 1 has nothing else."""
    targets = torch.tensor([0, 2, 1, 2])

    def run():
        whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
        whole[:, 3:] = -torch.inf
        mine = my_range(6)
        part = whole[:, mine.start : mine.stop].clone().requires_grad_()
        loss = vocab_cross_entropy(part, targets, mine)
        loss.backward()
        return loss.detach(), part.grad, whole

    results = run_ranks(run, 2)
    whole = results[0][2].requires_grad_()
    wanted = F.cross_entropy(whole, targets)
    wanted.backward()
    for loss, *_ in results:
        torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in results], dim=1), whole.grad)


def strangers(number):
    """What a target and an input that are no token of 7 lead to, on the last rank."""
    mine, words = my_range(7), []
    embed = VocabEmbedding(nn.Embedding(7, 2), leave=lambda part, _: part)
    ids = torch.tensor([1, number, 3])
    calls = (lambda: vocab_cross_entropy(torch.randn(3, len(mine)), ids, mine), lambda: embed(ids))
    for call in calls if number < 0 or dist.get_rank() == 1 else []:
        with pytest.raises(IndexError) as refusal:
            call()
        words.append(str(refusal.value))
    return words


@pytest.mark.parametrize("number", [-100, -1, 7, 1000])
def test_what_is_no_token_is_refused(number):
    words = [f"{number} is no token of the vocabulary: leave such positions out"] * 2
    assert run_ranks(strangers, 2, number) == [words if number < 0 else [], words]


OPTIONS = [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]


def refused_options():
    words = []
    for options in OPTIONS:
        with pytest.raises(ValueError) as refusal:
            VocabEmbedding(nn.Embedding(7, 2, **options))
        words.append(str(refusal.value))
    return words


def test_options_of_an_embedding_are_refused():
    (found,) = run_ranks(refused_options, 1)
    for words, options in zip(found, OPTIONS, strict=True):
        ((name, value),) = options.items()
        assert words == f"{name}={value} is lost when an nn.Embedding is cut: leave it out"


# Repeated tokens, and each one of the vocabulary.
INPUTS = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 3, 3, 0]])


def make_embedding():
    torch.manual_seed(5)
    return nn.Embedding(7, 4), torch.randn(2, 5, 4)


def embedded(with_group):
    group = dist.new_group([1, 2]) if with_group else None
    if with_group and dist.get_rank() == 0:
        return None
    embedding, scale = make_embedding()
    part = VocabEmbedding(embedding, group=group)
    inputs = INPUTS.clone()
    with Ledger() as ledger:
        out = part(inputs)
        (out * scale).sum().backward()
    assert torch.equal(inputs, INPUTS)
    assert part.weight.untyped_storage().nbytes() == part.weight.nbytes
    return out.detach(), part.weight.detach(), part.weight.grad, dict(calls(ledger.entries))


@pytest.mark.parametrize(
    ("world_size", "with_group"), [(1, False), (2, False), (3, False), (3, True)]
)
def test_the_embedding_is_that_of_one_process(world_size, with_group):
    embedding, scale = make_embedding()
    wanted = embedding(INPUTS)
    (wanted * scale).sum().backward()
    results = [result for result in run_ranks(embedded, world_size, with_group) if result]
    for out, _, _, made in results:
        torch.testing.assert_close(out, wanted.detach())
        assert made == {"all_reduce": 1}
    assert torch.equal(
        torch.cat([weight for _, weight, _, _ in results]), embedding.weight.detach()
    )
    torch.testing.assert_close(torch.cat([grad for *_, grad, _ in results]), embedding.weight.grad)


def test_another_way_out_is_given_the_part_and_the_group():
    def run():
        embedding, _ = make_embedding()
        parts = []

        def leave(part, group):
            parts.append((part, group))
            return part + 1

        module = VocabEmbedding(embedding, leave)
        assert torch.equal(module(INPUTS), parts[0][0] + 1) and parts[0][1] is None
        is_mine = (INPUTS >= module.mine.start) & (INPUTS < module.mine.stop)
        return torch.equal(parts[0][0], embedding(INPUTS) * is_mine.unsqueeze(-1))

    assert run_ranks(run, 2) == [True, True]
