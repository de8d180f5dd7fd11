"""Techniques on a mesh equal one process: losses, gradients, norms and weights of AdamW's steps, by
hand and by PyTorch; one norm of the whole gradient; what replicas of shards send."""

import gc
import re
import weakref
from collections import Counter
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parity
import train_mesh
from manyhands.fsdp.fully_shard import make_mesh, torch_fsdp
from manyhands.fsdp.units import FSDP
from manyhands.instruments.ledger import Ledger, calls
from manyhands.mesh import native
from manyhands.mesh.clip import clip_on_mesh, mesh_norm
from manyhands.mesh.combine import shard_and_cut, take_stage
from manyhands.mesh.grid import coordinates, make_groups, share_of_data, torch_mesh
from manyhands.mesh.hsdp import hsdp_bytes, torch_hsdp_on_fake_ranks
from manyhands.mesh.parts import holders
from manyhands.mesh.training import MeshTraining, with_all
from manyhands.mesh.whole import whole_state
from manyhands.models.transformer import Transformer
from manyhands.ranks.failures import BadInput, RankFailed
from manyhands.ranks.lab import run_ranks
from parity import adamw, assert_near, gradients_of, tokens

V, T, LAYERS, HEADS, B, STEPS = 50, 6, 4, 4, 16, 3
MAX_NORM = 0.5  # the first norms are about 0.9

FOUR = [  # sizes of a mesh of 4 ranks, and micro-batches
    ({"dp": 2, "tp": 2}, 1),
    ({"dp": 2, "tp": 2}, 2),
    ({"pp": 2, "replicate": 2}, 4),
    ({"pp": 2, "dp": 2}, 4),
    ({"pp": 2, "tp": 2}, 2),
    ({"replicate": 2, "shard": 2}, 1),
    ({"replicate": 2, "tp": 2}, 1),
]
EIGHT = [
    ({"pp": 2, "dp": 2, "tp": 2}, 2),
    ({"replicate": 2, "shard": 4}, 1),
    ({"pp": 2, "replicate": 2, "shard": 2}, 2),
]


def make(seed=0, vocab=V, heads=HEADS, freeze=False):
    torch.manual_seed(seed)
    model = Transformer(vocab, T, LAYERS, heads, 8 * heads)  # embedding and head share a weight
    if freeze:
        parts = (model.positions, model.blocks[0], model.blocks[3].norm1, model.blocks[2].mlp.down)
        for part in parts:
            part.requires_grad_(False)
    return model


def data(vocab=V):
    return tokens(vocab, STEPS, 2, B, T)


def one_process(vocab=V, **options):
    """Losses, norms, the first step's gradients as they were clipped, and the weights."""
    model, norms, first = make(0, vocab, **options), [], {}

    def clip(model):
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        first.update(first or gradients_of(model))

    losses, _, weights = parity.train(model, data(vocab), adamw(model.parameters()), clip)
    return losses, norms, first, weights


def whole_gradients(training, plain):
    """The whole gradients on rank 0: in the place of the weights for a moment."""
    params = [param for param in training.parameters() if param.requires_grad]
    with torch.no_grad():
        kept = [param.clone() for param in params]
        for param in params:
            param.copy_(param.grad)
        found = whole_state(training, plain)
        for param, value in zip(params, kept, strict=True):
            param.copy_(value)
    return found


def train(sizes, m, by_torch=False, vocab=V, **options):
    """The same on a mesh; the weights of rank 0 count."""
    share, num_shares = share_of_data(coordinates(dist.get_rank(), sizes), sizes)
    model, plain = make(dist.get_rank(), vocab, **options), make(1, vocab, **options)
    if by_torch:
        training, clip = native.TorchMeshTraining(model, torch_mesh(sizes), m), native.torch_clip
        optimizer = adamw(training.parameters(), foreach=False)
    else:
        training, clip = MeshTraining(model, make_groups(sizes), m), clip_on_mesh
        optimizer = adamw(training.parameters())
    losses, norms, first = [], [], None
    for x, y in data(vocab)[:, :, share::num_shares]:
        losses.append(training.step(x, y).item())
        training.finish()
        norms.append(clip(training, MAX_NORM).item())
        first = whole_gradients(training, plain) if first is None else first
        optimizer.step()
        training.zero_grad()
    return losses, norms, first, whole_state(training, plain)


