"""The time machine against examples by hand, lesson 12's simulation, and closed formulas.

All times are the clock's own, so they are compared exactly, or up to rounding.
"""

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands.collectives.alpha_beta import predicted_s
from manyhands.instruments import figures as look
from manyhands.mesh import bench
from manyhands.pipeline import bubble, schedules
from manyhands.pipeline.engine import Pipeline
from manyhands.ranks.lab import run_ranks
from manyhands.simulator import figures
from manyhands.simulator.clock import replay, summary
from manyhands.simulator.events import (
    Collective,
    Compute,
    Message,
    Wait,
    groups_along,
    recorded_rank,
    scaled,
)
from manyhands.simulator.recorder import Recorder
from manyhands.simulator.traffic import ALGORITHMS, Machine
from manyhands.tensor.cost import Link

FREE = Link("free", math.inf, 0.0)
SLOW = Link("slow", 2.0, 1.0)  # bytes/s and s: a message of 8 bytes takes 5 s
FAST = Link("fast", 8.0, 0.0)
ON_SLOW = Machine(1.0, {"pp": SLOW, "dp": SLOW, "tp": FAST})


def spans_of(found, rank, role):
    return [(start, stop) for _, one, start, stop in found.spans[rank] if one == role]


# ---- by hand -------------------------------------------------------------------------------


def test_two_ranks_and_one_message():
    sender = [Compute(3.0), Message("send", "pp", 1, 8.0), Compute(1.0)]
    receiver = [Compute(1.0), Message("recv", "pp", 0, 8.0), Compute(2.0)]
    found = replay([sender, receiver], {"pp": 2}, ON_SLOW)
    # It leaves at 3 and arrives 1 + 8 / 2 later. Rank 1 waits for rank 0 from 1 to 3, and then for
    # the message; rank 0 waits until its message is taken.
    assert spans_of(found, 0, "communication") == [(3.0, 8.0)]
    assert spans_of(found, 0, "idle") == [(3.0, 8.0)] and spans_of(found, 1, "idle") == [(1.0, 8.0)]
    assert spans_of(found, 1, "compute") == [(0.0, 1.0), (8.0, 10.0)]
    assert found.stop_s == [9.0, 10.0] and found.exposed_s == [{"pp": 5.0}, {"pp": 5.0}]
    # rank 0 computes 4 s and rank 1 3 s; rank 1 is idle for 2 s, rank 0 for 1 s at the end
    assert summary(found) == (10.0, 3.5, {"pp": 5.0}, 1.5)


def test_a_blocking_send_waits_until_it_is_taken_and_an_asynchronous_one_does_not():
    taken = [Compute(20.0), Message("recv", "pp", 0, 8.0)]
    blocking = replay([[Message("send", "pp", 1, 8.0)], taken], {"pp": 2}, ON_SLOW)
    assert blocking.stop_s == [20.0, 20.0]
    assert blocking.exposed_s == [{"pp": 5.0}, {}]  # it is on its way while rank 1 computes
    sent = [Message("send", "pp", 1, 8.0, handle=0), Compute(7.0), Wait(0)]
    assert replay([sent[:2], taken], {"pp": 2}, ON_SLOW).stop_s == [7.0, 20.0]
    assert replay([sent, taken], {"pp": 2}, ON_SLOW).stop_s == [20.0, 20.0]


def test_a_collective_begins_with_the_last_rank_and_takes_the_ring():
    programs = [[Compute(rank), Collective("all_reduce", "dp", 8.0)] for rank in (1, 4, 2, 3)]
    found = replay(programs, {"dp": 4}, ON_SLOW)
    # 2 x 3 messages of 8 / 4 bytes, each 1 + 2 / 2 s
    assert found.stop_s == [4 + 12.0] * 4
    assert [spans_of(found, rank, "idle")[0][0] for rank in range(4)] == [1.0, 4.0, 2.0, 3.0]
    assert found.exposed_s == [{"dp": 12.0}] * 4
    assert summary(found).idle_s == pytest.approx((3 + 0 + 2 + 1) / 4)


@pytest.mark.parametrize(
    ("op", "seconds"),
    # 8 bytes on 4 ranks: 3 rounds of 2 bytes; 2 rounds of a tree with 8 bytes; a barrier's 2 x 2
    [("all_gather", 6.0), ("reduce_scatter", 6.0), ("broadcast", 10.0), ("reduce", 10.0)],
)
def test_other_collectives(op, seconds):
    assert replay([[Collective(op, "dp", 8.0)]] * 4, {"dp": 4}, ON_SLOW).stop_s == [seconds] * 4
    assert replay([[Collective("barrier", "dp", 0.0)]] * 4, {"dp": 4}, ON_SLOW).stop_s == [4.0] * 4
    assert replay([[Collective(op, "dp", 8.0)]], {"dp": 1}, ON_SLOW).stop_s == [0.0]


