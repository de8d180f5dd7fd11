"""Answers to lesson 12: RIGHT ones of another shape than the course's own, and WRONG ones that are
no slip of it, with words of their verdict."""

import itertools
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from manyhands.checks.engine.answer import Pair
from manyhands.pipeline import bubble, engine, schedules
from manyhands.pipeline.bubble import needed, unit_cost
from manyhands.pipeline.schedules import Action

# ---- 12.1 partition -------------------------------------------------------------------------


def slowest(costs, bounds):
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))


def partition_by_trying_all(costs, num_stages):
    n = len(costs)
    cuts = [(0, *cuts, n) for cuts in itertools.combinations(range(1, n), num_stages - 1)]
    return min(cuts, key=lambda bounds: slowest(costs, bounds))


def partition_by_recursion(costs, num_stages):
    def solve(stop, num):
        if stop < num:
            raise ValueError("too few layers")
        if num == 1:
            return [0, stop]
        ways = [[*solve(cut, num - 1), stop] for cut in range(num - 1, stop)]
        return min(ways, key=lambda bounds: slowest(costs, bounds))

    return np.array(solve(len(costs), num_stages))


def partition_by_capacity(costs, num_stages):
    """The smallest capacity that fits into num_stages; its last stages may be empty."""
    if len(costs) < num_stages:
        raise ValueError("too few layers")
    sums = sorted(
        {sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)}
    )
    for capacity in sums:
        bounds = [0]
        for layer in range(len(costs)):
            if sum(costs[bounds[-1] : layer + 1]) > capacity + 1e-9:
                bounds.append(layer)
        if len(bounds) <= num_stages and max(costs) <= capacity:
            return bounds + [len(costs)] * (num_stages + 1 - len(bounds))


# ---- 12.2 Pipeline --------------------------------------------------------------------------


class Parts(engine.Pipeline):
    """The engine in small parts."""

    def take(self, stage, i):
        if stage == 0:
            return self.inputs[i]
        x = self.mail.receive(kind="F", stage=stage, i=i)
        x.requires_grad = True
        return x

    def pass_on(self, stage, i, out):
        if stage == self.last:
            return None
        return self.mail.send(kind="F", tensor=out.detach().clone(), stage=stage + 1, i=i)

    def forward(self, stage, i):
        x = self.take(stage, i)
        start_s = time.time()
        module = self.stages[stage]
        out = checkpoint(module, x, use_reentrant=False) if self.recompute else module(x)
        if stage == self.last:
            out = self.loss_fn(out, self.targets[i]) / self.m
            self.losses.append(out.item())
        self.spans.append((Action("F", stage, i), start_s, time.time()))
        self.saved[stage, i] = [x, out, self.pass_on(stage, i, out)]

    def run_backward(self, stage, out, grad):
        loss = out if stage == self.last else (out * grad).sum()
        loss.backward()

    def backward(self, stage, i):
        x, out, send = self.saved[stage, i]
        del self.saved[stage, i]
        if send is not None:
            send.wait()
        grad = None if stage == self.last else self.mail.receive("B", stage, i)
        with self.span(Action("B", stage, i)):
            self.run_backward(stage, out, grad)
        if stage:
            self.sends.append(self.mail.send("B", x.grad, stage - 1, i))


class InOtherWords(engine.Pipeline):
    """First and last stage are told by what there is, not by numbers; sends are sent at the end."""

    def forward(self, stage, i):
        is_first, is_last = not stage, self.last == stage
        given = self.inputs[i] if is_first else self.mail.receive("F", stage, i)
        given.requires_grad_(given.is_floating_point())
        with self.span(Action("F", stage, i)):
            result = self.run(stage, given)
            message = result.data
            if is_last:
                result = self.loss_fn(result, self.targets[i]).div(self.m)
                self.losses += [result.data]
        self.saved[stage, i] = (
            given,
            result,
            None if is_last else self.mail.send("F", message, 1 + stage, i),
        )

    def backward(self, stage, i):
        given, result, send = self.saved[stage, i]
        seeds = () if send is None else (self.mail.receive("B", stage, i),)
        with self.span(Action("B", stage, i)):
            result.backward(*seeds)
        del self.saved[stage, i]
        if send is not None:
            send.wait()
        if stage != 0:
            self.sends += [self.mail.send("B", given.grad, stage - 1, i)]


