"""The layer-wise optimizers: against the papers' formulas in numpy, over shards, and as optimizers.

The formulas below were written from the papers alone. They know nothing of torch.
"""

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from manyhands.data import images
from manyhands.fsdp.flat import Flat
from manyhands.fsdp.units import FSDP
from manyhands.fsdp.zero import ShardedOptimizer
from manyhands.layerwise.comparison import Outcome, climb, compared, is_inside
from manyhands.layerwise.norms import shard_norms, whole_norms
from manyhands.layerwise.optimizers import LAMB, LARC, LARS, Layerwise, NovoGrad
from manyhands.layerwise.training import Split, Way, split
from manyhands.ranks.lab import run_ranks

CONSTANT = [0.1] * 5
VARYING = [0.02, 0.1, 0.07, 0.03, 0.15]
ALL = (LARS, LARC, LAMB, NovoGrad)
SHAPES = ((5, 3), (7,), (2, 3, 4), (1,))

# ---------------------------------------------------------------- the papers, in numpy


def norm(array: np.ndarray) -> float:
    return math.sqrt(float((array * array).sum()))


def lars(w, gradients, rates, m=0.9, decay=0.0005, trust=0.001, inside=True, ratio_of="sum"):
    """Algorithm 1 of arXiv 1708.03888."""
    v = np.zeros_like(w)
    for g, rate in zip(gradients, rates, strict=True):
        length = norm(g + decay * w) if ratio_of == "joint" else norm(g)
        below = length + decay * norm(w) if ratio_of == "sum" else length
        local = trust * norm(w) / below if norm(w) > 0 and length > 0 else 1.0
        if inside:
            v = m * v + rate * local * (g + decay * w)
            w = w - v
        else:
            v = m * v + local * (g + decay * w)
            w = w - rate * v
    return w


def larc(w, gradients, rates, m=0.9, decay=0.0, trust=0.02, eps=1e-8):
    """apex/parallel/LARC.py around SGD: the gradient is scaled, and then SGD knows no decay."""
    v = np.zeros_like(w)
    for g, rate in zip(gradients, rates, strict=True):
        if norm(w) > 0 and norm(g) > 0:
            local = trust * norm(w) / (norm(g) + decay * norm(w) + eps)
            g = (g + decay * w) * min(local / rate, 1.0)
        v = m * v + g
        w = w - rate * v
    return w


def lamb(w, gradients, rates, b1=0.9, b2=0.999, decay=0.01, eps=1e-6, correct=True, clamp=math.inf):
    """Algorithm 2 of arXiv 1904.00962."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        m_hat = m / (1 - b1**t) if correct else m
        v_hat = v / (1 - b2**t) if correct else v
        r = m_hat / (np.sqrt(v_hat) + eps) + decay * w
        both = norm(w) > 0 and norm(r) > 0
        w = w - rate * (min(norm(w), clamp) / norm(r) if both else 1.0) * r
    return w


def novograd(w, gradients, rates, b1=0.95, b2=0.98, decay=0.001, eps=1e-8):
    """Algorithm 1 of arXiv 1905.11286."""
    m = np.zeros_like(w)
    v = None
    for g, rate in zip(gradients, rates, strict=True):
        v = norm(g) ** 2 if not v else b2 * v + (1 - b2) * norm(g) ** 2
        m = b1 * m + (g / (math.sqrt(v) + eps) + decay * w)
        w = w - rate * m
    return w


WAYS = [  # optimizer, its options, the formula
    (LARS, {}, lars),
    (LARS, {"trust": 0.02, "weight_decay": 0.1}, lambda *a: lars(*a, trust=0.02, decay=0.1)),
    (LARS, {"lr_inside": False}, lambda *a: lars(*a, inside=False)),
    (LARS, {"weight_decay": 0.0}, lambda *a: lars(*a, decay=0.0)),
    (
        LARS,
        {"decay_in_ratio": "joint", "weight_decay": 0.2},
        lambda *a: lars(*a, ratio_of="joint", decay=0.2),
    ),
    (
        LARS,
        {"decay_in_ratio": "none", "weight_decay": 0.2},
        lambda *a: lars(*a, ratio_of="none", decay=0.2),
    ),
    (LARC, {}, larc),
    (LARC, {"trust": 0.5, "weight_decay": 0.1}, lambda *a: larc(*a, trust=0.5, decay=0.1)),
    (LAMB, {}, lamb),
    (LAMB, {"bias_correction": False}, lambda *a: lamb(*a, correct=False)),
    (LAMB, {"clamp": 1.5, "weight_decay": 0.3}, lambda *a: lamb(*a, clamp=1.5, decay=0.3)),
    (NovoGrad, {}, novograd),
    (NovoGrad, {"weight_decay": 0.3}, lambda *a: novograd(*a, decay=0.3)),
]


def name_of(value: object) -> str:
    if isinstance(value, type):
        return value.__name__
    return "-".join(value) if isinstance(value, dict) else ""


def weights_and_gradients(kind: str) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Four tensors, and five gradients of each."""
    draw = torch.Generator().manual_seed(11)
    scale = 1e6 if kind == "large weights" else 1.0
    double = {"generator": draw, "dtype": torch.float64}
    weights = [scale * torch.randn(shape, **double) for shape in SHAPES]
    gradients = [[torch.randn(shape, **double) for _ in range(5)] for shape in SHAPES]
    if kind == "zero weight":
        weights[1].zero_()
    if kind == "zero gradient":
        gradients[1][0].zero_()
        gradients[2][3].zero_()
    return weights, gradients


