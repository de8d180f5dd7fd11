"""Deferred initialisation: weights that one process would draw, and no rank that holds them all."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from manyhands.fsdp import fully_shard, meta
from manyhands.fsdp import units as fsdp
from manyhands.instruments.live import Live
from manyhands.models.transformer import Transformer
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from sharded import VOCAB, text

LAYERS, WIDTH = 8, 32
DRAW = partial(meta.draw_weight, layers=LAYERS, seed=5)


def drawn_in_one_process():
    model = Transformer(VOCAB, 16, LAYERS, heads=2, width=WIDTH)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(DRAW(name, param))
    return model


def deferred(dtype=None):
    with torch.device("meta"):
        model = Transformer(VOCAB, 16, LAYERS, heads=2, width=WIDTH)
    return fsdp.FSDP(model, list(model.blocks), dtype, draw=DRAW)


def train_deferred():
    with Live(dict, device="cpu") as live:
        model = deferred()
    first = fully_shard.full_state(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in text(dist.get_rank(), dist.get_world_size()):
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.module.head.weight is model.module.tokens.weight  # tied, as it was built
    return live.total, first, fully_shard.full_state(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_deferred_initialisation_equals_that_of_one_process_and_is_never_whole(num_ranks):
    model = drawn_in_one_process()
    results = run_ranks(train_deferred, num_ranks)
    _, first, trained = results[0]
    for name, weight in model.named_parameters():
        assert torch.equal(first[name], weight), name
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in text():
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(trained[name], weight, atol=1e-5, rtol=0)
    nbytes = sum(param.nbytes for param in model.parameters())
    block = sum(param.nbytes for param in model.blocks[0].parameters())
    for peak, *_ in results:
        assert peak <= nbytes / num_ranks + 2 * block + 1024  # of padding


def build():
    return Transformer(VOCAB, 16, LAYERS, heads=2, width=WIDTH)


def recorded(by_torch, mesh=None, offload=False):
    """Peak bytes of building in shards, the whole weights, and the random numbers that follow."""
    torch.manual_seed(7)
    mesh = mesh and fully_shard.make_mesh(*mesh)
    with Live(dict, device="cpu") as live:
        model, draw = meta.record(build)
        after = torch.rand(2)
        if by_torch:
            blocks = list(model.blocks)
            model = fully_shard.torch_fsdp(model, blocks, mesh=mesh, offload=offload)
            meta.fill(model, draw, "cpu")
        else:
            model = fsdp.FSDP(model, list(model.blocks), draw=draw)
    state = fully_shard.full_state(model)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model(tokens, tokens).backward()
    return live.total, state, after


@pytest.mark.parametrize(
    ("num_ranks", "num_shards", "options"),
    [
        (1, 1, (False,)),
        (3, 3, (False,)),
        (1, 1, (True,)),
        (3, 3, (True,)),
        (4, 2, (True, (2, 2))),
        (2, 2, (True, None, True)),
    ],
)
def test_recorded_weights_are_those_of_the_constructor(num_ranks, num_shards, options):
    torch.manual_seed(7)
    model = build()
    after = torch.rand(2)
    results = run_ranks(recorded, num_ranks, *options)
    nbytes = sum(param.nbytes for param in model.parameters())
    block = sum(param.nbytes for param in model.blocks[0].parameters())
    for name, weight in model.state_dict().items():
        assert torch.equal(results[0][1][name], weight), name
    for peak, _, following in results:
        assert peak <= nbytes / num_shards + 2 * block + 1024  # of padding
        assert torch.equal(following, after)


def wrap_on_meta(has_draw):
    with torch.device("meta"):
        model = Transformer(VOCAB, 16, 2)
    if has_draw:
        model.norm.to_empty(device="cpu")
    fsdp.FSDP(model, list(model.blocks), draw=DRAW if has_draw else None)


def test_a_model_that_is_on_meta_in_part_or_without_draw_is_told():
    with pytest.raises(RankFailed, match="say by draw= how it begins"):
        run_ranks(wrap_on_meta, 2, False)
    with pytest.raises(RankFailed, match="norm.weight has memory already"):
        run_ranks(wrap_on_meta, 2, True)
