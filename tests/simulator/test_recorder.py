"""What the recorder writes down is what the ledger counts, in the order of the program."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from manyhands.data_parallel.replicas import BucketedDDP
from manyhands.fsdp.units import FSDP
from manyhands.instruments.ledger import Ledger
from manyhands.instruments.ledger import calls as ledger_calls
from manyhands.mesh import bench
from manyhands.mesh.grid import make_groups
from manyhands.models.transformer import Transformer, flops_per_token
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.simulator.clock import replay, summary
from manyhands.simulator.events import Collective, Compute, Message, Wait
from manyhands.simulator.recorder import FlopCounter, Recorder, calls
from manyhands.simulator.traffic import Machine
from manyhands.tensor.cost import Link
from manyhands.tensor.model import TensorParallel, calls_per_step

V, T, L, D, B = 16, 8, 2, 32, 4
SIZES = V, T, L, D
MACHINE = Machine(1e9, {"dp": Link("network", 1e9, 0.0), "tp": Link("network", 1e9, 0.0)})


def make():
    torch.manual_seed(0)
    return Transformer(V, T, L, heads=2, width=D), torch.randint(V, (B, T))


def flops_of(events):
    return sum(event.flops for event in events if isinstance(event, Compute))


def nbytes_of(events):
    return sum(event.nbytes for event in events if isinstance(event, Message | Collective))


# ---- FLOPs ---------------------------------------------------------------------------------


def test_flops_are_those_of_the_formula_attention_among_them():
    model, tokens = make()
    with FlopCounter() as counter:
        loss = model(tokens, tokens)
        forward = counter.total
        loss.backward()
    assert 3 * forward == counter.total == B * T * flops_per_token(*SIZES)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_on_a_cpu_is_counted(dropout):
    """With dropout torch takes products one by one, and counts them itself."""
    q = torch.randn(2, 3, 8, 4, requires_grad=True)
    with FlopCounter() as counter:
        F.scaled_dot_product_attention(q, q, q, dropout_p=dropout).sum().backward()
    forward = 2 * (2 * 2 * 3 * 8 * 8 * 4)  # two products of (8, 4) and (4, 8) for each of 2 x 3
    assert counter.total == 3 * forward


# ---- steps of the lessons ------------------------------------------------------------------


def step_of(kind):
    model, tokens = make()
    axis = "tp" if kind == "tp" else "dp"
    if kind == "ddp":
        model = BucketedDDP(model, bucket_mb=0.02)
    elif kind == "fsdp":
        model = FSDP(model, list(model.blocks))
    else:
        model = TensorParallel(model)
    with Ledger() as ledger, Recorder({axis: dist.group.WORLD}) as recorder:
        model(tokens, tokens).backward()
    total = sum(entry.nbytes for entry in ledger.entries)
    num_buckets = len(model.buckets) if kind == "ddp" else 0
    return recorder.events, ledger_calls(ledger.entries), total, num_buckets


@pytest.mark.parametrize("rules", ["", "nccl"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_messages_are_those_of_the_ledger(kind, rules):
    found = run_ranks(step_of, 2, kind, rules=rules)
    for events, counted, nbytes, num_buckets in found:
        assert calls(events) == counted and nbytes_of(events) == nbytes
        started = [e.handle for e in events if isinstance(e, Collective) and e.handle is not None]
        assert started == sorted({e.handle for e in events if isinstance(e, Wait)})
        if kind == "ddp":
            assert counted == {"all_reduce": num_buckets} and len(started) == num_buckets > 3
        if kind == "fsdp":
            # weights of three units forward, of two again for backward; gradients of all three
            assert counted == {"all_gather": 5, "reduce_scatter": 3} and len(started) == 5
        if kind == "tp":
            assert counted == {"all_reduce": calls_per_step(L)["all_reduce"]} and not started
        whole = B * T * flops_per_token(*SIZES)
        assert flops_of(events) == (whole / 2 if kind == "tp" else whole)
    programs = [events for events, *_ in found]
    replayed = summary(replay(programs, {"dp" if kind != "tp" else "tp": 2}, MACHINE))
    assert replayed.computing_s == pytest.approx(flops_of(programs[0]) / 1e9)
    assert sum(replayed.exposed_s.values()) > 0


def test_overlap_is_kept():
    """Between the first message of BucketedDDP and the first wait lies most of backward."""
    events, *_ = run_ranks(step_of, 2, "ddp")[0]
    first = next(place for place, e in enumerate(events) if isinstance(e, Collective))
    waits = [place for place, e in enumerate(events) if isinstance(e, Wait)]
    behind = flops_of(events[first : waits[0]])
    assert behind > 0.5 * flops_of(events)
    assert all(not isinstance(e, Collective) for e in events[waits[0] :])
    # On a network on which the messages take as long as that, the step is shorter than their sum.
    nbytes = nbytes_of(events)
    machine = Machine(1e9, {"dp": Link("", nbytes / (behind / 1e9), 0.0)})
    step_s = summary(replay([events] * 2, {"dp": 2}, machine)).step_s
    assert step_s < 0.8 * (flops_of(events) + behind) / 1e9


def test_a_step_on_a_mesh_of_three_axes_runs_on_512_ranks():
    shape = {"vocab_size": V, "block": T, "layers": L, "heads": 2, "width": D}
    sizes = {"pp": 2, "dp": 2, "tp": 2}
    programs = bench.record_step(sizes, shape, batch=4, micro_batches=4)
    axes = {event.axis for events in programs for event in events if hasattr(event, "axis")}
    assert axes == {"pp", "dp", "tp"}
    total = sum(map(flops_of, programs))  # two replicas, each of the whole model
    assert total == 2 * 4 * T * flops_per_token(*SIZES)
    machine = MACHINE._replace(links=MACHINE.links | {"pp": Link("network", 1e9, 0.0)})
    small, large = (
        summary(replay(programs, sizes, machine, sizes | {"dp": dp})) for dp in (2, 128)
    )
    assert large.computing_s == pytest.approx(small.computing_s)
    assert 1 < large.step_s / small.step_s < 2  # (n-1)/n of the bytes in place of a half


# ---- single calls --------------------------------------------------------------------------


def every_call():
    rank, tensor = dist.get_rank(), torch.ones(4)
    originals = {name: getattr(dist, name) for name in ("all_reduce", "isend", "recv", "barrier")}
    with Recorder({"dp": dist.group.WORLD}) as recorder:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.all_gather([torch.empty(4), torch.empty(4)], tensor)
        dist.all_gather_into_tensor(torch.empty(8), tensor)
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))
        dist.barrier()
        if rank == 0:
            dist.send(tensor, 1, tag=3)
        else:
            dist.recv(tensor, 0, tag=3)
        works = [dist.isend(tensor, 1 - rank), dist.irecv(torch.empty(4), 1 - rank)]
        for work in works[::-1]:
            work.wait()
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        work.wait()  # no second event
        ops = [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, tensor, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    assert all(getattr(dist, name) is real for name, real in originals.items())
    return [event for event in recorder.events if not isinstance(event, Compute)]


def test_every_call_has_its_event():
    for rank, events in enumerate(run_ranks(every_call, 2)):
        channel, other = events[0].channel, 1 - rank
        one = ("send", "recv")[rank]
        assert events == [
            Collective("all_reduce", "dp", 16, None, channel),
            Collective("broadcast", "dp", 16, None, channel),
            Collective("all_gather", "dp", 32, None, channel),
            Collective("all_gather", "dp", 32, None, channel),
            Collective("reduce_scatter", "dp", 32, None, channel),
            Collective("barrier", "dp", 0, None, channel),
            Message(one, "dp", other, 16, None, channel, 3),
            Message("send", "dp", other, 16, 1, channel, 0),
            Message("recv", "dp", other, 16, 2, channel, 0),
            Wait(2),
            Wait(1),
            Collective("all_reduce", "dp", 16, 3, channel),
            Wait(3),
            Message("send", "dp", other, 16, 4, channel, 0),
            Message("recv", "dp", other, 16, 5, channel, 0),
            Wait(4),
            Wait(5),
        ]


def on_axes(name):
    groups = make_groups({"pp": 2, "dp": 1, "tp": 2})
    same = dist.new_group(
        dist.get_process_group_ranks(groups["tp"]), use_local_synchronization=True
    )
    other = dist.new_group([0, 3])
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    group = {"all": None, "same": same, "alone": alone, "other": other, **groups}[name]
    with Recorder(groups) as recorder:
        dist.all_reduce(torch.ones(1), group=group)
    return [event.axis for event in recorder.events if not isinstance(event, Compute)]


def test_groups_are_named_by_their_axes():
    wanted = {"all": ["pp+dp+tp"], "pp": ["pp"], "same": ["tp"], "dp": ["dp"], "alone": []}
    for name, axes in wanted.items():
        assert run_ranks(on_axes, 4, name) == [axes] * 4
    with pytest.raises(RankFailed, match=r"a group of ranks \[0, 3\] is on 0 of the axes"):
        run_ranks(on_axes, 4, "other", quiet=True)


def peer_on_axis():
    """In a group along the outer axis, rank 1's neighbour is rank 3 of the job."""
    groups = make_groups({"pp": 2, "tp": 2})
    rank, tensor = dist.get_rank(), torch.ones(1)
    with Recorder(groups) as recorder:
        if rank < 2:
            dist.send(tensor, rank + 2, group=groups["pp"])
        else:
            dist.recv(tensor, group=groups["pp"], group_src=0)
    return [event.peer for event in recorder.events if isinstance(event, Message)]