def train(optimizer: Layerwise, weights: list[Tensor], gradients: list, rates: list) -> None:
    """Steps with these gradients and rates."""
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        for weight, own in zip(weights, gradients, strict=True):
            weight.grad = own[step].clone()
        optimizer.step()


@pytest.mark.parametrize("kind", ["plain", "zero weight", "zero gradient", "large weights"])
@pytest.mark.parametrize("rates", [CONSTANT, VARYING], ids=["constant", "varying"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(name_of, way[:2])).strip("-"))
def test_five_steps_equal_the_paper(way: tuple, rates: list[float], kind: str) -> None:
    optimizer_of, options, formula = way
    weights, gradients = weights_and_gradients(kind)
    wanted = [
        formula(weight.numpy(), [one.numpy() for one in own], rates)
        for weight, own in zip(weights, gradients, strict=True)
    ]
    trained = [nn.Parameter(weight.clone()) for weight in weights]
    train(optimizer_of(trained, lr=rates[0], **options), trained, gradients, rates)
    for found, one in zip(trained, wanted, strict=True):
        np.testing.assert_allclose(found.detach().numpy(), one, rtol=1e-12, atol=1e-12)


def test_a_rate_inside_the_momentum_equals_one_outside_while_it_is_constant() -> None:
    def last(rates: list[float], inside: bool) -> Tensor:
        weights, gradients = weights_and_gradients("plain")
        trained = [nn.Parameter(weight) for weight in weights]
        train(LARS(trained, lr=0.1, trust=0.1, lr_inside=inside), trained, gradients, rates)
        return trained[0].detach()

    torch.testing.assert_close(last(CONSTANT, True), last(CONSTANT, False), rtol=1e-12, atol=0)
    assert (last(VARYING, True) - last(VARYING, False)).abs().max() > 1e-3


def test_what_a_zero_norm_does_can_be_chosen() -> None:
    def step(choice: str, weight: float, gradient: float) -> float:
        one = nn.Parameter(torch.full((3,), weight))
        one.grad = torch.full((3,), gradient)
        LARS([one], lr=1.0, weight_decay=0.5, zero_norm=choice).step()
        return one[0].item()

    assert [step(choice, 0.0, 0.25) for choice in ("one", "no_decay", "stay")] == [-0.25, -0.25, 0]
    assert [step(choice, 2.0, 0.0) for choice in ("one", "no_decay", "stay")] == [1.0, 2.0, 2.0]


# ---------------------------------------------------------------- shards