def train_all(cases, **options):
    return [train(*case, **options) for case in cases]


def assert_equal(cases, results, truth):
    losses, norms, grads, weights = truth
    for number, (sizes, _) in enumerate(cases):
        for rank, found in enumerate(of_rank[number] for of_rank in results):
            message = f"{sizes}, rank {rank}"
            assert found[0] == pytest.approx(losses, abs=1e-5), message
            assert found[1] == pytest.approx(norms, abs=1e-5), message
            assert found[:2] == results[0][number][:2], message  # the same on every rank
            assert rank == 0 or found[2:] == ({}, {})
        for mine, wanted in zip(results[0][number][2:], (grads, weights), strict=True):
            assert_near({name: mine[name] for name in wanted}, wanted)


@pytest.fixture(scope="module")
def truth():
    return one_process()


@pytest.mark.parametrize("by_torch", [False, True], ids=["by hand", "torch"])
@pytest.mark.parametrize("cases", [FOUR, EIGHT], ids=["four", "eight"])
def test_training_on_a_mesh_equals_one_process(cases, by_torch, truth):
    world_size = 4 if cases is FOUR else 8
    results = run_ranks(train_all, world_size, cases, by_torch=by_torch, timeout_s=60)
    assert_equal(cases, results, truth)
    assert min(truth[1]) > MAX_NORM  # so all were clipped


@pytest.mark.parametrize(
    "options", [{"vocab": 51, "heads": 3}, {"freeze": True}], ids=["uneven", "frozen"]
)
def test_uneven_cuts_and_frozen_parameters_by_hand_also(options):
    cases = [FOUR[0], FOUR[3], FOUR[4]]
    results = run_ranks(train_all, 4, cases, **options)
    assert_equal(cases, results, one_process(**options))


# ---- parts of it -----------------------------------------------------------------------------


def step_in(dtype, freeze):
    """This rank's weights after a step of a pipeline of two, with weights in `dtype`."""
    model = make().to(dtype)
    model.tokens.weight.requires_grad_(not freeze)
    training = MeshTraining(model, make_groups({"pp": 2}), 2)
    optimizer = torch.optim.SGD(training.parameters(), 0.1)
    training.step(*data()[0])
    training.finish()
    optimizer.step()
    training(*data()[0])
    channels = [engine.mail.channel for engine in training.engines.values()]
    weights = training.named_weights().items()
    return {name: weight.detach() for name, weight in weights}, len(set(map(id, channels)))


@pytest.mark.parametrize(
    ("dtype", "freeze", "atol"),
    [(torch.float64, False, 1e-12), (torch.float64, True, 1e-12), (torch.bfloat16, False, 1e-2)],
)
def test_a_pipeline_takes_weights_of_any_type_and_a_frozen_embedding(dtype, freeze, atol):
    model = make().to(dtype)
    model.tokens.weight.requires_grad_(not freeze)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(*data()[0]).backward()
    optimizer.step()
    wanted = model.state_dict()
    for found, num_channels in run_ranks(step_in, 2, dtype, freeze):
        assert num_channels == 1  # training and validation share their groups
        for name, weight in found.items():
            torch.testing.assert_close(weight, wanted[name], atol=atol, rtol=0)


def clip_of_a_frozen_model():
    model = make().requires_grad_(False)
    training = MeshTraining(model, make_groups({"pp": 2}))
    if dist.get_rank() == 0:
        next(training.parameters()).grad = torch.full_like(next(training.parameters()), 2.0)
    return clip_on_mesh(training, 1.0).item()


def test_a_rank_without_gradients_takes_part_in_the_norm():
    number = make().tokens.weight.numel()
    first, second = run_ranks(clip_of_a_frozen_model, 2)
    assert first == second > 0 and first == pytest.approx((4 * number / 2) ** 0.5)


def kinds_of_vectors():
    groups = with_all(make_groups({"pp": 2, "dp": 2, "tp": 2}))
    whole = shard_and_cut(make(), groups)
    stage = take_stage(make(), groups)
    found = []
    for model in (whole, stage.model):
        names = {param: name for name, param in model.module.named_parameters()}
        found.append(
            [(holders(flat.shard), sorted(names[p] for p in flat.params)) for flat in flats(model)]
        )
    (tied, ranks), *more = stage.tied
    return found, (len(tied), holders(tied), ranks, len(more))