class SendsWithoutMail(Parts):
    def pass_on(self, stage, i, out):
        if stage < self.last:
            dist.send(out.detach(), stage + 1)


class KeepsOutputs(Parts):
    def run_backward(self, stage, out, grad):
        self.kept = [*getattr(self, "kept", []), out]
        super().run_backward(stage, out, grad)


# ---- 12.3 sum_tied --------------------------------------------------------------------------


def sum_tied_with_all_parts_at_once(tied, group=None):
    rank = dist.get_rank(group)
    for param, ranks in tied:
        if rank not in ranks:
            continue
        first = ranks[0]
        if rank != first:
            own = torch.zeros_like(param) if param.grad is None else param.grad
            dist.isend(own, group=group, group_dst=first).wait()
            param.grad = torch.zeros_like(own)
            dist.recv(param.grad, group=group, group_src=first)
            continue
        parts = [torch.empty_like(param) for _ in ranks[1:]]
        pairs = list(zip(parts, ranks[1:], strict=True))
        works = [dist.irecv(part, group=group, group_src=other) for part, other in pairs]
        for work in works:
            work.wait()
        param.grad = param.grad + sum(parts)
        for other in ranks[1:]:
            dist.isend(param.grad, group=group, group_dst=other).wait()


def sum_tied_everybody_to_everybody(tied, group=None):
    rank = dist.get_rank(group)
    for param, ranks in tied:
        if rank in ranks:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            own = param.grad.clone()
            others = [other for other in ranks if other != rank]
            works = [dist.isend(own, group=group, group_dst=other) for other in others]
            for other in others:
                part = torch.empty_like(own)
                dist.recv(part, group=group, group_src=other)
                param.grad += part
            for work in works:
                work.wait()


def all_send_first(tied, group=None):
    rank = dist.get_rank(group)
    for param, ranks in tied:
        own = None if param.grad is None else param.grad.clone()
        others = [other for other in ranks if other != rank] if rank in ranks else []
        for other in others:
            dist.send(own, group=group, group_dst=other)
        for other in others:
            part = torch.empty_like(own)
            dist.recv(part, group=group, group_src=other)
            param.grad += part


def zeros_where_there_is_none(tied, group=None):
    for param, ranks in tied:
        part = param.grad if dist.get_rank(group) in ranks else torch.zeros_like(param)
        dist.all_reduce(part, group=group)


# ---- 12.4, 12.7, 12.9: schedules ------------------------------------------------------------


def gpipe_in_loops(p, m):
    schedule = []
    for rank in range(p):
        actions = []
        for i in range(m):
            actions.append(Action("F", rank, i))
        for i in range(m):
            actions.append(Action(kind="B", stage=rank, microbatch=i))
        schedule.append(tuple(actions))
    return tuple(schedule)