def sharded_by_hand(kind: type[Layerwise]) -> list[Tensor]:
    """Five steps on this rank's rows; returns them."""
    rank, n = dist.get_rank(), dist.get_world_size()
    weights, gradients = weights_and_gradients("plain")
    shards = [
        nn.Parameter(weight.chunk(n)[rank].clone()) if rank < len(weight.chunk(n)) else None
        for weight in weights
    ]
    shards = [
        nn.Parameter(weight[:0].clone()) if shard is None else shard
        for shard, weight in zip(shards, weights, strict=True)
    ]
    own = [
        [one.chunk(n)[rank] if rank < len(one.chunk(n)) else one[:0] for one in steps]
        for steps in gradients
    ]
    train(kind(shards, lr=0.1, group=dist.group.WORLD), shards, own, VARYING)
    return [shard.detach() for shard in shards]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", ALL, ids=name_of)
def test_shards_by_hand_equal_whole_layers(kind: type[Layerwise], num_ranks: int) -> None:
    weights, gradients = weights_and_gradients("plain")
    whole = [nn.Parameter(weight) for weight in weights]
    train(kind(whole, lr=0.1), whole, gradients, VARYING)
    parts = run_ranks(sharded_by_hand, num_ranks, kind)
    for index, one in enumerate(whole):
        joined = torch.cat([rank[index] for rank in parts])
        torch.testing.assert_close(joined, one.detach(), rtol=1e-6, atol=1e-9)


def network(hidden: int = 9) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()


def batch() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def five_steps(model: nn.Module, kind: type[Layerwise], inputs: Tensor) -> list[float]:
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [float(ratio) for ratio in optimizer.ratios]


def sharded_by_torch(kind: type[Layerwise], replicas: int) -> tuple[list[float], list[Tensor]]:
    n = dist.get_world_size()
    shape = (replicas, n // replicas) if replicas > 1 else (n,)
    names = ("replicate", "shard") if replicas > 1 else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    own = batch().chunk(n)[dist.get_rank()]
    ratios = five_steps(model, kind, own)
    return ratios, [one.full_tensor().detach() for one in model.parameters()]


@pytest.mark.parametrize("replicas, num_ranks", [(1, 2), (1, 4), (2, 4)])
@pytest.mark.parametrize("kind", ALL, ids=name_of)
def test_fully_sharded_models_equal_one_process(
    kind: type[Layerwise], replicas: int, num_ranks: int
) -> None:
    model = network()
    wanted = five_steps(model, kind, batch())
    for ratios, weights in run_ranks(sharded_by_torch, num_ranks, kind, replicas):
        assert ratios == pytest.approx(wanted, rel=1e-6)
        for found, one in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(found, one.detach(), rtol=1e-6, atol=1e-9)


def split_and_sharded(kind: type[Layerwise]) -> dict[str, list]:
    """Tensor parallelism over one dimension of a grid, `fully_shard` over the other."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = network(hidden=8)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data"])
    norms = [float(one) for one in whole_norms(list(model.parameters()))]
    own = batch().chunk(2)[mesh["data"].get_local_rank()]
    ratios = five_steps(model, kind, own)
    weights = [one.full_tensor().detach() for one in model.parameters()]
    return {"norms": norms, "ratios": ratios, "weights": weights}


@pytest.mark.parametrize("kind", ALL, ids=name_of)
def test_layers_that_are_split_and_sharded_equal_one_process(kind: type[Layerwise]) -> None:
    """A matrix is cut along both dimensions of the mesh, by a placement that is no `Shard`."""
    model = network(hidden=8)
    norms = [float(one.detach().norm()) for one in model.parameters()]
    wanted = five_steps(model, kind, batch())
    for found in run_ranks(split_and_sharded, 4, kind):
        assert found["norms"] == pytest.approx(norms, rel=1e-12)
        assert found["ratios"] == pytest.approx(wanted, rel=1e-6)
        for own, one in zip(found["weights"], model.parameters(), strict=True):
            torch.testing.assert_close(own, one.detach(), rtol=1e-6, atol=1e-9)


def partial_sums() -> str:
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    summand = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    try:
        whole_norms([summand])
    except ValueError as problem:
        return str(problem)
    return "a norm"


def test_a_tensor_that_still_has_to_be_added_up_is_refused() -> None:
    for words in run_ranks(partial_sums, 2):
        assert words.startswith("a DTensor with placements") and words.endswith("reduce it first")
        assert "\n" not in words


def summed_gradient(kind: type[Layerwise]) -> Tensor:
    """Two steps where each rank has a term of the gradient, as under torch's SequenceParallel."""
    from torch.distributed.tensor import DTensor, Partial, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.arange(1.0, 5.0), mesh))
    optimizer = kind([weight], lr=0.5)
    for _ in range(2):
        weight.grad = DTensor.from_local(TERMS[dist.get_rank()], mesh, [Partial()])
        optimizer.step()
    return weight.detach().full_tensor()


