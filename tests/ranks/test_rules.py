"""NCCL's rules on gloo: programs that break one are named with their lines, right ones are not."""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from manyhands.collectives.ring import all_reduce_ring
from manyhands.pipeline import schedules, wiring
from manyhands.pipeline.engine import Pipeline
from manyhands.ranks import deadlocks
from manyhands.ranks.deadlocks import Step
from manyhands.ranks.failures import RankFailed, RuleBroken
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.network import SlowNetwork
from manyhands.ranks.runtime import distributed

LINE = r"\(line \d+ of test_rules.py in \w+: [^()]*.*?\)"


def other():
    return 1 - dist.get_rank()


# ---- programs that break one rule each ---------------------------------------------------------


def both_send_first():
    incoming = torch.empty(4)
    work = dist.isend(torch.ones(4), other())
    dist.recv(incoming, other())
    work.wait()


def tags_cross():
    pair = torch.ones(2, 4)
    if dist.get_rank() == 0:
        works = [dist.isend(pair[i], 1, tag=i) for i in (0, 1)]
    else:
        works = [dist.irecv(pair[i], 0, tag=i) for i in (1, 0)]
    for work in works:
        work.wait()


def sizes_differ():
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.empty(8), 0)


def types_differ():
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.empty(4, dtype=torch.int32), 0)


def collective_sizes_differ():
    dist.all_reduce(torch.ones(4 + dist.get_rank()))  # gloo would end the process


def strided():
    dist.broadcast(torch.ones(3, 4).t(), 0)


def written_in_flight():
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    tensor *= 2
    work.wait()


def input_written_in_flight():
    tensor = torch.ones(4)
    if dist.get_rank() == 0:
        work = dist.isend(tensor, 1)
        tensor.zero_()
        work.wait()
    else:
        dist.recv(tensor, 0)


def freed_in_flight():
    whole, part = torch.empty(8), torch.ones(4)
    work = dist.all_gather([whole[:4], whole[4:]], part, async_op=True)
    dist.barrier()
    time.sleep(0.2)  # gloo itself must be done with it
    whole.untyped_storage().resize_(0)
    work.wait()


def never_waited_for():
    dist.all_reduce(torch.ones(4), async_op=True)
    dist.barrier()


def other_groups():
    dist.new_group([0, 1] if dist.get_rank() == 0 else [1])


def other_collectives():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), 0)


def other_roots():
    dist.broadcast(torch.ones(4), src=dist.get_rank())


def from_anybody():
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.ones(4))


def one_end_in_a_batch():
    dist.barrier()
    tensor = torch.ones(4)
    if dist.get_rank() == 0:
        dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)])[0].wait()
    else:
        dist.recv(tensor, 0)


def not_all_ranks_come():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4))


def by_bits():
    dist.all_reduce(torch.ones(4, dtype=torch.int32), dist.ReduceOp.BOR)


def in_a_circle():
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty(4)
    work = dist.isend(torch.ones(4), (rank + 1) % num_ranks)
    dist.recv(incoming, (rank - 1) % num_ranks)
    work.wait()


BROKEN = {
    both_send_first: (2, rf"order: .* rank [01] calls isend to rank [01] {LINE}, .* both send"),
    tags_cross: (2, r"tags: .* with tags [01] and [01]: NCCL knows no tags"),
    sizes_differ: (2, r"size: .* with [48] numbers of type float32 and [48] numbers"),
    types_differ: (2, r"type: .* meets (int32|float32): convert one"),
    collective_sizes_differ: (2, rf"size: rank [01] calls all_reduce SUM {LINE}, and rank [01]"),
    strided: (2, rf"memory: .* to broadcast {LINE} has shape \(4, 3\) and strides \(1, 4\)"),
    written_in_flight: (2, rf"in flight: .* {LINE} and its wait {LINE} the tensor that it fills"),
    input_written_in_flight: (2, r"in flight: .* isend to rank 1 on rank 0 .* that it sends was"),
    freed_in_flight: (2, r"in flight: between all_gather on rank [01] .* memory .* was freed"),
    never_waited_for: (2, rf"never waited for: rank [01] starts all_reduce {LINE}"),
    other_groups: (2, r"new_group: as new group number 1, .*of ranks \[.*of ranks \["),
    other_collectives: (2, r"collective: as number 1 of their group, rank [01] calls "),
    other_roots: (2, r"collective: .* broadcast root 0 .* broadcast root 1"),
    from_anybody: (2, r"source: rank 1 calls recv without a source"),
    one_end_in_a_batch: (2, r"deadlock: rank 0 waits in .*; rank 1 waits in recv from rank 0"),
    not_all_ranks_come: (2, r"deadlock: rank 0 waits in all_reduce, .*; rank 1 has ended"),
    by_bits: (2, "type: rank [01] calls all_reduce with .*BOR .* no reduction by bits"),
    in_a_circle: (3, "deadlock: rank 0 waits in .*; rank 1 waits in .*; rank 2 waits in "),
}