def test_messages_hide_behind_computing_one_after_the_other_on_a_card():
    on_dp = [Collective("all_reduce", "dp", 8.0, handle) for handle in (0, 1)]  # 2 x (1 + 4/2) s
    program = [*on_dp, Compute(7.0), Wait(0), Compute(1.0), Wait(1), Compute(1.0)]
    found = replay([program] * 2, {"dp": 2, "tp": 1}, ON_SLOW)
    # The first message is over at 6, behind the computing; the second goes from 6 to 12.
    assert spans_of(found, 0, "communication") == [(0.0, 6.0), (6.0, 12.0)]
    assert spans_of(found, 0, "compute") == [(0.0, 7.0), (7.0, 8.0), (12.0, 13.0)]
    assert found.exposed_s == [{"dp": 4.0}] * 2 and summary(found).idle_s == 0


def test_links_have_cards_of_their_own():
    program = [Collective("all_reduce", "dp", 8.0, 0), Collective("all_reduce", "tp", 4.0), Wait(0)]
    found = replay([program] * 4, {"dp": 2, "tp": 2}, ON_SLOW)
    assert sorted(spans_of(found, 0, "communication")) == [(0.0, 0.5), (0.0, 6.0)]
    same = ON_SLOW._replace(links={"dp": SLOW, "tp": SLOW})  # the axes share a card
    shared = replay([program] * 4, {"dp": 2, "tp": 2}, same)
    # what all start at the same time goes in the order of the program
    assert spans_of(shared, 0, "communication") == [(0.0, 6.0), (6.0, 10.0)]
    alone = replay([[*program[:2], Compute(1.0)]] * 2, {"dp": 2, "tp": 1}, same)
    assert alone.stop_s == [1.0] * 2  # a rank alone sends nothing, and needs no card


def test_messages_are_matched_in_order_by_channel_and_tag():
    sends = [
        Message("send", "pp", 1, nbytes, handle, channel, tag)
        for handle, (nbytes, channel, tag) in enumerate([(2.0, "", 0), (4.0, "b", 0), (6.0, "", 1)])
    ]
    last, in_b, first = (
        Message("recv", "pp", 0, 0.0, None, *key) for key in (("", 1), ("b", 0), ("", 0))
    )
    found = replay([sends, [in_b, last, Compute(1.0), first]], {"pp": 2}, ON_SLOW)
    # they leave one after the other: 2 s, 3 s and 4 s
    assert spans_of(found, 0, "communication") == [(0.0, 2.0), (2.0, 5.0), (5.0, 9.0)]
    assert spans_of(found, 1, "idle") == [(0.0, 5.0), (5.0, 9.0)]
    assert found.stop_s == [0.0, 10.0]


def test_a_straggler_holds_up_all():
    program = [Compute(2.0), Collective("all_reduce", "dp", 0.0)]
    machine = Machine(1.0, {"dp": FREE})
    assert replay([program] * 4, {"dp": 4}, machine).stop_s == [2.0] * 4
    late = replay([program] * 4, {"dp": 4}, machine, stragglers={2: 3.0})
    assert late.stop_s == [6.0] * 4 and late.computing_s == [2.0, 2.0, 6.0, 2.0]
    assert summary(late) == (6.0, 3.0, {}, 3.0)


def test_seconds_are_used_where_there_is_no_c():
    program = [Compute(100.0, seconds=2.0)]
    assert replay([program], {"dp": 1}, Machine(None, {}, slower=1.5)).stop_s == [3.0]
    assert replay([program], {"dp": 1}, Machine(50.0, {}, slower=1.5)).stop_s == [2.0]


# ---- what cannot go on ---------------------------------------------------------------------


def test_a_deadlock_says_who_waits_for_whom():
    both_receive = [[Compute(1.0), Message("recv", "pp", 1 - rank, 8.0)] for rank in range(2)]
    words = "deadlock: rank 0 waits in event 1, recv on pp, for rank 1; rank 1 waits in event 1, "
    with pytest.raises(ValueError, match=words + "recv on pp, for rank 0$"):
        replay(both_receive, {"pp": 2}, ON_SLOW)
    both_send = [[Message("send", "pp", 1 - rank, 8.0)] for rank in range(2)]
    with pytest.raises(ValueError, match="event 0, send on pp, for rank 1; rank 1 waits"):
        replay(both_send, {"pp": 2}, ON_SLOW)
    left_out = [[Collective("all_reduce", "dp", 8.0)] * (rank != 1) for rank in range(3)]
    with pytest.raises(ValueError, match="all_reduce on dp, for rank 1; rank 1 has ended$"):
        replay(left_out, {"dp": 3}, ON_SLOW)
    started = [[Collective("all_reduce", "dp", 8.0, 0), Wait(0)], []]
    with pytest.raises(ValueError, match="rank 0 waits in event 1, all_reduce on dp, for rank 1"):
        replay(started, {"dp": 2}, ON_SLOW)


