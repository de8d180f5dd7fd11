"""PyTorch's tensor parallelism by plan: the messages that it makes, and what it leaves cut. That it
trains like one process is tested with the Transformer cut by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, loss_parallel

from manyhands.instruments.ledger import Ledger, calls
from manyhands.models.transformer import Transformer
from manyhands.ranks.lab import run_ranks
from manyhands.tensor.dtensor import plan, torch_tensor_parallel
from manyhands.tensor.model import calls_per_step

NUM_BLOCKS = 2
SIZES = {"vocab_size": 8, "block": 4, "layers": NUM_BLOCKS, "heads": 2, "width": 8}


def step(sequence):
    """Messages of a forward and backward, and what is left of the model on this rank."""
    torch.manual_seed(0)
    model = torch_tensor_parallel(Transformer(**SIZES), init_device_mesh("cpu", (2,)), sequence)
    inputs, targets = torch.randint(8, (2, 3, 4))
    with Ledger() as ledger, loss_parallel():
        scores = model(inputs)
        F.cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()
    local = {
        name: tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape)
        for name, p in model.named_parameters()
    }
    shapes = scores.placements[0].dim, tuple(scores.to_local().shape)
    is_tied = model.head.weight is model.tokens.weight
    return (
        dict(calls(ledger.entries)),
        sum(e.nbytes for e in ledger.entries),
        local,
        shapes,
        is_tied,
    )


@pytest.fixture(scope="module")
def steps():
    return {sequence: run_ranks(step, 2, sequence)[0] for sequence in (False, True)}


def test_the_messages_are_those_of_the_transformer_cut_by_hand(steps):
    """But for the loss: loss_parallel sends inside DTensor's operations, below the ledger."""
    made, nbytes, *_ = steps[False]
    wanted = calls_per_step(NUM_BLOCKS)["all_reduce"] - 2
    assert made == {"all_reduce": wanted}
    assert nbytes == wanted * 4 * 3 * 4 * 8  # each of 4BTD


def test_sequence_parallelism_takes_each_all_reduce_apart(steps):
    """But for the embedding, which is all-reduced here, and then cut by positions.

    The norms' gradients are summed later, inside the optimizer's step.
    """
    by_hand = calls_per_step(NUM_BLOCKS, sequence=True)
    assert steps[True][0] == {
        "all_reduce": 1,
        "all_gather": by_hand["all_gather"],
        "reduce_scatter": by_hand["reduce_scatter"] - 1,
    }


@pytest.mark.parametrize("sequence", [False, True])
def test_matrices_are_cut_and_scores_stay_cut(steps, sequence):
    *_, local, scores, is_tied = steps[sequence]
    assert local["blocks.1.attention.qkv.weight"] == (12, 8)
    assert local["blocks.1.attention.out.weight"] == (8, 4)
    assert local["blocks.0.mlp.up.weight"] == (16, 8)
    assert local["blocks.0.mlp.down.weight"] == (8, 16)
    assert local["tokens.weight"] == (4, 8)
    assert local["positions.weight"] == (4, 8) and local["norm.weight"] == (8,)
    assert scores == (2, (3, 4, 4))
    assert is_tied and "head.weight" not in local


def test_the_plan_names_modules_that_exist():
    names = {name for name, _ in Transformer(**SIZES).named_modules()}
    for sequence in (False, True):
        assert set(plan(NUM_BLOCKS, sequence)) <= names
    assert len(plan(5)) == 2 + 4 * 5
    assert len(plan(5, sequence=True)) == 2 + 6 * 5 + 2


def test_norms_work_on_positions_with_sequence_only():
    styles = plan(1, sequence=True)
    assert isinstance(styles["blocks.0.norm1"], SequenceParallel)
    assert "blocks.0.norm1" not in plan(1)
    assert isinstance(styles["head"], ColwiseParallel)
    assert styles["head"].output_layouts == (Shard(-1),)