@pytest.mark.parametrize("program", BROKEN, ids=lambda program: program.__name__)
def test_a_broken_rule_is_one_line(program):
    num_ranks, words = BROKEN[program]
    with pytest.raises(RuleBroken) as broken:
        run_ranks(program, num_ranks, rules="nccl", timeout_s=20)
    told = str(broken.value)
    assert re.match(words, told), told
    assert "\n" not in told and "test_rules.py" in told


# ---- right programs that look odd --------------------------------------------------------------


def batched_both_ways():
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty(2)
    ends = [dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % num_ranks)]
    ends += [dist.P2POp(dist.irecv, incoming, (rank - 1) % num_ranks)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return incoming[0].item()


def subgroups_overlapped():
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    whole, part = torch.ones(4), torch.ones(4)
    works = [dist.all_reduce(whole, async_op=True)]
    for group in pairs:
        if rank in dist.get_process_group_ranks(group):
            works.append(dist.all_reduce(part, group=group, async_op=True))
    for work in reversed(works):
        assert isinstance(work, dist.Work)
        work.wait()
    return whole[0].item() + part[0].item()


def one_waits_long_before_it_receives():
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    elif dist.get_rank() == 1:
        time.sleep(1.2)
        dist.recv(torch.empty(1), 0)
    return 0.0


def views_of_one_vector_in_flight():
    """A disjoint part is written while another one travels."""
    vector = torch.ones(8)
    work = dist.all_reduce(vector[:4], async_op=True)
    vector[4:] = 2
    work.wait()
    return vector.sum().item()


def objects_and_meshes():
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mesh.get_group())
    dist.broadcast_object_list(ranks, 0)
    return float(sum(ranks))


def outsiders_call_too():
    """A rank outside the group has nothing to do there."""
    group = dist.new_group([0])
    group = None if group == dist.GroupMember.NON_GROUP_MEMBER else group
    if group is not None:
        dist.all_reduce(torch.ones(1), group=group)
    return 0.0


def by_ring():
    tensor = torch.ones(10)
    all_reduce_ring(tensor)
    return tensor[0].item()


RIGHT = {
    batched_both_ways: [2.0, 0.0, 1.0],
    subgroups_overlapped: [5.0, 5.0, 4.0],
    one_waits_long_before_it_receives: [0.0, 0.0, 0.0],
    views_of_one_vector_in_flight: [20.0, 20.0, 20.0],
    objects_and_meshes: [3.0, 3.0, 3.0],
    outsiders_call_too: [0.0, 0.0, 0.0],
    by_ring: [3.0, 3.0, 3.0],
}


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_right_programs_run_as_ever(program):
    assert run_ranks(program, 3, rules="nccl") == RIGHT[program]


@pytest.mark.parametrize("program", [batched_both_ways, views_of_one_vector_in_flight, by_ring])
def test_right_programs_run_as_ever_on_a_slow_network(program):
    def slowly():
        with SlowNetwork(1e-3, 1e9):
            return program()

    assert run_ranks(slowly, 3, rules="nccl") == RIGHT[program]


@pytest.mark.parametrize(
    "program",
    [both_send_first, tags_cross, sizes_differ, input_written_in_flight, one_end_in_a_batch],
    ids=lambda program: program.__name__,
)
def test_a_slow_network_hides_no_broken_rule(program):
    """The line that is named is the program's, not that of the network's card."""

    def slowly():
        with SlowNetwork(1e-3, 1e9):
            program()

    with pytest.raises(RuleBroken) as broken:
        run_ranks(slowly, 2, rules="nccl", timeout_s=20)
    told = str(broken.value)
    assert re.match(BROKEN[program][1], told), told
    assert "(line " in told and "of test_rules.py in " in told and "network.py" not in told


def test_one_rank_alone():
    def alone():
        tensor = torch.ones(2)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.broadcast(tensor, 0)
        dist.barrier()
        return dist.new_group([0]) is not None, tensor.sum().item()

    assert run_ranks(alone, 1, rules="nccl") == [(True, 2.0)]


def test_programs_hear_of_them_by_a_variable(monkeypatch):
    def program():
        with distributed("cpu"):
            other_roots()

    run_ranks(other_groups_alike, 2)
    monkeypatch.setenv("MANYHANDS_RULES", "nccl")
    with pytest.raises(RuleBroken, match="collective: "):
        run_ranks(program, 2, join=False, quiet=True)
    with pytest.raises(RuleBroken, match="collective: "):
        run_ranks(other_roots, 2)
    assert run_ranks(lambda: os.environ["MANYHANDS_RULES"], 1, rules="") == [""]


def other_groups_alike():
    dist.new_group([0])


