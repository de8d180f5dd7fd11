"""A Transformer cut over ranks equals one process: losses, gradients and weights after 10 AdamW
steps; its messages are those predicted, and what is whole stays equal on every rank."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import parity
from manyhands.data_parallel.replicas import average_gradients
from manyhands.instruments.ledger import Ledger, calls
from manyhands.models.transformer import Block, Transformer
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.tensor import dtensor
from manyhands.tensor.model import (
    TensorParallel,
    calls_per_step,
    cut_block,
    data_place,
    whole_state,
)
from manyhands.tensor.sequence import TensorSequenceParallel
from parity import adamw, assert_near, tokens

BATCH, STEPS, BLOCK, LAYERS = 8, 10, 12, 2
ROWS, COLUMNS = ("out.weight", "down.weight"), ("qkv.weight", "up.weight", "tokens.weight")


def build(vocab=48, heads=4, dropout=0.0, seed=0, layers=LAYERS):
    torch.manual_seed(seed)
    return Transformer(vocab, BLOCK, layers, heads, 8 * heads, dropout)


def cut(model, sequence=False, group=None):
    kind = TensorSequenceParallel if sequence else TensorParallel
    return kind(model, group=group)


def data(vocab=48):
    return tokens(vocab, STEPS, 2, BATCH, BLOCK)


def frozen(model):
    """Freeze a norm, the positions, and a matrix of each kind."""
    first = model.blocks[0]
    for part in (model.positions, first.norm1, first.attention.qkv, first.mlp.down):
        part.requires_grad_(False)
    return model


def one_process(freeze=False, vocab=48, **options):
    model = build(vocab, **options)
    model = frozen(model) if freeze else model
    return parity.train(model, data(vocab), adamw(model.parameters()))


def whole(name, part, group=None):
    """One matrix of all ranks' parts. What is no part has to be the same on all, bit by bit."""
    if isinstance(part, DTensor):
        return part.full_tensor().detach()
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, part.detach(), group=group)
    if name.endswith(ROWS + COLUMNS):
        return torch.cat(parts, dim=1 if name.endswith(ROWS) else 0)
    assert all(torch.equal(parts[0], other) for other in parts), name
    return parts[0]


def state(model, group=None):
    named = dict(model.named_parameters())
    grads = {n: whole(n, p.grad, group) for n, p in named.items() if p.grad is not None}
    return grads, {name: whole(name, p, group) for name, p in named.items()}


def train(sequence=False, freeze=False, other_seeds=False, vocab=48, **options):
    model = build(vocab, seed=dist.get_rank() if other_seeds else 0, **options)
    model = cut(frozen(model) if freeze else model, sequence)
    optimizer = adamw(model.parameters())
    losses, *_ = parity.train(model, data(vocab), optimizer, type(model).finish_gradients)
    return losses, *state(model)


def assert_equal(wanted, results):
    for found in results:
        assert_near(found, wanted)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_equals_one_process(world_size, sequence):
    assert_equal(one_process(), run_ranks(train, world_size, sequence))


