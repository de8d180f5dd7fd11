"""A surface computed by many ranks, its roughness, and the sharpness of a minimum."""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Call, Place, Spec
from manyhands.checks.engine.values import same, show, tensor
from manyhands.checks.loss_surface.hill import Hill, equal, loss_number
from manyhands.instruments.ledger import Ledger
from manyhands.loss_surface import surface as truth

# ---- 2.4 ------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """A call of `surface`; each group has a hill of its own."""

    distances: tuple[float, ...]
    seed: int


def grids(n: int) -> list[Grid]:
    """One point, which is fewer than ranks; points that do not divide; some that do."""
    sizes = (1, 2, 3, 5)
    ways = [
        [(random.randint(-32, 32) + 24 * index) / 32 - 0.5 for index in range(size)]
        for size in sizes
    ]
    return [Grid(tuple(way[::-1]), cases.draw_seed()) for way in ways]


def surface_seen(answer: Callable, case: Grid, place: Place) -> dict:
    """The table, how many points this rank has computed, and what was left behind."""
    hill = Hill(case.seed + place.members[0])
    directions = hill.direction(), hill.direction()
    copies = [[part.clone() for part in direction] for direction in directions]
    asked_for = []

    def loss() -> Tensor:
        asked_for.append(1)
        return hill.loss()

    given = list(hill.parameters), directions, list(case.distances)
    with Ledger() as wire:
        table = tensor(answer(loss, *given, **place.options))
    size = len(case.distances)
    share = -(-size // place.n) * size  # of whole rows
    unchanged = all(equal(*both) for both in zip(directions, copies, strict=True))
    return {
        "the surface": table,
        "no rank computes more points than its share": len(asked_for) <= share,
        # all_gather_object makes two calls: it tells the sizes first.
        "all points travel in one message": len(wire.entries) <= 2,
        **hill.left_behind(),
        "the directions are unchanged": unchanged,
        "besides": len(asked_for) == size * size,
    }


SHARE = "my_share(range(len(losses)), rank, world_size)"
SUM = "dist.all_reduce(losses, group=group)"
ONE_CALL = f"Call {SUM} once on every rank, outside of loops and of any `if`."
MINE = "my_share(range(G^2), rank, world_size) gives the points of this rank in `group`."
surface = Spec(
    todo="2.4",
    truth=truth.surface,
    layouts=cases.THREE,
    cases=grids,
    observe=surface_seen,
    tell=lambda case: f"surface(loss, parameters, directions, {show(list(case.distances), 4)})",
    advice={
        "": f"{MINE} {ONE_CALL}",
        "no rank computes more points than its share": MINE,
        "all points travel in one message": ONE_CALL,
    },
    reasons="""
        no attribute 'rank' :: group=None stands for all ranks, and None has no methods. | Use
            dist.get_rank(group) and dist.get_world_size(group).
        missing 2 required positional arguments: 'rank' ::
            my_share has to know whose share it is. | {MINE}
    """,
    hints=(
        "Number the points from 0 to G^2 - 1. divmod(point, G) gives the row i and the column j of "
        "a point.",
        f"{MINE} It writes their losses into a table of G^2 zeros.",
        f"{SUM} adds up the tables of all ranks. Call it once, outside of loops, also on a rank "
        "without points; then .view(G, G).",
    ),
    mistakes=r"""
        {SHARE} => range(len(losses)) ::
            Every rank computes all points, and the tables are added up. | {MINE}
        {SHARE} => range(len(losses))
        {SUM} => pass :: Every rank computes all points, so nothing is shared.
        {SUM} => pass :: Each rank has only its own points. | {ONE_CALL}
        {SUM} => {SUM}\n    losses /= world_size ::
            The table is divided by the number of ranks. | One rank adds each loss, and others 0.
        {SUM} => dist.all_reduce(losses, op=dist.ReduceOp.MAX, group=group) ::
            The tables are put together by MAX, in which losses below 0 are lost. | {ONE_CALL}
        {SUM} => dist.reduce(losses, group_dst=0, group=group)\n    losses *= rank == 0 ::
            Only the first rank has the whole surface.
        i, j = divmod(point, len(grid)) => j, i = divmod(point, len(grid)) ::
            Rows and columns have changed places. | i, j = divmod(point, G).
        {SHARE} => range(rank * (len(losses) // world_size), (rank + 1) * (len(losses) //
            world_size)) :: Points that are left over by a division are computed by no rank.
            | {MINE}
        (grid[i], grid[j]) => (i, j) ::
            The numbers of row and column are used as distances. | Use grid[i] and grid[j].
        dtype=torch.float64 => dtype=torch.float32 ::
            The table is float32, which rounds the losses. | Make it with dtype=torch.float64.
        losses.view(len(grid), len(grid)) => losses ::
            The points are in one row. | The result has shape (G, G): losses.view(G, G).
        {SHARE} => range(len(losses) if rank == 0 else 0) ::
            The first rank computes all points. | {MINE}
        {SUM} => for one in losses:\n        dist.all_reduce(one, group=group) ::
            Each point has a message of its own. | {ONE_CALL}
    """,
    module=globals(),
)

# ---- 2.5 ------------------------------------------------------------------------------------


def tables() -> list[Call]:
    """Whole numbers, of which few are rounded: small, level in a row, a bowl, below 0, turned."""
    draw = cases.generator(cases.draw_seed())
    level = cases.values((5, 5), draw)
    level[2] = 7
    line = torch.arange(7, dtype=torch.float64) - random.randint(2, 4)
    bowl = line[:, None] ** 2 + line**2
    bowl[0, 1] += 1  # no symmetry, and still a single valley
    above = cases.values((6, 6), draw, torch.float64) + 60
    return [
        (cases.values((3, 3), draw),),
        (above,),
        (level,),
        (bowl,),
        ((1000 * cases.values((9, 4), draw) - 90_000)[1::2].t(),),
    ]


SINGLE = "walks[:, 0] + walks[:, -1] - 2 * lowest"
RATIO = f"(walked / ({SINGLE}).sum())"
BOTH = "torch.cat([losses, losses.T])"
LOWEST = "walks.min(dim=1).values"
roughness = Spec(
    todo="2.5",
    truth=truth.roughness,
    cases=tables,
    form=loss_number,
    tell=lambda case: (
        f"roughness({show(case.losses.flatten()[:9].tolist(), 4)}..., "
        f"of shape {tuple(case.losses.shape)})"
    ),
    same=lambda found, wanted, case: torch.isclose(found, wanted, 1e-4, 1e-5).item(),
    say=lambda found, wanted: f"gives {show(found.item())}, not {show(wanted.item())}",
    advice={"": "It is the sum of all walks, divided by the sum of all single valleys, minus 1."},
    reasons="""
        torch.return_types.min :: losses.min(dim=1) gives the lowest values together with their
            places. | Write losses.min(dim=1).values.
    """,
    hints=(
        "A walk climbs and descends the absolute differences of neighbours: "
        "losses.diff(dim=1).abs().",
        "A single valley goes down from the first point to the lowest, and up to the last: first - "
        "lowest + last - lowest, with the lowest of that walk.",
        f"Do it for rows and columns, {BOTH}. The result is the sum of all walks / the sum of all "
        "valleys - 1.",
    ),
    mistakes="""
        .item() - 1 => .item() :: The 1 is not subtracted. | A smooth bowl has roughness 0.
        {RATIO}.item() - 1 => (walked - ({SINGLE}).sum()).item() ::
            This is the difference between the walks and the valleys. | Divide, and subtract 1.
        {RATIO} => (({SINGLE}).sum() / walked) ::
            The ratio is upside down. | Divide the walks by the valleys.
        {BOTH} => losses :: Only the rows are walked. | Walk along rows and columns: {BOTH}.
        {BOTH} => losses.T :: Only the columns are walked.
        {LOWEST} => walks.min() :: The lowest point of the whole surface is used for every walk. | A
            single valley goes from the first point down to the lowest of its walk, and up again.
        ({SINGLE}) => (walks.max(dim=1).values - lowest) :: A valley is counted on one side only.
        {LOWEST} => walks.max(dim=1).values :: The highest point is used in place of the lowest.
        {LOWEST} => walks[:, walks.shape[1] // 2] ::
            The point in the middle is used in place of the lowest.
        ({SINGLE}) => (walks[:, 0] - walks[:, -1]).abs() ::
            A valley is counted as the way straight from the first point to the last.
        walks.diff(dim=1).abs() => walks.diff(dim=1) ::
            Steps up and down cancel, because no absolute value is taken. | Use .diff(dim=1).abs().
        walks.diff(dim=1).abs() => walks.diff(dim=1).square() ::
            The steps are squared. | Add up their absolute values.
        walks.diff(dim=1).abs() => walks.diff(n=2, dim=1).abs() ::
            These are differences of differences. | Use .diff(dim=1).abs().
    """,
    module=globals(),
)

# ---- 2.6 ------------------------------------------------------------------------------------


class Curved(NamedTuple):
    """A call of `sharpness` on a quadratic loss whose Hessian has these eigenvalues."""

    eigenvalues: tuple[float, ...]
    steps: int
    seed: int


SEEDS = 6


def curves() -> list[Curved]:
    """After one step, after two, which are enough here, and after many; below 0; two scales."""
    top = random.randint(24, 36) / 4
    half = (top,) * 5 + (0.0,) * 5
    rest = (2.0, 1.5, 1.0, 0.5, 0.25, -0.5, -1.0)
    return [
        Curved(half, 1, cases.draw_seed()),
        Curved(half, 2, cases.draw_seed()),
        Curved(tuple(-value for value in half), 2, cases.draw_seed()),
        Curved((top, 3.0, -2.0, *rest), 30, cases.draw_seed()),
        Curved((-top, 3.0, -2.0, *rest), 30, cases.draw_seed()),
    ]


class Bowl:
    """Two tensors, a quadratic loss of known curvature, and a gradient that is not 0."""

    def __init__(self, case: Curved) -> None:
        draw = cases.generator(case.seed)
        turn = torch.linalg.qr(torch.randn(10, 10, generator=draw, dtype=torch.float64)).Q
        values = torch.tensor(case.eigenvalues, dtype=torch.float64)
        self.hessian = (turn @ torch.diag(values) @ turn.T).float()
        self.slope = torch.randn(10, generator=draw)
        self.parameters = [nn.Parameter(torch.randn(s, generator=draw)) for s in ((2, 3), (4,))]
        self.parameters[0].grad = torch.ones(2, 3)
        self.before = [parameter.detach().clone() for parameter in self.parameters]
        self.moved = False

    def loss(self) -> Tensor:
        self.moved = self.moved or not equal(self.parameters, self.before)
        flat = torch.cat([parameter.flatten() for parameter in self.parameters])
        return flat @ self.hessian @ flat / 2 + self.slope @ flat


def sharpness_seen(answer: Callable, case: Curved) -> dict:
    """The eigenvalue; after one step what is known of a random direction; what was left behind."""
    bowl = Bowl(case)
    numbers = [Generator().manual_seed(case.seed + seed) for seed in (*range(SEEDS), 0)]
    found = [
        loss_number(answer(bowl.loss, list(bowl.parameters), case.steps, each)) for each in numbers
    ]
    seen = {}
    if case.steps == 1:
        top = case.eigenvalues[0]
        seen["the result lies between the smallest and the largest eigenvalue"] = all(
            -1e-3 < value < top * 1.0001 for value in found
        )
        seen["one step does not reach the largest eigenvalue"] = found[0].item() < 0.9999 * top
        seen["generators of two seeds give different results"] = not same(found[0], found[1], 1e-5)
    else:
        seen["the result"] = found[0]
        seen["it is the same for other seeds"] = all(same(f, found[0], 1e-3) for f in found)
    seen["generators of the same seed give the same result"] = same(found[0], found[-1])
    grads = [parameter.grad for parameter in bowl.parameters]
    seen["no .grad is changed"] = grads[1] is None and bool((grads[0] == 1).all())
    still = equal(bowl.parameters, bowl.before) and not bowl.moved
    return {**seen, "the parameters do not move": still}


UNIT = "v / v.norm()"
PRODUCT = "torch.autograd.grad(gradient @ v, parameters, retain_graph=True)"
LOOP = "In each step scale v to length 1, multiply it by H, and go on with the product."
sharpness = Spec(
    todo="2.6",
    truth=truth.sharpness,
    cases=curves,
    observe=sharpness_seen,
    tell=lambda case: (
        f"sharpness(loss, parameters, steps={case.steps}, generator), where H has the eigenvalues "
        f"{show(sorted(case.eigenvalues), 3)},"
    ),
    same=lambda found, wanted, case: same(found, wanted, 1e-3),
    advice={"": LOOP},
    reasons="""
        does not require grad and does not have a grad_fn ::
            A gradient has no graph of its own, unless it is asked for. | Compute it with
            create_graph=True, and not under torch.no_grad().
        Trying to backward through the graph a second time :: The graph of the gradient is used once
            in each step, and freed after the first. | Write {PRODUCT}.
    """,
    hints=(
        "Compute the gradient once, with create_graph=True, and flatten it to one vector. v is a "
        "random vector of the same length, from `generator`.",
        f"H v is {PRODUCT}, flattened.",
        "In the loop: v = v / v.norm(), then Hv. The result is v @ Hv of the last step, and the "
        "next v is Hv. nn.utils.parameters_to_vector flattens a list of tensors.",
    ),
    mistakes="""
        unit = {UNIT} => unit = v :: v is not scaled to length 1. | {LOOP}
        unit = {UNIT} => unit = {UNIT} if _ == 0 else v ::
            v is scaled to length 1 in the first step only.
        (unit @ v).item() => v.norm().item() ::
            This is the length of H v, which has no sign. | The result is v @ Hv.
        (unit @ v).item() => (v @ v).item() :: This is Hv @ Hv, the square of the eigenvalue.
        (unit @ v).item() => slope.norm().item() ::
            This is the length of the gradient. | The result is v @ Hv of the last step.
        (unit @ v).item() => (unit @ v).item() / 2 ::
            This is half of the eigenvalue. | The result is v @ Hv.
        range(steps) => range(1) ::
            Only one step is done, or each step does the first one again. | {LOOP}
        range(steps) => range(max(1, steps - 1)) :: One step too few is done.
        range(steps) => range(steps + 1) :: One step too many is done.
        torch.randn(slope.shape, generator=generator) => torch.ones(slope.shape) ::
            v is not random. | Draw it with torch.randn(..., generator=generator).
        torch.randn(slope.shape, generator=generator) => torch.randn(slope.shape) ::
            v does not follow from `generator`.
        torch.autograd.grad(slope @ unit, => torch.autograd.grad(slope.sum(),
        v = torch.cat([row.flatten() for row in rows]) => v = torch.cat([row.flatten() for row in
            rows]) * unit ::
            The sum of the gradient is differentiated, and then multiplied by v. | H v is {PRODUCT}.
    """,
    module=globals(),
)