def flats(model):
    return [flat for unit in model.units for flat in unit]


def test_whole_and_cut_parameters_have_vectors_of_their_own_and_the_tied_matrix_one_alone():
    results = run_ranks(kinds_of_vectors, 8)
    for rank, ((whole, stage), tied) in enumerate(results):
        for count, names in whole + stage:
            is_cut = [not re.search("norm|positions", name) for name in names]
            assert all(is_cut) or not any(is_cut)
            is_tied = names[0].endswith(("tokens.weight", "head.weight"))
            assert count == (1 if all(is_cut) else 2) * (
                2 if is_tied and (count, names) in stage else 1
            )
        assert [names for _, names in stage if re.search("tokens|head", names[0])] == [
            ["0.tokens.weight" if rank < 4 else "2.head.weight"]
        ]
        assert tied == (25 * 32 // 2, 2, [0, 1], 0)


def held_parameters():
    groups = with_all(make_groups({"pp": 2, "tp": 2}))
    model = make()
    refs = {name: weakref.ref(param) for name, param in model.named_parameters()}
    stage = take_stage(model, groups)
    del model
    gc.collect()
    return {name for name, ref in refs.items() if ref() is not None}, len(list(stage.inner))


def test_a_rank_keeps_nothing_of_the_whole_model_but_norms_and_positions_of_its_stage():
    for rank, (held, num_layers) in enumerate(run_ranks(held_parameters, 4)):
        assert num_layers == 3
        blocks = (0, 1) if rank < 2 else (2, 3)
        other = {"positions.weight"} if rank < 2 else {"norm.weight"}
        assert held == other | {f"blocks.{i}.norm{k}.weight" for i in blocks for k in (1, 2)}


PARTS = [  # of each of 4 ranks: gradients, and how many ranks hold the same
    [([3.0], 1), ([1.0, 2.0], 4), ([2.0, 2.0], 2)],
    [([4.0], 1), ([1.0, 2.0], 4), ([2.0, 2.0], 2)],
    [([1.0, 2.0], 4)],
    [([1.0, 2.0], 4), ([[0.0], [12.0]], 1)],
]


def norm_of_parts(parts, dtype):
    return mesh_norm([(torch.tensor(g, dtype=dtype), n) for g, n in parts[dist.get_rank()]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_number_counts_once_in_the_norm(dtype):
    for parts, wanted in (
        (PARTS, 9 + 16 + 5 + 8 + 144),
        ([[]] * 4, 0),
        ([[([5.0], 1)], [], [], []], 25),
    ):
        for norm in run_ranks(norm_of_parts, 4, parts, dtype):
            assert norm.dtype == torch.float64 and norm.shape == ()
            assert norm.item() == pytest.approx(wanted**0.5)


def norm_message():
    with Ledger() as ledger:
        mesh_norm([(torch.ones(5), 1), (torch.ones(7), 2)])
    return [(entry.op, entry.nbytes) for entry in ledger.entries]


def test_a_norm_is_one_message_of_one_number():
    assert run_ranks(norm_message, 2) == [[("all_reduce", 8)]] * 2


def messages_over_dp(by_torch, m):
    """Gathers and reductions of each unit over dp, in a step of a pipeline of FSDP."""
    sizes = {"pp": 2, "dp": 2}
    if by_torch:
        training = native.TorchMeshTraining(make(), torch_mesh(sizes), m)
        units = 3  # two blocks, and the rest
    else:
        training = MeshTraining(make(), make_groups(sizes), m)
        units = len(flats(training.model))
    x, y = data()[0][:, dist.get_rank() % 2 :: 2]
    for _ in range(2):  # the second is like all that follow
        with Ledger() as ledger:
            training.step(x, y)
        training.zero_grad()
    found = calls(ledger.entries)
    return found["all_gather"] / units, found["reduce_scatter"] / units


def test_a_pipeline_of_fsdp_gathers_for_every_micro_batch_and_torch_s_once_a_step():
    m = 4
    for rank, found in enumerate(run_ranks(messages_over_dp, 4, False, m)):
        # On the first stage the last two backwards follow each other.
        assert found == (m + 1 if rank < 2 else m, m)
    assert run_ranks(messages_over_dp, 4, True, m) == [(1, 1)] * 4


def uneven_batch(sizes):
    MeshTraining(make(), make_groups(sizes), 3).step(*data()[0])


def test_a_batch_that_cannot_be_cut_is_told():
    for sizes in ({"tp": 2}, {"pp": 2}):
        with pytest.raises(RankFailed, match="a batch of 16 cannot be cut into 3 micro-batches"):
            run_ranks(uneven_batch, 2, sizes)


def validated(sizes, by_torch):
    model = make()
    if by_torch:
        training = native.TorchMeshTraining(model, torch_mesh(sizes), 4)
    else:
        training = MeshTraining(model, make_groups(sizes), 4)
    x, y = data()[0][:, :3]
    return training(x, y).item(), [p.grad for p in training.parameters() if p.grad is not None]


@pytest.mark.parametrize("by_torch", [False, True], ids=["by hand", "torch"])
def test_a_loss_without_gradients_is_that_of_one_process(by_torch):
    wanted = make()(*data()[0][:, :3]).item()
    for sizes in ({"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}):
        for loss, grads in run_ranks(validated, 4, sizes, by_torch):
            assert loss == pytest.approx(wanted, abs=1e-5) and grads == []


# ---- hybrid sharding -------------------------------------------------------------------------

WIDTH, NUM = 64, 3
SIZE = NUM * WIDTH**2


def in_units():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM)))
    return model, list(model)


def sent_along(entries, shards):
    """Bytes that a ring sends, by the axis of the mesh."""
    sent = Counter()
    for entry in entries:
        n = len(entry.ranks)
        axis = "shard" if entry.ranks == tuple(range(entry.ranks[0], entry.ranks[0] + n)) else None
        axis = axis if axis and n == shards else "replicate"
        sent[axis] += (2 if entry.op == "all_reduce" else 1) * (n - 1) * entry.nbytes // n
    return dict(sent)


def hybrid(replicas, shards, by_torch):
    model, units = in_units()
    if by_torch:
        model = torch_fsdp(model, units, make_mesh(replicas, shards))
    else:
        groups = make_groups({"replicate": replicas, "shard": shards})
        model = FSDP(model, units, replicas=groups["replicate"], group=groups["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with Ledger() as ledger:
            model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    kept = [*model.parameters(), *(param.grad for param in model.parameters())]
    kept += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    nbytes = sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in kept)
    return sent_along(ledger.entries, shards) | {"kept": nbytes}


@pytest.mark.parametrize(
    ("replicas", "shards", "by_torch"), [(2, 2, False), (2, 2, True), (2, 4, False), (4, 2, False)]
)
def test_bytes_of_hybrid_sharding_are_the_ledger_s(replicas, shards, by_torch):
    wanted = hsdp_bytes(SIZE, replicas, shards)
    assert run_ranks(hybrid, replicas * shards, replicas, shards, by_torch) == [wanted] * (
        replicas * shards
    )


@pytest.mark.parametrize(("replicas", "shards"), [(8, 8), (3, 16), (2, 4)])
def test_bytes_of_torch_s_hybrid_sharding_on_more_ranks_than_there_are(replicas, shards):
    def counted():
        make_it = torch_hsdp_on_fake_ranks
        return make_it(in_units, torch.ones(2, WIDTH), replicas, shards, Ledger).entries

    (entries,) = run_ranks(counted, 1, join=False)
    wanted = hsdp_bytes(SIZE, replicas, shards)
    found = sent_along(entries, shards)
    assert found["shard"] == wanted["shard"]
    assert found["replicate"] == pytest.approx(wanted["replicate"], abs=NUM)  # rounded each time


def test_more_replicas_send_a_little_more_and_more_shards_keep_less():
    found = [hsdp_bytes(8000, replicas, 8) for replicas in range(2, 9)]
    assert [one["replicate"] for one in found] == [8000 * (r - 1) // r for r in range(2, 9)]
    assert {(one["shard"], one["kept"]) for one in found} == {(84_000, 16_000)}
    assert hsdp_bytes(8000, 1, 64)["shard"] == 3 * 63 * 500 and hsdp_bytes(1, 1, 8)["kept"] == 16
    assert hsdp_bytes(8000, 2, 8, 2) == {"shard": 42_000, "replicate": 2000, "kept": 8000}


# ---- the job's settings; its runs are in tests/mesh/test_train_mesh.py ---------

CHOSEN = {
    1: {"dp": 1},
    2: {"tp": 2},
    3: {"dp": 3},
    4: {"dp": 2, "tp": 2},
    6: {"dp": 3, "tp": 2},
    8: {"pp": 2, "dp": 2, "tp": 2},
    12: {"dp": 6, "tp": 2},
    16: {"pp": 2, "dp": 4, "tp": 2},
}


def test_a_mesh_is_chosen_for_any_number_of_ranks():
    for ranks, sizes in CHOSEN.items():
        found = train_mesh.sizes_of(train_mesh.Config(), ranks)
        assert torch.Size(found.values()).numel() == ranks
        assert found == sizes and list(found) == [a for a in ("pp", "dp", "tp") if a in found]
    config = train_mesh.Config
    assert train_mesh.sizes_of(config(tp=4), 8) == {"dp": 2, "tp": 4}
    assert train_mesh.sizes_of(config(dp=1), 8) == {"pp": 2, "tp": 4}
    assert train_mesh.sizes_of(config(pp=2, dp=4, replicas=2), 8) == {
        **{"pp": 2, "replicate": 2, "dp": 2}
    }
    assert train_mesh.sizes_of(config(pp=2, dp=2, tp=1, replicas=2), 4) == {"pp": 2, "replicate": 2}


NOT_SO = [  # settings, ranks, tokens, what is told
    ({"pp": 2, "dp": 2, "tp": 2}, 4, 50, "--pp 2 x --dp 2 x --tp 2 does not fit 4 rank(s): take s"),
    ({"pp": 2, "dp": 2, "tp": 1}, 8, 50, "take sizes whose product is 8, or 0 for what fits"),
    ({"tp": 3}, 8, 50, "--tp 3 does not fit 8 rank(s)"),
    ({"dp": -1}, 8, 50, "--pp, --dp and --tp are at least 1"),
    ({"replicas": 0}, 8, 50, "--replicas is 1 up"),
    ({"dp": 4, "replicas": 3}, 8, 50, "--replicas 3 does not fit --dp 4: take a divisor of that"),
    (
        {"batch": 12, "dp": 2},
        8,
        50,
        "batch 12 cannot be cut into 2 share(s) x 4 micro-batches: tak",
    ),
    ({"tp": 8}, 8, 50, "4 heads cannot be shared by 8 ranks: take --layers 8 (it gives as many he"),
    ({"tp": 4, "layers": 4}, 8, 3, "3 tokens cannot be shared by 4 ranks: take a smaller --tp"),
    (
        {"pp": 8},
        8,
        50,
        "embedding, 4 blocks and head cannot make 8 stages: take --layers 6 or more",
    ),
    ({"impl": "torch", "tp": 4}, 8, 50, "evenly, but 50 tokens and 4 heads are not both multip"),
    (
        {"impl": "torch", "tp": 2, "layers": 3},
        8,
        50,
        "50 tokens and 3 heads are not both multiples",
    ),
    (
        {"impl": "torch", "pp": 4, "micro_batches": 2},
        8,
        50,
        "1F1B with 2 micro-batches on 4 stages",
    ),
]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"micro_batches": 0}, "micro_batches is 0: take at least 1"),
        ({"clip": -1.0}, "clip is -1.0"),
    ],
)
def test_settings_that_no_mesh_can_have(settings, words):
    with pytest.raises(BadInput, match=words):
        train_mesh.main(train_mesh.Config(**settings))


@pytest.mark.parametrize(("settings", "ranks", "tokens", "words"), NOT_SO)
def test_a_mesh_that_does_not_fit_is_refused_with_a_remedy(settings, ranks, tokens, words):
    config = train_mesh.Config(**settings)
    with pytest.raises(BadInput, match=re.escape(words)):
        train_mesh.check(config, train_mesh.sizes_of(config, ranks), tokens)


def test_every_share_has_as_many_batches_and_each_token_counts_once():
    part = [(torch.full((5,), number), torch.full((5,), number)) for number in range(9)]
    for num_shares, batch in product((1, 2, 4, 10), (1, 2, 4)):
        every = [train_mesh.equal_batches(part, batch, s, num_shares) for s in range(num_shares)]
        assert len({len(found) for found in every}) == 1
        counted = [x for found in every for x, _, num in found if num]
        assert sorted(torch.cat(counted)[:, 0].tolist()) == list(range(9))
        assert sum(num.item() for found in every for *_, num in found) == 45