def test_unknown_rules_are_refused():
    with pytest.raises(RankFailed, match="choose nccl or nccl-serial"):
        run_ranks(by_ring, 1, rules="mpi")


# ---- schedules of a pipeline -------------------------------------------------------------------


def one_step(p, m, mail=None):
    """A step of 1F1B on p ranks; `mail` takes the place of the opening of the channels."""
    if mail is not None:
        wiring.Mail.open_channels = mail
    rank = dist.get_rank()
    stage = {rank: nn.Linear(2, 2)}
    engine = Pipeline(stage, schedules.one_f_one_b(p, m), F.mse_loss, (1, 2))
    batch = torch.ones(m, 2)
    engine.step(batch if rank == 0 else None, batch if rank == p - 1 else None)
    return rank


def no_hello(self, group, back):
    """The channels are there, but their first messages come in the midst of the schedule."""
    for rank in range(self.p):
        self.channel["F", rank], self.channel["B", rank] = group, back


def one_group(self, group, back):
    """Activations and gradients go through one queue."""
    no_hello(self, group, group)


def test_1f1b_needs_its_channels_opened_before():
    assert run_ranks(one_step, 3, 3, 6, rules="nccl") == [0, 1, 2]
    with pytest.raises(RuleBroken, match="deadlock: .*first operation of a new communicator"):
        run_ranks(one_step, 3, 3, 6, no_hello, rules="nccl")


def test_1f1b_needs_a_queue_for_each_direction():
    with pytest.raises(RuleBroken, match=r"order: .*line \d+ of wiring.py in send"):
        run_ranks(one_step, 2, 2, 4, one_group, rules="nccl")


# ---- orders ------------------------------------------------------------------------------------


def two_groups_turned():
    """Each rank starts two all-reduces, one in each group, in an order of its own."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        dist.barrier(group)
    order = groups if dist.get_rank() == 0 else groups[::-1]
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in order]
    for work in works:
        work.wait()
    return True


def test_a_device_that_runs_one_at_a_time_may_hang():
    assert run_ranks(two_groups_turned, 2, rules="nccl") == [True, True]
    with pytest.raises(RuleBroken, match="deadlock in one order: rank 0 waits .* device runs"):
        run_ranks(two_groups_turned, 2, rules="nccl-serial")
    assert run_ranks(batched_both_ways, 3, rules="nccl-serial") == [2.0, 0.0, 1.0]


def program(*calls):
    """Steps from words: `send a` launches in queue a, `wait 0` waits for the first launch."""
    steps = []
    for number, call in enumerate(calls):
        verb, _, rest = call.partition(" ")
        frame = ("program.py", number + 1, "f")
        if verb == "wait":
            steps.append(Step("wait", call, frame, launched=int(rest)))
        else:
            part = (f"{rest} {sum(step.queue == rest for step in steps)}", (0, 1))
            steps.append(Step("launch", call, frame, rest, (part,)))
    return steps


def test_what_no_later_call_can_mend_is_a_deadlock():
    waits = program("a q", "wait 0")
    assert deadlocks.deadlock({0: waits, 1: []}, ended={0}) is None  # rank 1 may still come
    machine = deadlocks.deadlock({0: waits, 1: []}, ended={0, 1})
    told, frames = deadlocks.story(machine)
    assert told == "rank 0 waits in wait 0 ({}); rank 1 has ended"
    assert frames == [("program.py", 2, "f")]
    assert deadlocks.deadlock({0: waits, 1: waits}, ended={0, 1}) is None


def test_orders_are_tried_within_limits():
    one, two = program("a x", "b y", "wait 0", "wait 1"), program("b y", "a x", "wait 0", "wait 1")
    programs = {0: one, 1: two}
    assert deadlocks.deadlock(programs, {0, 1}) is None
    found = deadlocks.explore(programs)
    assert found.stuck() == [0, 1] and sum(map(len, found.running.values())) == 2
    safe = program("a x", "wait 0", "b y", "wait 1")
    assert deadlocks.explore({0: safe, 1: safe}) is None
    assert deadlocks.explore({rank: two for rank in range(4)}) is None  # too many ranks
    many = [f"{i} {i}" for i in range(8)]
    steps = program(*many, *(f"wait {i}" for i in range(8)))
    began_s = time.monotonic()
    deadlocks.explore({0: steps, 1: steps})
    assert time.monotonic() - began_s < 10 * deadlocks.LIMIT_S


def test_the_stub_of_no_program_is_never_stuck():
    assert deadlocks.deadlock({0: [], 1: []}, {0, 1}) is None


if __name__ == "__main__":  # prints what people read
    for culprit, (num_ranks, _) in BROKEN.items():
        try:
            run_ranks(culprit, num_ranks, rules="nccl", quiet=True)
        except RuleBroken as broken:
            print(culprit.__name__, "\n ", broken)