TERMS = torch.tensor([[1.0, -2.0, 3.0, 0.0], [3.0, 2.0, -1.0, 1.0]])


@pytest.mark.parametrize("kind", ALL, ids=name_of)
def test_gradients_that_still_have_to_be_added_up_equal_one_process(kind: type[Layerwise]) -> None:
    weight = nn.Parameter(torch.arange(1.0, 5.0))
    optimizer = kind([weight], lr=0.5)
    for _ in range(2):
        weight.grad = TERMS.sum(0)
        optimizer.step()
    for found in run_ranks(summed_gradient, 2, kind):
        torch.testing.assert_close(found, weight.detach(), rtol=1e-6, atol=0)


def several_layers_in_a_shard(kind: type[Layerwise], is_zero: bool) -> str:
    model = network()

    def make(shards: Iterable[nn.Parameter]) -> Layerwise:
        return kind(shards, lr=0.1, group=dist.group.WORLD)

    try:
        if is_zero:
            ShardedOptimizer([Flat(model[0].parameters())], make)
        else:
            make(FSDP(model, [model[0]]).parameters())
    except ValueError as problem:
        return str(problem)
    return "accepted"


@pytest.mark.parametrize("is_zero", [False, True], ids=["FSDP", "ZeRO"])
@pytest.mark.parametrize("kind", ALL, ids=name_of)
def test_a_shard_of_several_layers_is_refused(kind: type[Layerwise], is_zero: bool) -> None:
    for words in run_ranks(several_layers_in_a_shard, 2, kind, is_zero):
        assert words.startswith("a shard holds parts of 2 layers, and each layer has a ratio")
        assert "\n" not in words


def replicated(kind: type[Layerwise]) -> tuple[list[float], list[Tensor]]:
    model = nn.parallel.DistributedDataParallel(network())
    ratios = five_steps(model, kind, batch().chunk(dist.get_world_size())[dist.get_rank()])
    weights = [one.detach() for one in model.module.parameters()]
    return ratios, weights


@pytest.mark.parametrize("kind", ALL, ids=name_of)
def test_replicas_under_ddp_equal_one_process(kind: type[Layerwise]) -> None:
    model = network()
    wanted = five_steps(model, kind, batch())
    for ratios, weights in run_ranks(replicated, 2, kind):
        assert ratios == pytest.approx(wanted, rel=1e-6)
        for found, one in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(found, one.detach(), rtol=1e-6, atol=1e-9)


def norms_seen() -> tuple[list[float], list[float], list[float]]:
    """Norms of three tensors cut unevenly over three ranks, and DTensor's of a fourth."""
    from torch.distributed.tensor import Shard, distribute_tensor

    rank = dist.get_rank()
    cuts = [(0, 4, 4, 9), (0, 0, 5, 5), (0, 1, 2, 3)]
    whole = [torch.arange(-4.0, 5.0), -torch.arange(1.0, 6.0), torch.tensor([3.0, 0.0, -4.0])]
    parts = [one[c[rank] : c[rank + 1]] for one, c in zip(whole, cuts, strict=True)]
    mesh = init_device_mesh("cpu", (3,))
    cut = distribute_tensor(whole[0].reshape(3, 3), mesh, [Shard(1)])
    (ours,) = whole_norms([cut])
    theirs = torch.linalg.vector_norm(cut).full_tensor()
    return (
        shard_norms(parts).tolist(),
        shard_norms(parts, order=math.inf).tolist(),
        [float(ours), float(theirs)],
    )


def test_norms_of_parts_are_those_of_the_whole() -> None:
    two = [60**0.5, 55**0.5, 5.0]
    for squares, largest, of_torch in run_ranks(norms_seen, 3):
        assert squares == pytest.approx(two, rel=1e-15)
        assert largest == [4.0, 5.0, 4.0]
        assert of_torch == pytest.approx([60**0.5] * 2, rel=1e-6)