def test_a_peer_is_a_place_on_the_axis():
    assert run_ranks(peer_on_axis, 4) == [[1], [1], [0], [0]]


def from_anybody():
    with Recorder({"dp": dist.group.WORLD}):
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1))


def test_a_message_from_anybody_is_refused():
    with pytest.raises(RankFailed, match="recv from anybody cannot be replayed"):
        run_ranks(from_anybody, 2, quiet=True)


def after_an_error():
    real = dist.all_reduce
    with pytest.raises(KeyError), Recorder({"dp": dist.group.WORLD}):
        raise KeyError
    return dist.all_reduce is real and torch.utils._python_dispatch._get_current_dispatch_mode()


def test_all_is_put_back_after_an_error():
    assert run_ranks(after_an_error, 1) == [None]


def seconds_of_work():
    product = torch.randn(256, 256)
    with Recorder({"dp": dist.group.WORLD}, count_flops=False) as recorder:
        for _ in range(20):
            product @ product
        dist.barrier()
    return recorder.events


def test_seconds_are_there_without_flops():
    for events in run_ranks(seconds_of_work, 2):
        work, barrier, rest = events
        assert work.flops == 0 < work.seconds and barrier.op == "barrier"
        assert Counter(map(type, events)) == {Compute: 2, Collective: 1}
        assert rest.seconds < work.seconds
