"""The arithmetic of memory, against bytes that optimizers and autograd really keep."""

import pytest
import torch
from torch import nn

from manyhands.memory import bench, figures
from manyhands.memory.accounting import (
    Recipe,
    block_activations,
    bytes_per_rank,
    recipe,
    saved_bytes,
)
from manyhands.memory.savings import checkpointed
from manyhands.models.transformer import Block, Transformer

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("types", "wanted"),
    [
        ((FP32, FP32, [FP32, FP32]), Recipe(4, 4, 8)),  # Adam: 16
        ((FP32, BF16, [BF16, FP32]), Recipe(4, 2, 6)),  # 12
        ((BF16, BF16, [FP32, FP32], FP32), Recipe(2, 2, 12)),  # mixed precision: 16
        ((BF16, FP32, [FP32, FP32], FP32), Recipe(2, 4, 12)),  # gradients in fp32: 18
        ((torch.float64, FP32, []), Recipe(8, 4, 0)),  # SGD
    ],
)
def test_bytes_of_one_parameter(types, wanted):
    assert recipe(*types) == wanted


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("make", "num_states"),
    [
        (lambda params: torch.optim.AdamW(params), 2),
        (lambda params: torch.optim.SGD(params, lr=0.1), 0),
    ],
)
def test_stage_0_is_what_a_training_keeps(dtype, make, num_states):
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(dtype)
    optimizer = make(model.parameters())
    model(torch.ones(2, 7, dtype=dtype)).sum().backward()
    optimizer.step()
    params = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    sizes, bytes_of = (
        [param.numel() for param in params],
        recipe(dtype, dtype, [dtype] * num_states),
    )
    assert bytes_per_rank(sizes, bytes_of, 0, 4) == (
        sum(param.nbytes for param in params),
        sum(param.grad.nbytes for param in params),
        sum(value.nbytes for value in states if value is not None),
    )


def test_the_docstring_s_example_of_padding():
    found = [bytes_per_rank([5, 3], Recipe(1, 1, 0), stage, 2)[:2] for stage in range(4)]
    assert found == [(8, 8), (10, 8), (10, 5), (5, 5)]


def test_each_stage_by_hand():
    found = [bytes_per_rank([10, 3], Recipe(4, 2, 8), stage, 4) for stage in range(4)]
    # Shards of 3 and 1 numbers, so the padded vectors have 12 and 4; two counters are 8 bytes.
    assert found == [
        (4 * 13, 2 * 13, 8 * 13 + 8),
        (4 * 16, 2 * 13, 8 * 4 + 8),
        (4 * 16, 2 * 4, 8 * 4 + 8),
        (4 * 4, 2 * 4, 8 * 4 + 8),
    ]
    assert bytes_per_rank([10, 3], Recipe(4, 2, 0), 1, 4).optimizer == 0
    one = [bytes_per_rank([10, 3], Recipe(4, 2, 8), stage, 1) for stage in range(4)]
    assert set(one) == {(52, 26, 112)}  # on one rank nothing can be saved


@pytest.mark.parametrize(("B", "T", "D", "H"), [(1, 1, 4, 1), (3, 7, 24, 3), (2, 33, 64, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_block_keeps_what_the_formula_says(B, T, D, H, dtype):
    torch.manual_seed(1)
    block = Block(D, H, 0.0).to(dtype)
    x = torch.randn(B, T, D, dtype=dtype, requires_grad=True)
    kept = saved_bytes(lambda: block(x), block.parameters())
    assert kept == sum(block_activations(B * T, D, H, dtype.itemsize).values())


@pytest.mark.parametrize(("L", "B", "T", "V"), [(2, 4, 64, 500), (3, 8, 32, 50), (4, 2, 96, 97)])
def test_a_whole_model_keeps_its_blocks_and_a_little(L, B, T, V):
    D, H = 128, 4
    model = Transformer(V, T, L, H, D)
    inputs, targets = torch.randint(V, (2, B, T))
    kept = saved_bytes(lambda: model(inputs, targets), model.parameters())
    # Besides the blocks: the last norm, the head, and the chances of the next token.
    wanted = L * sum(block_activations(B * T, D, H).values()) + B * T * (2 * D + 2 + V) * 4
    assert kept == pytest.approx(wanted, rel=1e-3)
    assert 0 <= kept - wanted - 2 * 8 * B * T < 100  # a token and its target take 8 bytes each


def test_memory_that_is_shared_counts_once_and_whole():
    x = torch.randn(5, 8, requires_grad=True)
    scale = nn.Parameter(torch.randn(8))

    def run() -> torch.Tensor:
        wide = torch.cat([x, x]) + 1  # 320 bytes, of which two parts are kept
        return wide[:, :4] * wide[:, 2:6]

    assert saved_bytes(run, []) == 320
    assert saved_bytes(lambda: (run() * scale[:4]).sum(), [scale]) == 320 + 10 * 4 * 4
    assert saved_bytes(lambda: (run() * scale[:4]).sum(), []) == 320 + 10 * 4 * 4 + 32


def test_nothing_is_kept_without_autograd_and_backward_still_works():
    layer, results = nn.Linear(3, 3), []
    x = torch.randn(2, 3)
    assert saved_bytes(torch.no_grad()(lambda: layer(x).tanh()), layer.parameters()) == 0

    def run() -> torch.Tensor:
        results.append(layer(x).tanh())
        return results[-1]

    assert saved_bytes(run, layer.parameters()) == 2 * (2 * 3 * 4)
    results[0].sum().backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(("s", "b", "h", "a"), [(4096, 1, 4096, 32), (10, 3, 24, 2)])
def test_a_block_in_16_bits_is_the_paper_s_without_its_dropout_masks(s, b, h, a):
    """Korthikanti et al. 2022, section 4.1: 34 s b h, of which two masks take 2 s b h."""
    kept = sum(block_activations(s * b, h, a, nbytes=2).values())
    assert kept == 32 * s * b * h + 2 * s * b * (a + 4)  # and one number per head, four for norms


def test_the_arithmetic_of_a_step_grows_by_that_of_the_blocks_forward():
    D, L, tokens, V = 16, 3, 2 * 8, 11
    inputs = torch.randint(V, (2, 8))

    def step(how=None):
        model = Transformer(V, 8, L, heads=2, width=D)
        if how:
            model.through = how
        return lambda: model(inputs, inputs).backward()

    costs = bench.work_and_time({"plain": step(), "again": step(checkpointed)}, num_rounds=1)
    blocks, head = 24 * D**2 * L * tokens, 2 * D * V * tokens  # of one forward
    assert [flops for flops, _ in costs.values()] == [3 * blocks + 3 * head, 4 * blocks + 3 * head]
    assert all(seconds > 0 for _, seconds in costs.values())


def test_kept_bytes_are_drawn_with_ticks_that_can_be_read():
    lengths = [64, 128, 256]
    kept = {"fused": [4120, 4120, 4120], "with scores": [4632, 5144, 6168]}
    (ax,) = figures.kept_against_length(lengths, kept, kept).axes
    low, high = ax.get_ylim()
    ticks = [tick for tick in ax.get_yticks() if low < tick < high]
    assert ticks == [4_000, 6_000] and low < 4120 < 6168 < high
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(kept)