# ---------------------------------------------------------------- as any optimizer of torch


@pytest.fixture(params=ALL, ids=name_of)
def kind(request: pytest.FixtureRequest) -> Iterator[type[Layerwise]]:
    yield request.param


def test_a_state_dict_goes_on_bit_for_bit(kind: type[Layerwise]) -> None:
    def steps(model: nn.Module, optimizer: Layerwise, count: int) -> None:
        for number in range(count):
            optimizer.zero_grad()
            model(batch().float() + number).square().mean().backward()
            optimizer.step()

    model = network().float()
    optimizer = kind(model.parameters(), lr=0.1)
    steps(model, optimizer, 3)
    again = copy.deepcopy(model)
    other = kind(again.parameters(), lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, 2)
    steps(again, other, 2)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_groups_have_options_of_their_own(kind: type[Layerwise]) -> None:
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = kind([{"params": [first]}, {"params": [second], "lr": 0.0}], lr=0.1)
    first.grad = second.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(first, torch.ones(3)) and torch.equal(second, torch.ones(3))


def test_a_closure_gives_the_loss(kind: type[Layerwise]) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert weight.grad.tolist() == [2.0] * 3 and not torch.equal(weight, torch.ones(3))


def test_a_weight_without_a_gradient_stays(kind: type[Layerwise]) -> None:
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = kind([unused, used], lr=0.1)
    used.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(unused, torch.ones(3)) and unused not in optimizer.state
    unused.grad = used.grad = None
    optimizer.step()
    assert optimizer.ratios == []


def test_state_is_of_the_weight_s_type(kind: type[Layerwise]) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        weight = nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = kind([weight], lr=0.1)
        weight.grad = torch.ones(3, dtype=dtype)
        optimizer.step()
        state = [one for one in optimizer.state[weight].values() if one.shape == weight.shape]
        assert weight.dtype == dtype and state and {one.dtype for one in state} == {dtype}


