"""ZeRO 1, 2 and 3 equal one process: losses, gradients and weights after 10 AdamW steps; their
collectives are those predicted; and what is too large for one rank trains on four."""

import copy
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import parity
from manyhands.data_parallel.replicas import broadcast_state
from manyhands.fsdp import bench, flat, fully_shard, zero
from manyhands.fsdp import units as fsdp
from manyhands.fsdp.clip import clip_grad_norm
from manyhands.instruments.ledger import Ledger, calls
from manyhands.instruments.live import Live, parts_of
from manyhands.models.transformer import Transformer
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from parity import assert_mean_is_near, assert_near, weights_of
from sharded import STEPS, VOCAB, Blocks, adamw, data, text


def one_process(max_norm=None):
    """Losses, last gradients and final weights, from the model that rank 0 builds."""

    def clip(model):
        if max_norm:
            assert nn.utils.clip_grad_norm_(model.parameters(), max_norm) > max_norm

    torch.manual_seed(0)
    model = Blocks()
    return parity.train(model, zip(*data(), strict=True), adamw(model.parameters()), clip)


def shard(impl):
    """The sharded model, its optimizer, and the plain module inside."""
    torch.manual_seed(dist.get_rank())  # a forgotten broadcast would show
    module = Blocks()
    if impl in ("zero1", "zero2"):
        broadcast_state(module)
        in_units = {p for unit in module.units() for p in unit.parameters()}
        root = [p for p in module.parameters() if p not in in_units]
        flats = [flat.Flat(root), *flat.make_flats(in_units_in_order(module, in_units), flat.Flat)]
        if impl == "zero2":
            zero.reduce_during_backward(f for f in flats if f.shard.requires_grad)
        return module, zero.ShardedOptimizer(flats, adamw), module
    mesh = fully_shard.make_mesh(2, 2) if "hybrid" in impl else None
    if "torch" in impl:
        # fully_shard wants tied parameters in one unit, so all of these are the root's.
        model = fully_shard.torch_fsdp(module, [module.b], mesh=mesh)
        return model, adamw(model.parameters()), model
    groups = {}
    if mesh:
        groups = {"replicas": mesh.get_group("replicate"), "group": mesh.get_group("shard")}
    model = fsdp.FSDP(module, module.units(), reshard="kept" not in impl, **groups)
    return model, adamw(model.parameters()), module


def in_units_in_order(module, in_units):
    return [p for p in module.parameters() if p in in_units]


def whole_gradients(impl, model, optimizer):
    """The gradients by name, gathered from the shards, before the step."""
    if "torch" in impl:
        return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    inner = getattr(model, "module", model)
    if impl == "zero1" and optimizer.flats[0].shard.grad is None:
        for one in optimizer.flats:
            one.reduce()
    flats = optimizer.flats if hasattr(optimizer, "flats") else [f for u in model.units for f in u]
    names, found = {p: name for name, p in inner.named_parameters()}, {}
    for one in flats:
        if one.shard.grad is not None:
            whole = torch.empty(one.whole.shape)
            flat.all_gather(whole, one.shard.grad, one.group).wait()
            found |= {names[p]: view for p, view in zip(one.params, one.views(whole), strict=True)}
    return found


def clip_sharded(impl, model, optimizer, max_norm):
    """Clip what `impl` holds; on a mesh the replicas have copies of a shard, which count once."""
    if "torch" in impl:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm).full_tensor()
    flats = optimizer.flats if hasattr(optimizer, "flats") else [f for u in model.units for f in u]
    if impl == "zero1":
        for one in flats:
            one.reduce()
    shards = [one.shard for one in flats]
    return clip_grad_norm(shards, max_norm, [flats[0].group])


def train_sharded(impl, max_norm=None):
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer, _ = shard(impl)
    losses = []
    for x, y in zip(*data()[:, :, rank::size], strict=True):
        model.zero_grad()
        losses.append(model(x, y))
        losses[-1].backward()
        if max_norm:
            assert clip_sharded(impl, model, optimizer, max_norm) > max_norm
        if len(losses) == STEPS:
            grads = whole_gradients(impl, model, optimizer)
        optimizer.step()
    if impl in ("zero1", "zero2"):
        state = weights_of(model)
    else:
        state = fully_shard.full_state(model)
    return [loss.item() for loss in losses], grads, state