def test_calls_that_do_not_match_are_named():
    programs = [[Collective("all_reduce", "dp", 8.0)], [Collective("all_gather", "dp", 8.0)]]
    with pytest.raises(ValueError, match="call 1 of dp is all_gather on rank 1, and all_reduce"):
        replay(programs, {"dp": 2}, ON_SLOW)
    with pytest.raises(ValueError, match="2 programs of a mesh {'dp': 4} cannot run"):
        replay(programs, {"dp": 4}, ON_SLOW)


# ---- larger meshes -------------------------------------------------------------------------


def test_places():
    sizes = {"pp": 2, "dp": 2, "tp": 2}
    assert groups_along("pp", sizes)[5] == (1, 5)
    assert groups_along("dp", sizes)[5] == (5, 7)
    assert groups_along("tp", sizes)[5] == (4, 5)
    assert groups_along("dp+tp", sizes)[5] == (4, 5, 6, 7)
    assert groups_along("pp+dp+tp", sizes)[5] == tuple(range(8))
    larger = sizes | {"dp": 128}
    assert [recorded_rank(rank, sizes, sizes) for rank in range(8)] == list(range(8))
    # pp 1, dp 37, tp 1 runs the program of pp 1, dp 1, tp 1
    assert recorded_rank((1 * 128 + 37) * 2 + 1, larger, sizes) == 7


def test_512_ranks_take_the_ring_of_128():
    link, fast = Link("network", 1e9, 1e-5), Link("node", 1e11, 1e-6)
    machine = Machine(1e12, {"pp": link, "dp": link, "tp": fast})
    sizes = {"pp": 2, "dp": 2, "tp": 2}
    work = [Compute(1e9), Collective("all_reduce", "tp", 1e6)]
    first = [*work * 50, Message("send", "pp", 1, 1e6), Collective("all_reduce", "dp", 1e7)]
    second = [Message("recv", "pp", 0, 1e6), *work * 50, Collective("all_reduce", "dp", 1e7)]
    found = replay([first] * 4 + [second] * 4, sizes, machine, sizes | {"dp": 128})
    stage_s = 50 * (1e-3 + predicted_s("all_reduce_ring", 2, 1e6, 1e-6, 1e-11))
    message_s = 1e-5 + 1e6 / 1e9
    ring_s = predicted_s("all_reduce_ring", 128, 1e7, 1e-5, 1e-9)
    assert len(found.spans) == 512
    assert found.stop_s == pytest.approx(
        [stage_s + message_s + ring_s] * 256 + [2 * stage_s + message_s + ring_s] * 256
    )
    slowest = replay([first] * 4 + [second] * 4, sizes, machine, sizes | {"dp": 128}, {300: 2.0})
    late = 50 * 1e-3  # rank 300 and all of its stage's replicas wait for it
    assert max(slowest.stop_s) == pytest.approx(max(found.stop_s) + late)


def test_a_group_along_two_axes_has_the_narrower_link():
    program = [Collective("all_gather", "dp+tp", 8.0)]
    assert replay([program] * 4, {"dp": 2, "tp": 2}, ON_SLOW).stop_s == [6.0] * 4
    named = ON_SLOW._replace(links=ON_SLOW.links | {"dp+tp": FAST})
    assert replay([program] * 4, {"dp": 2, "tp": 2}, named).stop_s == [0.75] * 4


def test_single_messages_cannot_run_on_a_larger_axis():
    programs = [[Message("send", "dp", 1, 8.0)], [Message("recv", "dp", 0, 8.0)]]
    with pytest.raises(ValueError, match="a send on axis dp, recorded on {'dp': 2}, cannot run on"):
        replay(programs, {"dp": 2}, ON_SLOW, {"dp": 4})


def test_a_larger_model():
    program = [Compute(2.0, 1.0), Collective("all_reduce", "dp", 8.0, 1), Wait(1)]
    wanted = [Compute(8.0, 4.0), Collective("all_reduce", "dp", 24.0, 1), Wait(1)]
    assert scaled(program, 4.0, {"dp": 3.0, "tp": 5.0}) == wanted


# ---- a real pipeline -----------------------------------------------------------------------


class Layer(nn.Module):
    """One product forward, two backward: also its input, by the shift, asks for a gradient."""

    def __init__(self):
        super().__init__()
        self.shift, self.linear = nn.Parameter(torch.zeros(8)), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.linear(x + self.shift)


def record_pipeline(kind, p, m):
    runner = Pipeline({dist.get_rank(): Layer()}, kind(p, m), lambda out, _: out.mean(), (4, 8))
    data = torch.ones(4 * m, 8)
    with Recorder({"pp": dist.group.WORLD}) as recorder:
        runner.step(data, data)
    return recorder.events