def test_a_step_allocates_no_state_that_is_there_already(
    kind: type[Layerwise], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    make, made = torch.zeros_like, []
    monkeypatch.setattr(torch, "zeros_like", lambda one: made.append(one.numel()) or make(one))
    optimizer.step()
    assert all(size == 1 for size in made)


def test_the_average_of_novograd_is_precise_where_weights_are_not() -> None:
    """In bfloat16 the average would stay where 0.98 of it and 0.02 of the new one round to it."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = NovoGrad([weight], lr=0.0)
    for norm_of_gradient in (2.0, *[1.0] * 300):
        weight.grad = torch.full((4,), norm_of_gradient / 2, dtype=torch.bfloat16)
        optimizer.step()
    assert optimizer.state[weight]["square"].item() == pytest.approx(1 + 3 * 0.98**300, rel=1e-4)


@pytest.mark.parametrize(
    "words, gradient",
    [
        ("complex", lambda: (nn.Parameter(torch.ones(3, dtype=torch.cfloat)), torch.ones(3))),
        ("sparse", lambda: (nn.Parameter(torch.ones(3)), torch.ones(3).to_sparse())),
    ],
    ids=["complex", "sparse"],
)
def test_other_gradients_are_refused(kind: type[Layerwise], words: str, gradient: Callable) -> None:
    weight, found = gradient()
    weight.grad = found.to(weight.dtype)
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    before = weight.detach().clone()
    with pytest.raises(ValueError, match=f"{kind.__name__} got a {words} gradient"):
        kind([{"params": [other]}, {"params": [weight]}], lr=0.1).step()
    assert torch.equal(weight, before) and torch.equal(other, torch.ones(3))


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
def test_options_below_zero_are_refused(kind: type[Layerwise], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is -1: it must not be negative"):
        kind([nn.Parameter(torch.ones(1))], **({"lr": 0.1} | {name: -1}))


CHOICES = [
    (LARS, "decay_in_ratio", "sums", "'sum', 'joint', 'none'"),
    (LARS, "zero_norm", "no-decay", "'one', 'no_decay', 'stay'"),
    (LARC, "decay_in_ratio", "Sum", "'sum', 'joint', 'none'"),
    (LARC, "zero_norm", "two", "'one', 'no_decay', 'stay'"),
    (LAMB, "decay_in_ratio", "sum", "'joint', 'none'"),
    (LAMB, "zero_norm", "no_decay", "'one', 'stay'"),
    (NovoGrad, "first_square", "all", "'whole', 'average'"),
]


@pytest.mark.parametrize("optimizer, name, value, allowed", CHOICES)
def test_a_misspelt_choice_is_refused(
    optimizer: type[Layerwise], name: str, value: str, allowed: str
) -> None:
    words = f"{name} is {value!r}: take one of {allowed}"
    params = [nn.Parameter(torch.ones(1))]
    for groups, options in ((params, {name: value}), ([{"params": params, name: value}], {})):
        with pytest.raises(ValueError, match=words):
            optimizer(groups, lr=0.1, **options)


@pytest.mark.parametrize(
    "optimizer, option, words",
    [
        (LARS, {"momentum": -1.0}, "momentum is -1.0: it must not be negative"),
        (LARC, {"trust": -0.1}, "trust is -0.1: it must not be negative"),
        (LARS, {"weight_decay": math.nan}, "weight_decay is nan: it must not be negative"),
        (LAMB, {"betas": (1.5, 0.9)}, r"betas is \(1.5, 0.9\): take two numbers of at least 0"),
        (NovoGrad, {"betas": (0.9, -0.1)}, "take two numbers of at least 0 and below 1"),
        (NovoGrad, {"betas": (0.9,)}, "take two numbers of at least 0 and below 1"),
        (LAMB, {"clamp": 0.0}, "clamp is 0.0: take a positive number, or None for no limit"),
    ],
)
def test_a_number_out_of_its_range_is_refused(
    optimizer: type[Layerwise], option: dict, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        optimizer([nn.Parameter(torch.ones(1))], lr=0.1, **option)


def test_without_shards_a_direction_lives_until_its_update() -> None:
    """LAMB's is as large as the weight; all at once would be one more copy of the model."""
    made, num_alive = [], []

    class Counting(LAMB):
        def direction(self, weight: Tensor, options: dict) -> Tensor:
            found = super().direction(weight, options)
            made.append(weakref.ref(found))
            num_alive.append(sum(one() is not None for one in made))
            return found

    weights = [nn.Parameter(torch.ones(3)) for _ in range(5)]
    for weight in weights:
        weight.grad = torch.ones(3)
    Counting(weights, lr=0.1).step()
    assert max(num_alive) == 2  # the last one is let go when the next one has been made


# ---------------------------------------------------------------- the comparison


def test_a_search_ends_with_a_worse_rate_on_each_side() -> None:
    for best in (0.01, 0.3, 1.0, 50.0):
        tried = climb(lambda rate, best=best: -abs(math.log(rate / best)), 1.0)
        outcome = Outcome(max(tried, key=tried.__getitem__), sorted(tried.items()), [])
        assert is_inside(outcome) and best / 2**0.51 < outcome.rate < best * 2**0.51
        assert sorted(tried) == [min(tried) * 2**k for k in range(len(tried))]
    assert sorted(climb(lambda rate: 0.5, 1.0)) == [0.5, 1.0, 2.0]
    assert not is_inside(Outcome(1.0, [(0.5, 0.1), (1.0, 0.2)], []))


def test_what_chooses_a_rate_does_not_judge_it() -> None:
    """Where only the test images are labelled at random, the same rate is chosen, and fails."""
    data = split(images.load("embedded"))
    assert [len(part) for part in data[:6:2]] == [973, 324, 500]
    assert "973 images to train on, 324 for validation and 500 to test on, 8 x 8" in data.note
    draw = torch.Generator().manual_seed(1)
    shuffled = data.test_labels[torch.randperm(len(data.test_labels), generator=draw)]
    way = Way(torch.optim.SGD, {"momentum": 0.9})

    def found(data: Split) -> Outcome:
        return compared(data, way, 64, 0.2, 60, tuning=1, seeds=(1, 2))

    honest = found(data)
    fooled = found(data._replace(test_labels=shuffled))
    assert honest[:2] == fooled[:2] and len(honest.accuracies) == 2
    assert min(honest.accuracies) > 0.6 and max(fooled.accuracies) < 0.3
