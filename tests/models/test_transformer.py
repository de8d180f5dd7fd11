"""The language model: causality, size, cost, evaluation and a short training."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from manyhands.data import corpus
from manyhands.models.transformer import (
    Block,
    Transformer,
    flops_per_token,
    generate,
    num_parameters,
    total_loss,
)
from manyhands.ranks.failures import BadInput

pytestmark = pytest.mark.fast

V, T = 11, 7


def tiny(**sizes: int | float) -> Transformer:
    torch.manual_seed(3)
    return Transformer(**{"vocab_size": V, "block": T, "layers": 2, "width": 16, **sizes})


def random_batch(num_sequences: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(V, (2, num_sequences, T), generator=generator).unbind(0)


def test_no_position_sees_a_later_token():
    model = tiny().double()
    for matrix in model.parameters():
        # Larger weights than the first ones, so that a leak is far above rounding.
        torch.nn.init.normal_(matrix, std=0.5)
    inputs, _ = random_batch()
    before = model(inputs)
    for t in range(T):
        changed = inputs.clone()
        changed[:, t] = (changed[:, t] + 1) % V
        moved = (model(changed) - before).abs().amax(dim=(0, 2))  # (T,)
        assert (moved[:t] < 1e-12).all(), f"a change at {t} reached an earlier position"
        assert (moved[t:] > 1e-6).all(), f"a change at {t} should reach every position from {t} on"


def test_no_gradient_of_an_earlier_loss_comes_from_a_later_token():
    model = tiny().double()
    inputs, targets = random_batch(1)
    for t in range(T - 1):
        x = model.tokens(inputs).detach().requires_grad_()
        hook = model.tokens.register_forward_hook(lambda *_, x=x: x)
        logits = model(inputs)
        hook.remove()
        F.cross_entropy(logits[0, : t + 1], targets[0, : t + 1]).backward()
        assert (x.grad[0, t + 1 :] == 0).all() and (x.grad[0, : t + 1] != 0).any(-1).all()


def test_loss_is_the_mean_over_positions_of_the_surprise_at_the_target():
    model = tiny()
    inputs, targets = random_batch()
    chances = model(inputs).softmax(-1)  # (B, T, V)
    picked = [
        math.log(chances[b, t, targets[b, t]].item()) for b in range(len(inputs)) for t in range(T)
    ]
    assert model(inputs, targets).item() == pytest.approx(-sum(picked) / len(picked), rel=1e-5)


def test_the_loss_of_a_bfloat16_model_is_in_float32():
    """Its scores are of bfloat16; a loss of this type would be a multiple of 2^-6 above 2."""
    torch.manual_seed(0)
    model = Transformer(50, 8, 2).bfloat16()
    inputs, targets = torch.randint(50, (2, 3, 8))
    loss = model(inputs, targets)
    exact = F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
    assert loss.dtype == torch.float32 and loss.item() == exact.item()
    assert loss.item() != loss.bfloat16().item()


def test_attention_equals_the_textbook_formula_head_by_head():
    attention = tiny().blocks[0].attention
    x = torch.randn(2, T, 16)
    rows = attention.qkv.weight.view(2, 3, 8, 16)  # (H, q k v, D/H, D)
    heads = []
    for head in rows:
        q, k, v = (x @ matrix.T for matrix in head)  # (B, T, D/H)
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(
            torch.ones(T, T).triu(1).bool(), -torch.inf
        )
        heads.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, -1)))


@pytest.mark.parametrize("layers, width, block, vocab_size", [(1, None, 8, 5), (3, 24, 16, 65)])
def test_num_parameters_counts_the_real_model(layers, width, block, vocab_size):
    model = Transformer(vocab_size, block, layers, width=width)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters(vocab_size, block, layers, width) == counted


@pytest.mark.parametrize("layers, width, block, vocab_size", [(1, None, 8, 5), (3, 24, 16, 65)])
def test_flops_per_token_equals_a_real_count(layers, width, block, vocab_size):
    model = Transformer(vocab_size, block, layers, width=width)
    tokens = torch.randint(vocab_size, (2, block))
    # torch counts attention on a CPU only where it is made of plain matmuls.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    expected = flops_per_token(vocab_size, block, layers, width)
    assert counter.get_total_flops() == expected * tokens.numel()


def test_one_dial_sets_heads_and_width_and_the_head_shares_its_weights():
    model = Transformer(V, T, layers=3)
    assert (len(model.blocks), model.tokens.embedding_dim) == (3, 96)
    assert model.blocks[0].attention.head_width == 32
    assert model.head.weight is model.tokens.weight
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


def test_first_loss_is_that_of_guessing_and_branches_start_small():
    torch.manual_seed(0)
    model = Transformer(65, 32, 4)
    tokens = torch.randint(65, (8, 32))
    assert model(tokens, tokens.roll(1)).item() == pytest.approx(math.log(65), abs=0.15)
    stds = [model.blocks[0].mlp.up.weight.std(), model.blocks[0].mlp.down.weight.std()]
    assert [s.item() for s in stds] == pytest.approx([0.02, 0.02 / 8**0.5], rel=0.05)


def test_total_loss_adds_up_over_uneven_batches_and_restores_the_mode():
    model = tiny(dropout=0.5)
    inputs, targets = random_batch(5)
    whole = F.cross_entropy(model.eval()(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    for training in (True, False):
        model.train(training)
        total, num_tokens = total_loss(
            model, [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])], torch.device("cpu")
        )
        assert model.training is training
        assert num_tokens == 5 * T
        assert total.dtype == torch.float64 and total.shape == () and not total.requires_grad
        assert total.item() == pytest.approx(whole.item(), rel=1e-5)


def test_dropout_changes_training_only():
    model = tiny(dropout=0.5)
    inputs, _ = random_batch()
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))
    x = torch.randn(1, T, 16)
    layer = Block(16, heads=2, dropout=1.0)
    assert torch.equal(layer(x), x), "something was added to x that no dropout can drop"
    assert not torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize(
    "sizes", [{"layers": 0}, {"vocab_size": 0}, {"block": 0}, {"heads": 3}, {"width": 0}]
)
def test_impossible_sizes_are_named(sizes):
    with pytest.raises(BadInput, match=rf"\b{next(iter(sizes.values()))}\b") as error:
        tiny(**sizes)
    assert "\n" not in str(error.value)


def test_too_long_a_sequence_is_named():
    with pytest.raises(BadInput, match="8 tokens .* at most 7"):
        tiny()(torch.zeros(1, T + 1, dtype=torch.int64))
    assert tiny()(torch.zeros(1, T - 2, dtype=torch.int64)).shape == (1, T - 2, V)


def test_a_short_training_beats_every_guess_from_letter_frequencies():
    text = corpus.load("embedded", block=32)
    counts = text.train.tokens.bincount().double()
    unigram = -(counts / counts.sum() * (counts / counts.sum()).log()).sum().item()
    torch.manual_seed(1)
    model = Transformer(text.tokenizer.vocab_size, 32, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    loader = torch.utils.data.DataLoader(text.train, batch_size=16, shuffle=True)
    for _, (inputs, targets) in zip(range(150), loader, strict=False):
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    held_out = torch.utils.data.Subset(text.valid, range(200))
    total, num_tokens = total_loss(model, torch.utils.data.DataLoader(held_out, 50), "cpu")
    loss = total.item() / num_tokens
    print(f"floor {text.entropy_floor:.3f}, reached {loss:.3f}, letter frequencies {unigram:.3f}")
    assert text.entropy_floor < loss < 0.6 * unigram


# The text that a model writes


def test_generate_writes_on_from_the_beginning_it_is_given():
    model = tiny(block=8).train()
    start = torch.tensor([3, 1])
    before = torch.get_rng_state()
    written = generate(model, start, 20, temperature=0.9, seed=5)
    assert written.shape == (22,) and written.dtype == torch.int64
    assert torch.equal(written[:2], start) and int(written.max()) < V
    assert torch.equal(generate(model, start, 20, temperature=0.9, seed=5), written)
    assert not torch.equal(generate(model, start, 20, temperature=0.9, seed=6), written)
    assert torch.equal(torch.get_rng_state(), before) and model.training


def test_temperature_zero_takes_the_likeliest_and_the_draws_follow_the_softmax():
    model = tiny(block=8)
    for weight in model.head.parameters():
        weight.data *= 10  # scores that differ enough for the temperature to be seen
    start = torch.tensor([3, 1, 4])
    scores = model(start[None])[0, -1]
    assert generate(model, start, 1, temperature=0)[-1] == scores.argmax()
    drawn = [int(generate(model, start, 1, temperature=0.5, seed=seed)[-1]) for seed in range(3000)]
    seen = torch.bincount(torch.tensor(drawn), minlength=V) / len(drawn)
    expected = (scores.detach() / 0.5).softmax(0)
    assert (seen - expected).abs().max() < 4 * (0.25 / len(drawn)) ** 0.5
    model.eval()
    by_hand = list(range(8)) + [9]
    last = model(torch.tensor(by_hand)[None, -8:])[0, -1].argmax()
    assert generate(model, torch.tensor(by_hand), 1, temperature=0)[-1] == last  # the last block


@pytest.mark.parametrize(
    ("start", "number", "temperature"), [([], 5, 1), ([1], -1, 1), ([1], 5, -1)]
)
def test_what_cannot_be_written_is_refused_in_one_line(start, number, temperature):
    with pytest.raises(BadInput, match="give at least one token") as error:
        generate(tiny(block=8), torch.tensor(start, dtype=torch.int64), number, temperature)
    assert "\n" not in str(error.value)


# The order of sums


def trained_on_shares(num_shares: int, dtype: torch.dtype) -> list[float]:
    """The losses of 30 steps whose gradients are added up from so many shares, as ranks do it."""
    model = tiny(block=8).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(30):
        tokens = torch.randint(V, (8, 9), generator=generator)
        parts = [tokens[rank::num_shares] for rank in range(num_shares)]
        means = [model(part[:, :-1], part[:, 1:]) / num_shares for part in parts]
        sum(means).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(means).item())
    return losses


def test_more_ranks_differ_by_the_rounding_of_sums_only():
    """Float64 rounds a billion times finer than float32, and the difference is so much smaller."""
    apart = {}
    for dtype in (torch.float32, torch.float64):
        two, four = trained_on_shares(2, dtype), trained_on_shares(4, dtype)
        apart[dtype] = max(abs(a - b) for a, b in zip(two, four, strict=True))
    assert 0 < apart[torch.float32] < 1e-3
    assert apart[torch.float64] < 1e-11