def busy(spans):
    """When a rank computes, neighbouring spans as one: no message parts them on the last rank."""
    found = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("kind", [schedules.gpipe, schedules.one_f_one_b])
def test_a_recorded_pipeline_has_the_bubble_of_lesson_12(kind, p, m):
    programs = run_ranks(record_pipeline, p, kind, p, m)
    forward = 2 * 4 * 8 * 8  # FLOPs: the unit of lesson 12, so a backward takes two
    found = replay(programs, {"pp": p}, Machine(forward, {"pp": FREE}))
    for rank, mine in enumerate(bubble.simulate(kind(p, m))):
        wanted = busy([(start, stop) for _, start, stop in mine])
        assert busy(spans_of(found, rank, "compute")) == wanted
    whole = summary(found)
    assert whole.step_s == 3 * (m + p - 1) and whole.exposed_s == {}
    assert whole.idle_s / whole.step_s == pytest.approx(float(bubble.bubble(p, m)[1]))


# ---- closed formulas, against which a planner can be held ----------------------------------

SHAPE = {"vocab_size": 16, "block": 16, "layers": 6, "heads": 4, "width": 64}
MESHES = [{"pp": 2, "replicate": 2, "tp": 2}, {"pp": 3, "replicate": 2, "tp": 1}]
MICRO_BATCHES = 8


def collective_s(event, sizes, machine):
    link, num_ranks = machine.links[event.axis], sizes[event.axis]
    about = num_ranks, event.nbytes, link.latency_s, 1 / link.bytes_per_s
    return predicted_s(ALGORITHMS[event.op], *about) if num_ranks > 1 else 0.0


def formula_s(programs, sizes, machine):
    """(m - 1) slots of the slowest stage, and one of each; messages of a cut on the way there and
    back; in the end the gradients. A slot is computing, its messages on tp, and reductions; gathers
    hide behind forward, a third of the computing."""
    slots_s, last_s, m = [], [], MICRO_BATCHES
    for program in programs[:: len(programs) // sizes["pp"]]:
        computing_s = sum(e.flops for e in program if isinstance(e, Compute)) / machine.flops_per_s
        seconds = Counter()
        for event in program:
            if isinstance(event, Collective):
                is_hidden = event.handle is not None
                seconds[event.axis, is_hidden] += collective_s(event, sizes, machine)
        shown_s = seconds["tp", False] + seconds["dp", False]
        gathers_s = max(0.0, seconds["dp", True] - computing_s / 3)
        slots_s.append((computing_s + shown_s + gathers_s) / m)
        last_s.append(seconds["replicate", False])
    message = next(event for event in programs[0] if isinstance(event, Message))
    link = machine.links["pp"]
    cut_s = 2 * (sizes["pp"] - 1) * (link.latency_s + message.nbytes / link.bytes_per_s)
    return (m - 1) * max(slots_s) + sum(slots_s) + cut_s + max(last_s)


@pytest.mark.parametrize("sizes", [*MESHES, {"pp": 2, "dp": 2, "tp": 2}], ids=str)
def test_a_mesh_takes_the_time_of_a_closed_formula(sizes):
    """Within 1 % for replicas; within 10 % where FSDP gathers and reduces in every micro-batch."""
    programs = bench.record_step(sizes, SHAPE, MICRO_BATCHES, MICRO_BATCHES)
    for flops_per_s in (1e9, 5e9, 2e10):  # messages take 1 % of a step, and up to half of it
        for latency_s in (0.0, 2e-6):
            links = {axis: Link("network", 1e9, latency_s) for axis in sizes}
            machine = Machine(flops_per_s, links | {"tp": Link("node", 8e9, latency_s)})
            found = summary(replay(programs, sizes, machine))
            error = formula_s(programs, sizes, machine) / found.step_s - 1
            assert abs(error) < (0.1 if "dp" in sizes else 0.01), (machine, found)


# ---- pictures ------------------------------------------------------------------------------


def test_a_picture_of_a_replay_shows_the_ranks_asked_for():
    program = [Compute(1.0), Collective("all_reduce", "dp", 8.0), Compute(1.0)]
    found = replay([program] * 4, {"dp": 4}, ON_SLOW)
    figure = figures.replays({"slow": found, "again": found}, [0, 3])
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["rank 0", "rank 3"] and "4 ranks, 14,000.0 ms" in figure.axes[0].get_title()
    assert look.png(figure)


def test_short_gaps_are_drawn_over():
    spans = [(0, "compute", 0.0, 1.0), (0, "idle", 1.0, 1.1), (0, "compute", 1.1, 2.0)]
    assert figures.merged(spans, 0.2) == [(0, "compute", 0.0, 2.0), (0, "idle", 1.0, 1.1)]
    assert figures.merged(spans, 0.01) == spans