CASES = {
    "dropout": {"dropout": 0.1},
    "uneven vocabulary": {"vocab": 65},
    "heads that do not divide": {"heads": 3},
    "frozen parameters": {"freeze": True},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_training_equals_one_process_also_with(options):
    assert_equal(one_process(**options), run_ranks(train, 2, **options))


def test_the_weights_of_rank_0_count():
    assert_equal(one_process(), run_ranks(train, 2, True, other_seeds=True))


def test_frozen_and_uneven_with_sequence_parallelism():
    options = {"freeze": True, "vocab": 65, "heads": 3}
    wanted = one_process(**options)
    assert_equal(wanted, run_ranks(train, 2, True, **options))
    before = dict(frozen(build(65, 3)).named_parameters())
    kept = [name for name, param in before.items() if not param.requires_grad]
    assert len(kept) == 4 and all(torch.equal(wanted[2][n], before[n].detach()) for n in kept)


def dropout_with_sequence():
    return train(True, dropout=0.1)


def test_sequence_parallelism_drops_what_one_process_does_not_and_still_trains():
    (losses, grads, _), other = run_ranks(dropout_with_sequence, 2)
    assert losses == other[0] and losses != one_process(dropout=0.1)[0]
    assert all(torch.isfinite(grad).all() for grad in grads.values())


def gathered(heads):
    plain = build(50, heads, seed=1)
    state = whole_state(TensorParallel(build(50, heads)), plain)
    if dist.get_rank() == 0:
        plain.load_state_dict(state)
        wanted = build(50, heads).state_dict()
        return all(torch.equal(wanted[name], tensor) for name, tensor in plain.state_dict().items())
    return state


@pytest.mark.parametrize("heads", [3, 4])
def test_the_whole_state_is_that_of_the_plain_model_on_the_first_rank(heads):
    assert run_ranks(gathered, 3, heads) == [True, {}, {}]


def train_torch(sequence):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = dtensor.torch_tensor_parallel(build(), mesh, sequence)
    optimizer, losses = adamw(model.parameters()), []
    for x, y in data():
        optimizer.zero_grad()
        with loss_parallel():
            loss = model(x, y)
            loss.backward()
        losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        optimizer.step()
    return [x.item() for x in losses], *state(model)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_training_with_torch_s_own_equals_one_process(world_size, sequence):
    assert_equal(one_process(), run_ranks(train_torch, world_size, sequence))


def train_replicas(sequence):
    """2 x 2: ranks 0 1 and 2 3 hold a model each; ranks 0 2 and 1 3 hold the same parts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    models = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    copies = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group, replicas = models[rank // 2], copies[rank % 2]
    share, num_shares = data_place(rank, size, 2)
    model = cut(build(), sequence, group)

    def before_step(model):
        model.finish_gradients()
        average_gradients(model, replicas)

    batches = data()[:, :, share::num_shares]
    losses = torch.tensor(parity.train(model, batches, adamw(model.parameters()), before_step)[0])
    dist.all_reduce(losses, group=replicas)
    return (losses / num_shares).tolist(), *state(model, group)


@pytest.mark.parametrize("sequence", [False, True])
def test_two_tensor_groups_with_other_data_equal_one_process_with_all_of_it(sequence):
    assert_equal(one_process(), run_ranks(train_replicas, 4, sequence))


# ---- messages ------------------------------------------------------------------------------


def messages(layers_of_models, sequence):
    found = []
    for layers in layers_of_models:
        model = cut(build(layers=layers), sequence)
        x, y = data()[0]
        with Ledger() as ledger:
            model(x, y).backward()
            model.finish_gradients()
        found.append((calls(ledger.entries), [(e.op, e.nbytes) for e in ledger.entries]))
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_calls_and_bytes_are_those_predicted(sequence):
    numbers, tokens = (1, 2, 4), 4 * BATCH * BLOCK  # bytes of a number for each token
    for seen in run_ranks(messages, 2, numbers, sequence):
        for layers, (found, sent) in zip(numbers, seen, strict=True):
            wanted = calls_per_step(layers, sequence)
            assert found == {name: count for name, count in wanted.items() if count}
            total, width = Counter(), 8 * 4
            for op, nbytes in sent:
                total[op] += nbytes
            regions = 2 * (2 * layers + 1) * tokens * width
            if sequence:
                whole_ones = 4 * (BLOCK * width + (2 * layers + 1) * width)  # positions, norms
                assert total["all_gather"] == total["reduce_scatter"] == regions
                assert total["all_reduce"] == 3 * tokens + whole_ones
            else:
                assert total == {"all_reduce": regions + 3 * tokens}


@pytest.mark.parametrize("layers", [0, 1, 7])
def test_the_halves_of_each_all_reduce_are_counted(layers):
    plain, sequence = calls_per_step(layers), calls_per_step(layers, sequence=True)
    assert plain == {"all_reduce": 4 * layers + 4, "all_gather": 0, "reduce_scatter": 0}
    assert sequence["all_gather"] == sequence["reduce_scatter"] == plain["all_reduce"] - 2
    assert sequence["all_reduce"] == 3


# ---- shares, and what is refused -----------------------------------------------------------


@pytest.mark.parametrize(("world_size", "tensor_ranks"), [(8, 2), (6, 3), (4, 4), (3, 1)])
def test_ranks_of_one_model_share_their_data(world_size, tensor_ranks):
    places = [data_place(rank, world_size, tensor_ranks) for rank in range(world_size)]
    num = world_size // tensor_ranks
    assert Counter(places) == {(share, num): tensor_ranks for share in range(num)}
    assert places == sorted(places)


def test_ranks_that_are_left_over_are_refused():
    with pytest.raises(ValueError, match="8 ranks cannot be put into groups of 3"):
        data_place(0, 8, 3)


def cut_two_heads():
    cut_block(Block(8, 2, 0.0))


def test_fewer_heads_than_ranks_are_refused():
    with pytest.raises(RankFailed, match="ValueError: 2 units of 12 cannot be cut over 3 ranks"):
        run_ranks(cut_two_heads, 3)


def uneven_positions():
    x, y = data()[0][:, :, :7]
    TensorSequenceParallel(build())(x, y)


def test_positions_that_do_not_divide_are_refused():
    with pytest.raises(RankFailed, match="7 positions cannot be cut evenly over 2 ranks"):
        run_ranks(uneven_positions, 2)


def untied():
    words = []
    for cut in (TensorParallel, TensorSequenceParallel, by_dtensor):
        model = Transformer(8, 4, 2)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        with pytest.raises(ValueError) as refusal:
            cut(model)
        words.append(str(refusal.value))
    return words


def by_dtensor(model):
    return dtensor.torch_tensor_parallel(model, init_device_mesh("cpu", (2,)))


def test_a_head_with_a_matrix_of_its_own_is_refused():
    words = "the head has a matrix of its own: tie it to that of the tokens"
    assert run_ranks(untied, 2) == [[words] * 3] * 2