IMPLS = ["zero1", "zero2", "zero3", "zero3 kept", "torch"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("impl", IMPLS)
def test_training_equals_one_process(impl, world_size):
    assert_equal(one_process(), run_ranks(train_sharded, world_size, impl))


@pytest.mark.parametrize("impl", [*IMPLS, "zero3 hybrid", "torch hybrid"])
def test_clipped_training_equals_one_process(impl):
    """The norm is that of all shards together, and every step is one that clipping changes."""
    assert_equal(one_process(0.1), run_ranks(train_sharded, 4, impl, 0.1))


def skip_a_step(stage):
    """The weights after a step that follows a skipped one, and after that step alone."""
    found = []
    for is_skipped in (True, False):
        _, optimizer, module = shard(stage)
        for x, y in zip(*data()[:, : 1 + is_skipped].flip(1), strict=True):
            optimizer.zero_grad()  # what was left by the step before is dropped, not stepped
            module(x, y).backward()
        optimizer.step()
        found.append(weights_of(module))
    return found


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_a_skipped_step_leaves_nothing(stage):
    for skipped, plain in run_ranks(skip_a_step, 2, stage):
        for name, value in plain.items():
            assert torch.equal(skipped[name], value), name


class TwoOutputs(nn.Module):
    """Takes and returns more than a tensor: positional and by keyword, in a dict and a tuple."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, x, *, shift):
        out = self.block(x) + shift
        return {"out": self.head(out), "loss": (out.square().mean(), "no tensor")}


def step_with_two_outputs(wrap, dtype, used):
    torch.manual_seed(0)
    model = wrap(TwoOutputs(), dtype)
    x = torch.linspace(-1, 1, 24).view(3, 8)
    for _ in range(2):
        found = model(x, shift=torch.ones(8))
        outputs = {"out": found["out"].square().mean(), "loss": found["loss"][0]}
        sum(outputs[name] for name in used).backward()
    grads = {}
    for unit in getattr(model, "units", []):
        for one in unit:
            whole = torch.empty(one.whole.shape)
            flat.all_gather(whole, one.shard.grad, one.group).wait()
            grads |= {id(p): view for p, view in zip(one.params, one.views(whole), strict=True)}
    module = model.module if grads else model
    found = {name: grads.get(id(p), p.grad) for name, p in module.named_parameters()}
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in found.items()
    }


def by_hand(module, dtype):
    return fsdp.FSDP(module, [module.block], dtype)


def by_torch(module, dtype):
    return fully_shard.torch_fsdp(module, [module.block], dtype=dtype)


def root_after_a_step():
    """The root is a head alone, so its gradients are there before backward reaches the block."""
    model = fsdp.FSDP(module := TwoOutputs(), [module.block])
    with Ledger() as ledger:
        model(torch.ones(2, 8), shift=torch.ones(8))["out"].sum().backward()
    return calls(ledger.entries), [one.is_whole for unit in model.units for one in unit]


def test_a_root_that_is_done_before_the_units_is_not_gathered_again():
    for found, is_whole in run_ranks(root_after_a_step, 2):
        assert found == {"all_gather": 3, "reduce_scatter": 2} and is_whole == [False, False]


@pytest.mark.parametrize("used", [["out"], ["out", "loss"]])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_unit_may_take_and_return_more_than_a_tensor(dtype, used):
    """By hand as by PyTorch, which casts the inputs of a unit to its type."""
    native = run_ranks(step_with_two_outputs, 2, by_torch, dtype, used)[0]
    for name, grad in run_ranks(step_with_two_outputs, 2, by_hand, dtype, used)[0].items():
        torch.testing.assert_close(grad, native[name], atol=1e-6, rtol=1e-5)


READS = {
    "sum": lambda p, m: p.sum(),
    "print": lambda p, m: str(p),
    "data": lambda p, m: p.data.sum(),
    "a list": lambda p, m: torch.cat([p, p]),
    "state_dict": lambda p, m: {name: value.clone() for name, value in m.state_dict().items()},
    "deepcopy": lambda p, m: copy.deepcopy(m),
    "in place": lambda p, m: p.data.fill_(0),
    "as_subclass": lambda p, m: p.as_subclass(torch.Tensor).sum(),
}


def read_freed_weights():
    """What reading a weight between two steps gives; what is no number is there all the same."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = fsdp.FSDP(module, list(module))
    found = {}
    for turn in ("before a step", "after it"):
        weight = model.module[0].weight
        for name, read in READS.items():
            try:
                found[turn, name] = str(read(weight, model.module))
            except RuntimeError as error:
                found[turn, name] = str(error)
        assert (weight.shape, weight.numel(), weight.grad) == ((64, 64), 4096, None)
        model(torch.ones(2, 64)).sum().backward()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_reading_a_freed_weight_is_an_error_with_a_remedy(num_ranks):
    for found in run_ranks(read_freed_weights, num_ranks):
        assert len(found) == 2 * len(READS)
        for words in found.values():
            assert "was used while it was freed" in words and "full_state(model)" in words


def read_before_it_has_arrived(has_read):
    """Rank 1 takes part in the gather only after rank 0 has read, which a file tells."""
    one = flat.ShardedFlat(nn.Linear(64, 64).parameters())
    while dist.get_rank() == 1 and not has_read.exists():
        time.sleep(0.01)
    one.start()
    words = ""
    if dist.get_rank() == 0:
        try:
            one.params[0].sum()
        except RuntimeError as error:
            words = str(error)
        has_read.touch()
    one.wait()
    return words, bool(one.params[0].abs().sum() > 0)


def test_reading_a_weight_that_is_on_its_way_is_an_error(tmp_path):
    found = run_ranks(read_before_it_has_arrived, 2, tmp_path / "read")
    assert "was used while its gather is still on its way" in found[0][0]
    assert all(is_there for _, is_there in found)


def clip_where_a_rank_has_nothing():
    own = [nn.Parameter(torch.ones(3))] if dist.get_rank() == 0 else []
    for param in own:
        param.grad = torch.full((3,), 2.0)
    return clip_grad_norm(own, 1.0).item()


def test_a_rank_without_parameters_takes_part_in_the_norm():
    assert run_ranks(clip_where_a_rank_has_nothing, 2) == [pytest.approx(12**0.5)] * 2


@pytest.mark.parametrize("impl", ["zero3 hybrid", "torch hybrid"])
def test_training_on_a_mesh_equals_one_process(impl):
    assert_equal(one_process(), run_ranks(train_sharded, 4, impl))


def assert_equal(wanted, results):
    losses, grads, weights = wanted
    for _, rank_grads, _ in results:
        assert_near(rank_grads, grads)
    state = results[0][2]
    assert_near({name: state[name] for name in weights}, weights)
    assert_mean_is_near([result[0] for result in results], losses)


# ---- replicas, precision, accumulation, checkpointing ------------------------------------------


def shards_after_steps(impl):
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer, _ = shard(impl)
    for x, y in zip(*data()[:, :3, rank::size], strict=True):
        model.zero_grad()
        model(x, y).backward()
        optimizer.step()
    return [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]


@pytest.mark.parametrize("impl", ["zero3 hybrid", "torch hybrid"])
def test_replicas_of_a_mesh_are_bit_equal(impl):
    results = run_ranks(shards_after_steps, 4, impl)
    for here, there in ((0, 2), (1, 3)):  # rows 0 1 and 2 3, each a replica
        pairs = zip(results[here], results[there], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(results[0][0], results[1][0])


def small_transformer(seed=None):
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    return Transformer(VOCAB, 16, layers=2, dropout=0.0)


def train_short(wrap, dtype):
    model = small_transformer()
    model = wrap(model, list(model.blocks), dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in text(dist.get_rank(), dist.get_world_size()):
        model(x, y).backward()
        optimizer.step()
        types = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}
        optimizer.zero_grad()
    return fully_shard.full_state(model), types


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_is_that_of_torch(dtype):
    (by_hand, types), _ = run_ranks(train_short, 2, fsdp.FSDP, dtype)
    (native, _), _ = run_ranks(train_short, 2, fully_shard.torch_fsdp, dtype)
    assert types == {torch.float32}  # shards and their gradients
    for name, weight in native.items():
        tolerance = 1e-6 if dtype == torch.float32 else 2e-4
        torch.testing.assert_close(by_hand[name], weight, atol=tolerance, rtol=0)


def accumulated(through):
    model = small_transformer()
    if through:
        model.through = through
    sharded = fsdp.FSDP(model, list(model.blocks))
    for x, y in text(dist.get_rank(), dist.get_world_size()):
        sharded(x, y).backward()
    return [p.grad for p in sharded.parameters()], [f.is_whole for u in sharded.units for f in u]


def again(module, x):
    return checkpoint(module, x, use_reentrant=False)


@pytest.mark.parametrize("through", [None, again])
def test_gradients_add_up_also_when_blocks_are_computed_twice(through):
    (grads, whole), _ = run_ranks(accumulated, 2, through)
    model = small_transformer(0)
    for x, y in text():
        model(x, y).backward()
    root = [model.tokens.weight, model.positions.weight, model.norm.weight]
    for part, params in zip(grads, [root, *(b.parameters() for b in model.blocks)], strict=True):
        wanted = torch.cat([param.grad.flatten() for param in params])
        torch.testing.assert_close(part, wanted.chunk(2)[0], atol=1e-5, rtol=0)
    assert whole == [False] * 3


def evaluate_between():
    model = small_transformer()
    sharded = fsdp.FSDP(model, list(model.blocks))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    x, y = text()[0]
    losses = []
    for _ in range(3):
        sharded.eval()
        with torch.no_grad():
            losses.append(sharded(x, y).item())
        assert not model.training
        loss = sharded.train()(x, y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_forward_after_a_step_has_the_new_weights():
    losses = run_ranks(evaluate_between, 2)[0]
    assert losses[0] == losses[1] > losses[2] == losses[3] > losses[4] == losses[5]


def skip_a_layer():
    model = Blocks()
    sharded = fsdp.FSDP(model, model.units())
    x, y = data()[:, 0]
    model.a[0].forward = lambda x: x.new_ones(len(x), 15)
    sharded(x, y).backward()
    sharded(x, y)


def unfreeze_late():
    model = Blocks()
    sharded = fsdp.FSDP(model, model.units())
    model.b.requires_grad_(True)
    sharded(*data()[:, 0])


def test_a_parameter_that_is_unfrozen_after_wrapping_is_told():
    with pytest.raises(RankFailed, match="no shard would get it: unfreeze it before wrapping"):
        run_ranks(unfreeze_late, 2)


def zero1_with_an_unused_parameter():
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(3, 2)})
    optimizer = zero.ShardedOptimizer([flat.Flat(model.parameters())], adamw)
    x = torch.linspace(-1, 1, 32).view(8, 4)[dist.get_rank() :: dist.get_world_size()]
    for _ in range(3):
        model["used"](x).square().mean().backward()
        optimizer.step()
    return weights_of(model)


def test_zero1_counts_an_unused_parameter_as_zeros():
    """AdamW decays it, where an optimizer of one process would leave it alone."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(3, 2)})
    optimizer = adamw(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model["used"](torch.linspace(-1, 1, 32).view(8, 4)).square().mean().backward()
        for param in model["unused"].parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
    for found in run_ranks(zero1_with_an_unused_parameter, 2):
        assert_near(found, weights_of(model))


def test_a_parameter_without_a_gradient_is_told():
    with pytest.raises(RankFailed, match="in units .1. a parameter got no gradient"):
        run_ranks(skip_a_layer, 2)


# ---- calls, bytes, and a limit -----------------------------------------------------------------


def collectives(impl, num_blocks, reshard, replicas):
    model = small_transformer()
    mesh = fully_shard.make_mesh(replicas, 4 // replicas) if replicas > 1 else None
    blocks = list(model.blocks)[:num_blocks]
    if impl == "torch":
        sharded = fully_shard.torch_fsdp(model, blocks, mesh=mesh, reshard=reshard)
    else:
        groups = {}
        if mesh:
            groups = {"replicas": mesh.get_group("replicate"), "group": mesh.get_group("shard")}
        sharded = fsdp.FSDP(model, blocks, reshard=reshard, **groups)
    for x, y in text()[:2]:  # the second is like all that follow
        with Ledger() as ledger:
            sharded(x, y).backward()
        sharded.zero_grad()
    return calls(ledger.entries)


@pytest.mark.parametrize("impl", ["by hand", "torch"])
@pytest.mark.parametrize(
    ("num_blocks", "reshard", "replicas"),
    [(2, True, 1), (2, False, 1), (2, True, 2), (2, False, 2), (0, True, 1), (1, True, 2)],
)
def test_calls_are_those_predicted(impl, num_blocks, reshard, replicas):
    wanted = fully_shard.calls_per_step(num_blocks, reshard, replicas)
    for found in run_ranks(collectives, 4, impl, num_blocks, reshard, replicas):
        assert found == {name: count for name, count in wanted.items() if count}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_strategies_by_their_old_names(strategy):
    options = fully_shard.options_of(strategy)
    replicas = 2 if options["mesh_dims"] == 2 else 1
    found = run_ranks(collectives, 4, "torch", 2, options["reshard"], replicas)[0]
    assert found["all_gather"] == (3 if strategy == "SHARD_GRAD_OP" else 5)
    assert ("all_reduce" in found) == (strategy == "HYBRID_SHARD")


def train_within(limit):
    torch.manual_seed(0)
    model = Transformer(VOCAB, 8, layers=4, width=64)
    sharded = fsdp.FSDP(model, list(model.blocks))
    optimizer = adamw(sharded.parameters())
    x = torch.zeros(1, 8, dtype=torch.int64)
    losses = []
    with Live(parts_of(sharded, optimizer), limit) as live:
        for _ in range(3):
            loss = sharded(x, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, live.total


def test_what_one_rank_cannot_hold_trains_on_four():
    num = sum(p.numel() for p in Transformer(VOCAB, 8, layers=4, width=64).parameters())
    limit = 10 * num  # bytes; weights, gradients and AdamW's state take 16 a parameter
    results = run_ranks(train_within, 4, limit)
    assert all(losses[2] < losses[0] and total <= limit for losses, total in results)
    with pytest.raises(RankFailed) as failed:
        run_ranks(train_within, 1, limit)
    said = failed.value.failure
    assert said.error == "OverLimit"
    over = int(said.message.split(" bytes of tensors, ")[1].split(" more than")[0].replace(",", ""))
    total = int(said.message.split(" bytes of tensors, ")[0].replace(",", ""))
    assert over == total - limit > 0


# ---- prefetch, and the peak beside PyTorch's -----------------------------------------------------


def test_prefetch_starts_a_gather_before_the_block_before_has_computed():
    for spans in run_ranks(bench.record_steps, 2, [fsdp.FSDP], 1):
        at = {(lane, unit, turn): span for turn, lane, unit, span in in_turns(spans[0])}
        assert len(at) == 5 * bench.NUM_BLOCKS  # gathered twice
        for unit in range(2, bench.NUM_BLOCKS + 1):
            before, coming = at["forward", unit - 1, 0], at["gather", unit, 0]
            assert coming.start_s < before.stop_s
        for unit in range(1, bench.NUM_BLOCKS):
            assert at["gather", unit, 1].start_s < at["backward", unit + 1, 0].stop_s
            assert at["reduce", unit, 0].start_s >= at["backward", unit, 0].stop_s


def in_turns(spans):
    seen = Counter()
    for span in spans:
        yield seen[span.lane, span.unit], span.lane, span.unit, span
        seen[span.lane, span.unit] += 1


def peak_of_a_step(wrap):
    torch.manual_seed(0)
    model = Transformer(VOCAB, 8, layers=6, heads=2, width=64)
    model = wrap(model, list(model.blocks))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.zeros(1, 8, dtype=torch.int64)
    for _ in range(2):
        with Live(parts_of(model, optimizer)) as live:
            model(x, x).backward()
            optimizer.step()
        optimizer.zero_grad()
    return live.total


def test_the_peak_is_at_most_that_of_torch():
    (by_hand, _), (native, _) = (
        run_ranks(peak_of_a_step, 2, wrap) for wrap in (fsdp.FSDP, fully_shard.torch_fsdp)
    )
    assert by_hand <= 1.02 * native


# ---- shards in checkpoints of a job: tests/fsdp/test_train_fsdp.py -------------


def states(wrap):
    model = small_transformer()
    sharded = wrap(model, list(model.blocks))
    state = fully_shard.full_state(sharded)
    return {name: tuple(value.shape) for name, value in state.items()}


@pytest.mark.parametrize("wrap", [fsdp.FSDP, fully_shard.torch_fsdp])
def test_the_whole_state_has_the_names_and_shapes_of_the_plain_model(wrap):
    plain = {name: tuple(value.shape) for name, value in small_transformer(0).state_dict().items()}
    first, *others = run_ranks(states, 2, wrap)
    assert first == plain and others == [{}]