def gpipe_of_arrays(p, m):
    return [[Action("FB"[i // m], rank, i % m) for i in np.arange(2 * m)] for rank in np.arange(p)]


def gpipe_of_tuples(p, m):
    return [[(kind, rank, i) for kind in "FB" for i in range(m)] for rank in range(p)]


def gpipe_for_people(p, m):
    return [[f"{kind}{i}" for kind in "FB" for i in range(m)] for rank in range(p)]


def gpipe_as_generator(p, m):
    yield from schedules.gpipe(p, m)


def by_walking(p, m):
    schedule = []
    for rank in range(p):
        f = b = 0
        actions = []
        while b < m:
            if f < m and f - b < p - rank:
                actions.append(Action("F", rank, f))
                f += 1
            else:
                actions.append(Action("B", rank, b))
                b += 1
        schedule.append(actions)
    return schedule


def in_three_loops(p, m):
    schedule = []
    for rank in range(p):
        warmup = min(m, p - rank - 1)
        actions = [Action("F", rank, i) for i in range(warmup)]
        for i in range(m - warmup):
            actions += [Action("F", rank, warmup + i), Action("B", rank, i)]
        actions += [Action("B", rank, i) for i in range(m - warmup, m)]
        schedule.append(actions)
    return schedule


def backwards_turned_round(p, m):
    return [
        [a if a.kind == "F" else a._replace(stage=p - 1 - a.stage) for a in mine]
        for mine in schedules.one_f_one_b(p, m)
    ]


def interleaved_by_formulas(p, m, v=2):
    rounds = max(1, m // p)
    if m % rounds:
        raise ValueError("no")
    g = m // rounds

    def place(step, rank, forward):
        chunk, turn = step // g % v, step // (g * v)
        chunk = chunk if forward else v - 1 - chunk
        return Action("F" if forward else "B", chunk * p + rank, turn * g + step % g)

    schedule = []
    for rank in range(p):
        warmup = min(m * v, (p - rank - 1) * 2 + (v - 1) * g)
        actions = [place(step, rank, True) for step in range(warmup)]
        for step in range(warmup, m * v):
            actions += [place(step, rank, True), place(step - warmup, rank, False)]
        actions += [place(step, rank, False) for step in range(m * v - warmup, m * v)]
        schedule.append(actions)
    return schedule


def interleaved_as_arrays(p, m, v=2):
    groups = max(1, m // p)
    if m != groups * (m // groups):
        raise ValueError("uneven groups")
    order = np.arange(m).reshape(groups, -1)
    places = [(chunk, i) for group in order for chunk in range(v) for i in group]
    schedule = []
    for rank in range(p):
        forwards = [Action("F", chunk * p + rank, i) for chunk, i in places]
        first = min(2 * (p - 1 - rank) + (v - 1) * order.shape[1], len(places))
        row = forwards[:first]
        for chunk, i in places:
            row += [*forwards[first : first + 1], Action("B", (v - 1 - chunk) * p + rank, i)]
            first += 1
        schedule.append(row)
    return schedule


def interleaved_without_default(p, m, v):
    return schedules.interleaved(p, m, v)


# ---- 12.5 simulate --------------------------------------------------------------------------


def one_action_at_a_time(schedule, cost=unit_cost):
    """Take the first rank that can go on."""
    num_stages = 1 + max(action.stage for mine in schedule for action in mine)
    spans, ends, done = [[] for _ in schedule], [0] * len(schedule), {}
    while sum(map(len, spans)) < sum(map(len, schedule)):
        for rank, mine in enumerate(schedule):
            if len(spans[rank]) == len(mine):
                continue
            action = mine[len(spans[rank])]
            before = needed(action, num_stages)
            if all(other in done for other in before):
                begin = max([ends[rank], *(done[other] for other in before)])
                ends[rank] = done[action] = begin + cost(action)
                spans[rank].append((action, begin, ends[rank]))
                break
        else:
            raise ValueError(f"deadlock: rank {rank} cannot go on with {mine[-1]}")
    return spans


def by_relaxation(schedule, cost=unit_cost):
    """Push starts up until nothing moves; a deadlock pushes without end."""
    num_stages = 1 + max(action.stage for mine in schedule for action in mine)
    start = {action: 0 for mine in schedule for action in mine}
    for _ in range(len(start) + 1):
        moved = False
        for mine in schedule:
            for index, action in enumerate(mine):
                before = needed(action, num_stages) + ([mine[index - 1]] if index else [])
                if any(other not in start for other in before):
                    raise ValueError(f"Action {action} waits for what nobody does")
                first = max([0, *(start[other] + cost(other) for other in before)])
                moved, start[action] = moved or first > start[action], first
        if not moved:
            return [[(a, start[a], start[a] + cost(a)) for a in mine] for mine in schedule]
    raise ValueError(f"deadlock: a rank waits at {action}")


def in_lock_step(schedule, cost=unit_cost):
    num_stages = 1 + max(action.stage for mine in schedule for action in mine)
    spans, done, now = [[] for _ in schedule], set(), 0
    while any(len(s) < len(mine) for s, mine in zip(spans, schedule, strict=True)):
        going = []
        for s, mine in zip(spans, schedule, strict=True):
            if len(s) < len(mine) and done.issuperset(needed(mine[len(s)], num_stages)):
                going.append((s, mine[len(s)]))
        if not going:
            raise ValueError("rank 0 is stuck")
        for s, action in going:
            s.append((action, now, now + cost(action)))
            done.add(action)
        now += max(cost(action) for _, action in going)
    return spans


def names_another_rank(schedule, cost=unit_cost):
    try:
        return bubble.simulate(schedule, cost)
    except ValueError:
        raise ValueError("deadlock: rank 1 waits at F0") from None


def fifty_rounds(schedule, cost=unit_cost):
    spans = bubble.simulate(schedule, cost)
    return [mine[:100] for mine in spans]


# ---- 12.6 and 12.8 --------------------------------------------------------------------------


def own_idle_share(spans):
    ends = [stop for mine in spans for *_, stop in mine]
    starts = [start for mine in spans for _, start, _ in mine]
    total = max(ends) - min(starts)
    idle = sum(total - sum(stop - start for _, start, stop in mine) for mine in spans)
    return np.float64(idle / (len(spans) * total))


def own_bubble(p, m, v=1):
    return np.array([(p - 1) / (v * m), (p - 1) / (v * m + p - 1)])


def bubble_of_tensors(p, m, v=1):
    empty = torch.tensor((p - 1) / v, dtype=torch.float64)
    return empty / m, empty / (m + empty)


def only_gaps(spans):
    gaps = sum(b[1] - a[2] for mine in spans for a, b in itertools.pairwise(mine))
    starts = [start for mine in spans for _, start, _ in mine]
    ends = [stop for mine in spans for *_, stop in mine]
    return gaps / ((max(ends) - min(starts)) * len(spans))


def half_a_bubble(p, m, v=1):
    return (p - 1) / (2 * v * m), (p - 1) / (2 * v * m + p - 1)


def in_flight_of_sets(actions):
    kept, most = set(), 0
    for kind, stage, i in actions:
        (kept.add if kind == "F" else kept.discard)((stage, i))
        most = max(most, len(kept))
    return most


def in_flight_added_up(actions):
    return np.cumsum([1 if action.kind == "F" else -1 for action in actions]).max()


def empties_the_list(actions):
    num = most = 0
    while actions:
        num += 1 if actions.pop(0).kind == "F" else -1
        most = max(most, num)
    return most


# ---- 12.10 torch_pipeline -------------------------------------------------------------------


def torch_pipeline_written_out(stages, num_stages, m, loss_fn, kind, group=None):
    parts = []
    for number in sorted(stages):
        where = next(stages[number].parameters()).device
        parts.append(
            pipelining.PipelineStage(stages[number], number, num_stages, where, group=group)
        )
    if kind == "gpipe":
        return pipelining.ScheduleGPipe(parts[0], n_microbatches=m, loss_fn=loss_fn)
    if kind == "1f1b":
        return pipelining.Schedule1F1B(parts[0], n_microbatches=m, loss_fn=loss_fn)
    if kind == "interleaved":
        return pipelining.ScheduleInterleaved1F1B(parts, n_microbatches=m, loss_fn=loss_fn)
    return pipelining.ScheduleInterleavedZeroBubble(parts, n_microbatches=m, loss_fn=loss_fn)


def torch_pipeline_by_name(stages, num_stages, m, loss_fn, kind, group=None, device=None):
    names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
    made = []
    for index, module in stages.items():
        where = device or next(module.parameters()).device
        made.append(pipelining.PipelineStage(module, index, num_stages, where, group=group))
    kind_of = getattr(pipelining, f"Schedule{names.get(kind, 'InterleavedZeroBubble')}")
    return kind_of(made if kind[0] in "iz" else made[0], m, lambda out, y: loss_fn(out, y))


def torch_pipeline_on_cpu(*args):
    return torch_pipeline_by_name(*args, device=torch.device("cpu"))


def several_in_one(stages, num_stages, m, loss_fn, kind, group=None):
    stage = nn.Sequential(*stages.values())
    stage = pipelining.PipelineStage(stage, 0, num_stages, torch.device("cpu"), group=group)
    return pipelining.ScheduleGPipe(stage, m, loss_fn=loss_fn)


def class_not_called(stages, num_stages, m, loss_fn, kind, group=None):
    return pipelining.ScheduleGPipe


# ---- 12.11 make_grid ------------------------------------------------------------------------


def grid_of_a_mesh(num_stages):
    world_size = dist.get_world_size()
    if world_size % num_stages != 0:
        raise ValueError(f"{world_size} ranks, {num_stages} stages")
    mesh = init_device_mesh("cpu", (num_stages, world_size // num_stages))
    return mesh.get_group(0), mesh.get_group(1)


def grid_in_one_loop(num_stages):
    rank, n = dist.get_rank(), dist.get_world_size()
    d, rest = divmod(n, num_stages)
    if rest:
        raise ValueError("uneven")
    grid = torch.arange(n).view(num_stages, d)
    found = []
    for ranks in grid.t().tolist() + grid.tolist():
        group = dist.new_group(ranks)
        if rank in ranks:
            found.append(group)
    return found


def grid_where_members_meet(num_stages):
    rank, n = dist.get_rank(), dist.get_world_size()
    if n % num_stages:
        raise ValueError("uneven")
    d = n // num_stages
    lists = range(rank % d, n, d), range(rank // d * d, rank // d * d + d)
    return tuple(dist.new_group(list(ranks), use_local_synchronization=True) for ranks in lists)


def only_its_own(num_stages):
    rank, n = dist.get_rank(), dist.get_world_size()
    if n % num_stages:
        raise ValueError("uneven")
    d = n // num_stages
    pipe = dist.new_group(list(range(rank % d, n, d)))
    return pipe, dist.new_group(list(range(rank // d * d, rank // d * d + d)))


def raised_on_rank_0(num_stages):
    if dist.get_world_size() % num_stages and dist.get_rank() == 0:
        raise ValueError("uneven")
    return grid_in_one_loop(num_stages if 4 % num_stages == 0 else 2)


def lists_of_ranks(num_stages):
    d = 4 // num_stages
    return list(range(dist.get_rank() % d, 4, d)), [0]


RIGHT = {
    "12.1": [partition_by_trying_all, partition_by_recursion],
    "12.2": [Parts, InOtherWords],
    "12.3": [sum_tied_with_all_parts_at_once, sum_tied_everybody_to_everybody],
    "12.4": [gpipe_in_loops, gpipe_of_arrays],
    "12.5": [one_action_at_a_time, by_relaxation],
    "12.6": [Pair(own_idle_share, own_bubble), Pair(bubble.idle_share, bubble_of_tensors)],
    "12.7": [by_walking, in_three_loops],
    "12.8": [in_flight_of_sets, in_flight_added_up],
    "12.9": [interleaved_by_formulas, interleaved_as_arrays],
    "12.10": [torch_pipeline_written_out, torch_pipeline_by_name],
    "12.11": [grid_of_a_mesh, grid_in_one_loop, grid_where_members_meet],
}
WRONG = {
    "12.1": [(partition_by_capacity, "Each stage has at least one layer")],
    "12.2": [
        (SendsWithoutMail, "calls dist.send"),
        (KeepsOutputs, "nobody holds the stage's output"),
    ],
    "12.3": [(all_send_first, ""), (zeros_where_there_is_none, "it calls dist.all_reduce")],
    "12.4": [
        (gpipe_of_tuples, "a plain tuple - in_words and the engine read action.kind"),
        (gpipe_for_people, "a text has none"),
        (gpipe_as_generator, "A generator can be read only once"),
    ],
    "12.5": [
        (in_lock_step, "the rank is free, and all that this action needs is done"),
        (names_another_rank, "who waits"),
        (fifty_rounds, "not F0"),
    ],
    "12.6": [
        (Pair(only_gaps, own_bubble), "idle_share: "),
        (Pair(own_idle_share, half_a_bubble), "bubble: "),
    ],
    "12.7": [(backwards_turned_round, "is no action of rank 0")],
    "12.8": [(empties_the_list, "the caller's `actions` has changed")],
    "12.9": [(interleaved_without_default, "missing 1 required positional argument")],
    "12.10": [
        (torch_pipeline_on_cpu, "the devices of the stages"),
        (several_in_one, ""),
        (class_not_called, "torch's schedule object"),
    ],
    "12.11": [
        (only_its_own, "makes the group"),
        (raised_on_rank_0, "raises ValueError"),
        (lists_of_ranks, "a group that this rank is in"),
    ],
}
