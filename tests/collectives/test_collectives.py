"""Collectives by hand: torch's results, just the messages of their formulas, and their benchmark.

Many cases share one start of the ranks; a rank returns in words what is wrong.
"""

import inspect
import json
import math
import os
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist

import bench_collectives
from commands import make_clone, run
from manyhands.collectives import ring, trees
from manyhands.collectives.alpha_beta import rounds_and_message
from manyhands.collectives.bench import PROGRAMS, Network, race
from manyhands.collectives.figures import against_ranks
from manyhands.instruments.figures import style
from manyhands.instruments.ledger import Ledger, calls, rounds, traffic
from manyhands.jobs import mine
from manyhands.ranks.failures import BadInput, RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.runtime import World

SIZES = range(1, 9)
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
ALL_REDUCE = [trees.all_reduce_naive, trees.all_reduce_tree, ring.all_reduce_ring]
BROADCAST = [trees.broadcast_naive, trees.broadcast_tree]
CHUNKS = {"gather", "all_gather_ring", "reduce_scatter_ring"}  # take chunks, not one tensor
NAMES = [
    *(function.__name__ for function in [*ALL_REDUCE, *BROADCAST, trees.reduce_tree]),
    *sorted(CHUNKS),
]


# ---- the same results --------------------------------------------------------------------------


def draw(shape, dtype):
    """Small whole numbers: sums of eight of them are exact in every type."""
    return torch.randint(0, 8, shape).to(dtype)


def tensors(dtype):
    """Every kind of tensor: name -> one of that kind, and the tensor whose memory it lies in."""
    whole = {name: draw(shape, dtype) for name, shape in WHOLE.items()}
    pairs = {name: (tensor, tensor) for name, tensor in whole.items()}
    base = draw((5, 4), dtype)
    return pairs | {"transposed": (base.t(), base), "strided": (base[1::2, ::3], base)}


WHOLE = {"vector": (37,), "matrix": (2, 8), "one number": (1,), "scalar": (), "empty": (0, 3)}


def same(got, wanted, op="sum"):
    """Equal bit by bit; a mean may be rounded."""
    if op == "avg":
        return torch.allclose(got, wanted, rtol=0.01 if got.dtype == torch.bfloat16 else 1e-6)
    return torch.equal(got, wanted)


def change(function, pair, *args):
    """Call a collective on a copy of a tensor; returns the copy, and whether its rest is as before.

    The copy lies in memory as the tensor does.
    """
    tensor, base = pair
    memory = base.clone()
    copy = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    function(copy, *args)
    rest = torch.ones_like(base, dtype=torch.bool)
    rest.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return copy, torch.equal(memory[rest], base[rest])


def ops_of(dtype):
    return [op for op in OPS if dtype.is_floating_point or op != "avg"]


def cases(types):
    """Every type with every kind of tensor and every op, but not all three combined."""
    for first, dtype in enumerate(types):
        ops = ops_of(dtype)
        for number, (kind, pair) in enumerate(tensors(dtype).items(), first):
            yield dtype, kind, pair, ops[number % len(ops)]


def all_reduce_faults(group, types):
    for dtype, kind, pair, op in cases(types):
        wanted = pair[0].contiguous().clone()
        dist.all_reduce(wanted, OPS[op], group)
        for function in ALL_REDUCE:
            got, untouched = change(function, pair, op, group)
            if not (same(got, wanted, op) and untouched):
                yield f"{function.__name__} {op} {dtype} {kind}: {got}, not {wanted}"


def rooted_faults(group, types):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for root in range(n):
        for dtype, kind, pair, op in list(cases([types[root % len(types)]]))[:: 3 if root else 1]:
            wanted = pair[0].contiguous().clone()
            dist.broadcast(wanted, group=group, group_src=root)
            for function in BROADCAST:
                got, untouched = change(function, pair, root, group)
                if not (same(got, wanted) and untouched):
                    yield f"{function.__name__} {root} {dtype} {kind}: {got}, not {wanted}"
            wanted = pair[0].contiguous().clone()
            dist.reduce(wanted, op=OPS[op], group=group, group_dst=root)
            got, untouched = change(trees.reduce_tree, pair, op, root, group)
            if rank == root and not (same(got, wanted, op) and untouched):
                yield f"reduce_tree {op} {root} {dtype} {kind}: {got}, not {wanted}"


def chunk_faults(group, types):
    """Chunks of one size, of many sizes, also none, and all empty."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    uneven = [[0, 3, 1, 0, 7, 2, 5, 4][(owner + n) % 8] for owner in range(n)]
    for number, dtype in enumerate(types):
        for sizes in ([3] * n, uneven, [0] * n):
            own = [draw((size,), dtype) for size in sizes]
            everyone = [None] * n  # the chunks of all ranks
            dist.all_gather_object(everyone, own, group)
            wanted = [everyone[owner][owner] for owner in range(n)]
            got = [chunk.clone() for chunk in own]
            ring.all_gather_ring(got, group)
            if not all(map(same, got, wanted)):
                yield f"all_gather_ring {dtype} {sizes}: {got}, not {wanted}"
            for root in {number % n, (number + 3) % n, n - 1}:
                got = [chunk.clone() for chunk in own]
                trees.gather(got, root, group)
                if not all(map(same, got, wanted if rank == root else own)):
                    yield f"gather {root} {dtype} {sizes}: {got}, not {wanted}"
            for op in ops_of(dtype):
                summed = torch.cat(own)
                dist.all_reduce(summed, OPS[op], group)
                got = [chunk.clone() for chunk in own]
                ring.reduce_scatter_ring(got, op, group)
                if not same(got[rank], summed.split(sizes)[rank], op):
                    yield f"reduce_scatter_ring {op} {dtype} {sizes}: {got[rank]}"


def piece_faults():
    """In pieces of 8 bytes: two numbers, or one where a single one is larger."""
    rank, n = dist.get_rank(), dist.get_world_size()
    around = (rank + 1) % n, (rank - 1) % n
    for dtype, num_pieces in [(torch.float32, 3), (torch.float64, 5), (torch.complex128, 5)]:
        out, total = (torch.arange(5) + rank).to(dtype), torch.ones(5, dtype=dtype)
        with Ledger() as ledger:
            ring.exchange_in_pieces(out, around[0], total, around[1], "sum", None, 8)
        if not torch.equal(total, (torch.arange(5) + around[1] + 1).to(dtype)):
            yield f"in pieces of {dtype}: {total}"
        if calls(ledger.entries) != {"send": num_pieces, "recv": num_pieces}:
            yield f"in pieces of {dtype}: {calls(ledger.entries)}"


def subgroup():
    """A group without rank 0, in another order than the ranks' own where torch can do that."""
    others = list(range(1, dist.get_world_size()))
    others = others[1::2] + others[::2][::-1]
    can = "sort_ranks" in inspect.signature(dist.new_group).parameters
    return dist.new_group(others, **({"sort_ranks": False} if can else {}))


def everything():
    """On a rank: what is wrong, and the ledgers of the nine collectives."""
    torch.manual_seed(dist.get_rank())
    faults = [
        *all_reduce_faults(None, TYPES),
        *rooted_faults(None, TYPES),
        *chunk_faults(None, TYPES[::2]),
    ]
    if dist.get_world_size() > 1:
        faults += piece_faults()
    if 1 < dist.get_world_size() < 7:
        group = subgroup()
        if dist.get_rank() > 0:
            for find in (all_reduce_faults, rooted_faults, chunk_faults):
                faults += find(group, TYPES[2:4])
    return faults, {(name, size): sent(name, size) for name in NAMES for size in lengths()}


# ---- just the messages of the formulas ---------------------------------------------------------


def lengths():
    """Numbers in the tensor: equal chunks, uneven ones, fewer than ranks, none."""
    return [4 * dist.get_world_size(), 4 * dist.get_world_size() + 3, 1, 0]


def sent(name, num_numbers):
    """The ledger of one call."""
    function = getattr(trees, name, None) or getattr(ring, name)
    tensor = torch.ones(num_numbers)
    with Ledger() as ledger:
        if name in CHUNKS:
            function(list(tensor.tensor_split(dist.get_world_size())))
        else:
            function(tensor)
    return ledger.entries


def messages(name, n):
    """What the root sends and receives, then what any other rank does; None where ranks differ."""
    depth = math.ceil(math.log2(n))
    return {
        "broadcast_naive": (n - 1, 0, 0, 1),
        "broadcast_tree": (depth, 0, None, 1),
        "reduce_tree": (0, depth, 1, None),
        "gather": (0, n - 1, 1, 0),
        "all_gather_ring": (n - 1,) * 4,
        "reduce_scatter_ring": (n - 1,) * 4,
        "all_reduce_naive": (n - 1, n - 1, 1, 1),
        "all_reduce_tree": (depth, depth, None, None),
        "all_reduce_ring": (2 * (n - 1),) * 4,
    }[name]


def total_bytes(name, n, chunks_bytes):
    """What all ranks together send."""
    if name == "gather":
        return sum(chunks_bytes[1:])
    return (n - 1) * sum(chunks_bytes) * (2 if name.startswith("all_reduce") else 1)


def check_messages(n, ledgers):
    """Each rank's number of messages, all bytes, and the rounds are those of the formulas."""
    for name, length in ledgers[0]:
        entries = [own[name, length] for own in ledgers]
        by_rank = [calls(own) for own in entries]
        assert set().union(*by_rank) <= {"send", "recv"}
        root_out, root_in, out, into = messages(name, n)
        for rank, counted in enumerate(by_rank):
            wanted = (out, into) if rank else (root_out, root_in)
            for op, number in zip(("send", "recv"), wanted, strict=True):
                assert number in (None, counted[op]), (name, rank, op, counted)
        together = [entry for own in entries for entry in own]
        assert calls(together)["recv"] == calls(together)["send"]
        sums = traffic(together)
        chunks_bytes = [4 * len(chunk) for chunk in torch.ones(length).tensor_split(n)]
        assert sums.total() == total_bytes(name, n, chunks_bytes), (name, length)
        if name.endswith("ring"):
            assert set(sums) == ({(rank, (rank + 1) % n) for rank in range(n)} if n > 1 else set())
        num_rounds, message_bytes = rounds_and_message(name, n, 4 * length)
        assert len(rounds(entries)) == num_rounds, (name, length)
        if length % n == 0:
            assert {entry.nbytes for entry in together} <= {message_bytes}, name


RING_TIMES = {"reduce_scatter_ring": 1, "all_gather_ring": 1, "all_reduce_ring": 2}


def check_shares(n, ledgers):
    """A rank of a ring sends and receives its share of the bytes."""
    for rank, own in enumerate(ledgers):
        for name, times in RING_TIMES.items():
            for op in ("send", "recv"):
                nbytes = sum(entry.nbytes for entry in own[name, 4 * n] if entry.op == op)
                assert nbytes == times * (n - 1) * 16 * n // n, (rank, name, op)


@pytest.mark.parametrize("world_size", SIZES)
def test_equal_to_torch_with_the_messages_of_the_formulas(world_size):
    faults, ledgers = zip(*run_ranks(everything, world_size), strict=True)
    assert faults == ([],) * world_size
    check_messages(world_size, ledgers)
    check_shares(world_size, ledgers)


# ---- what is refused ---------------------------------------------------------------------------


def refused(work, *args):
    """The kind of error that a call ends with, or None."""
    try:
        work(*args)
    except (ValueError, RuntimeError) as error:
        return type(error)
    return None


def mean_of_whole_numbers():
    """By torch, and then by hand."""
    whole = torch.ones(4, dtype=torch.int64)
    works = [
        lambda: dist.all_reduce(whole, dist.ReduceOp.AVG),
        *(partial(function, whole, "avg") for function in ALL_REDUCE),
        lambda: trees.reduce_tree(whole, "avg"),
        lambda: ring.reduce_scatter_ring(whole.chunk(2), "avg"),
    ]
    return list(map(refused, works))


def test_a_mean_of_whole_numbers_is_refused_as_torch_refuses_it():
    assert run_ranks(mean_of_whole_numbers, 2) == [[RuntimeError] * 6] * 2


@pytest.mark.parametrize("function", [*ALL_REDUCE, trees.reduce_tree])
def test_an_op_that_is_none_is_named(function):
    with pytest.raises(RankFailed, match='op is \'mean\'; there are "sum", "avg", "min"'):
        run_ranks(function, 2, torch.ones(3), "mean")


def test_neighbours_chunks_may_differ_in_their_number_of_pieces():
    def ring_of_ones(num_elements):  # chunks of 4 MB, and one that is a number longer
        tensor = torch.ones(num_elements)
        ring.all_reduce_ring(tensor)
        return tensor.eq(3).all().item()

    assert run_ranks(ring_of_ones, 3, 3 * 2**20 + 1) == [True] * 3


def test_chunks_may_be_scattered_in_memory():
    def of_columns(function):
        columns = (torch.arange(6.0).view(3, 2) + 10 * dist.get_rank()).unbind(1)
        function(columns)
        return torch.stack(columns).tolist()

    for function in (trees.gather, ring.all_gather_ring):
        for rank, columns in enumerate(run_ranks(of_columns, 2, function)):
            if rank == 0 or function is ring.all_gather_ring:
                assert columns == [[0.0, 2.0, 4.0], [11.0, 13.0, 15.0]]
    for rank, columns in enumerate(run_ranks(of_columns, 2, ring.reduce_scatter_ring)):
        assert columns[rank] == [10.0 + 2 * rank, 14.0 + 2 * rank, 18.0 + 2 * rank]


# ---- the race on a slow network ----------------------------------------------------------------


def test_a_race_takes_at_least_the_time_of_the_formula():
    network = Network(latency_s=0.01, bytes_per_s=1e6)
    times_s = race(PROGRAMS, [2, 4], 4000, network, repeats=1)
    for place, n in enumerate((2, 4)):
        least_s = {"A": network.message_s(4000), "B": network.message_s(4000 / n)}
        for name, message_s in least_s.items():
            assert times_s[name][place] >= 2 * (n - 1) * message_s, (name, n, times_s)


def test_the_figure_of_a_race_has_each_point_and_each_line():
    measured_s = {"all_reduce_naive": [0.2, 0.4], "all_reduce_ring": [0.1, 0.15]}
    model_s = {"all_reduce_naive": [0.1, 0.3], "all_reduce_ring": [0.1, 0.1]}
    (ax,) = against_ranks([2, 4], measured_s, model_s).axes
    drawn = [line.get_xydata().tolist() for line in ax.get_lines()]
    for curves in (measured_s, model_s):
        for seconds in curves.values():
            assert [[n, 1e3 * s] for n, s in zip((2, 4), seconds, strict=True)] in drawn
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(measured_s)
    (ax,) = against_ranks([2, 4], {"A": [0.2, 0.4]}, looks={"A": "naive"}).axes
    assert ax.get_lines()[0].get_color() == style("naive")["color"]


# ---- the benchmark -----------------------------------------------------------------------------


def factor(kind, n):
    """Bus bandwidth / algorithm bandwidth, from nccl-tests' PERFORMANCE.md."""
    share = (n - 1) / n
    factors = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share}
    return (factors | {"gather": share, "broadcast": 1, "reduce": 1, "memory copy": 1})[kind]


def test_the_job_measures_the_learners_functions_beside_torchs_own(tmp_path):
    clone = make_clone(tmp_path)
    names = bench_collectives.Parts._fields
    mine.write("collectives", bench_collectives.Parts()._asdict(), clone / "mine")
    job = ["bash", clone / "sbatch" / "collectives.sbatch", "--impl", "mine", "--device", "cpu"]
    code, out, err = run([*job, "--max-mb", "0.016", "--repeats", "2"], tmp_path)
    assert (code, err) == (0, "")
    assert "2 rank(s) on cpu" in out and f"yours: {', '.join(names)};" in out
    folder = tmp_path / "runs" / "collectives-001"
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "results.jsonl", "bandwidth.png")
    }
    assert json.loads((folder / "config.json").read_text())["config"]["max_mb"] == 0.016
    assert (folder / "bandwidth.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (folder / "results.jsonl").open()]
    kinds = list(bench_collectives.BY_HAND)
    wanted = {"memory copy", *NAMES, *(f"dist.{kind}" for kind in kinds)}
    found = {(row["name"], row["nbytes"]) for row in rows}
    assert found == {(name, size) for name in wanted for size in (1000, 4000, 16000)}
    assert len(found) == len(rows)
    for row in rows:
        assert row["algorithm_bytes_per_s"] == pytest.approx(row["nbytes"] / row["time_s"])
        bus = row["algorithm_bytes_per_s"] * factor(row["kind"], 2)
        assert row["bus_bytes_per_s"] == pytest.approx(bus)
        assert (row["predicted_s"] is not None) == (row["name"] in NAMES)
    for name in wanted:
        assert sum(line.startswith(f"{name} ") for line in out.splitlines()) == 3, name


def start(folder, **settings):
    """Run the benchmark on ranks that torchrun would have started."""
    os.environ["MANYHANDS_MINE"] = str(folder / "mine")
    os.chdir(folder)
    import bench_collectives

    bench_collectives.main(bench_collectives.Config(**settings))


WRONG = """
import torch.distributed as dist
def all_reduce_ring(tensor, op="sum", group=None):
    if dist.get_rank(group) == 0:
        tensor += 1
def fit_alpha_beta(sizes_bytes, times_s):
    return 1.0, 2.0
"""


def test_a_function_with_other_results_is_not_measured(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "collectives.py").write_text(WRONG)
    message = "all_reduce_ring gives other numbers than dist.all_reduce: mend it"
    settings = {"impl": "mine", "max_mb": 0.001, "repeats": 1}
    with pytest.raises(RankFailed, match=message):
        run_ranks(start, 2, tmp_path, join=False, only="all_r", **settings)


def test_predictions_come_from_the_learners_fit(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "collectives.py").write_text(WRONG)
    settings = {"impl": "mine", "max_mb": 0.001, "repeats": 1, "only": "reduce_", "out": "here"}
    run_ranks(start, 3, tmp_path, join=False, **settings)
    assert "model: a message takes 1000000 us" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "here" / "results.jsonl").open()]
    assert [(row["name"], row["nbytes"], row["predicted_s"]) for row in rows] == [
        ("memory copy", 996, None),  # three equal chunks
        ("reduce_scatter_ring", 996, 2 * (1 + 2 * 332)),  # two rounds of a chunk each
        ("dist.reduce_scatter", 996, None),
    ]


def test_one_rank_copies_memory_and_sends_nothing(tmp_path, capsys):
    run_ranks(start, 1, tmp_path, join=False, max_mb=0.004, repeats=1, out="here")
    assert "one rank sends nothing" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "here" / "results.jsonl").open()]
    assert [(row["name"], row["nbytes"]) for row in rows] == [
        ("memory copy", 1000),
        ("memory copy", 4000),
    ]


REFUSED = [
    ({"max_mb": -1}, "--max-mb is -1: take at least 0.001, which is 1 kB"),
    ({"max_mb": 0.0009}, "--max-mb is 0.0009: take"),
    ({"max_mb": math.nan}, "--max-mb is nan"),
    ({"max_mb": math.inf}, "--max-mb is inf"),
    ({"repeats": 0}, "--repeats is 0: take at least 1"),
    ({"only": "alltoall"}, "--only 'alltoall' is in no name: broadcast, reduce, gather, all_g"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(BadInput, match=words):
        bench_collectives.main(bench_collectives.Config(**settings))


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("three years of work")
    code, _, err = run([sys.executable, bench_collectives.__file__, "--out", "thesis"], tmp_path)
    assert code == 2 and err.startswith("bench_collectives.py: --out thesis holds files but no run")
    assert err.count("\n") == 1


def test_sizes_are_cut_to_equal_chunks_and_have_to_fit_into_memory():
    world = World(0, 0, 3, torch.device("cpu"))
    small = bench_collectives.choose_sizes(bench_collectives.Config(max_mb=0.064), world)
    assert small == [996, 3996, 15996, 63996]
    assert bench_collectives.choose_sizes(bench_collectives.Config(), world)[-1] == 15_999_996
    with pytest.raises(BadInput, match="--max-mb 1e.06 needs up to 15 TB of memory for 3 rank"):
        bench_collectives.choose_sizes(bench_collectives.Config(max_mb=1e6), world)


def test_impl_torch_measures_nothing_by_hand():
    for kind in bench_collectives.BY_HAND:
        given = torch.zeros(3), World(0, 0, 3, torch.device("cpu")), bench_collectives.Parts()
        works = bench_collectives.choose_works(kind, *given, by_hand=False)
        assert list(works) == [f"dist.{kind}"]


def test_the_figure_has_a_panel_a_collective_and_each_point_of_the_table():
    rows = [
        bench_collectives.Row(kind, name, size, 0.5, size / 0.5, factor(kind, 4) * size / 0.5, None)
        for kind, names in {"memory copy": (), **bench_collectives.BY_HAND}.items()
        for name in (*names, f"dist.{kind}" if names else kind)
        for size in (1000, 4000)
    ]
    figure = bench_collectives.draw(rows)
    assert [ax.get_title() for ax in figure.axes] == list(bench_collectives.BY_HAND)
    for ax in figure.axes:
        drawn = {line.get_label(): line.get_xydata().tolist() for line in ax.get_lines()}
        drawn = {label: xy for label, xy in drawn.items() if xy}
        names = bench_collectives.BY_HAND[ax.get_title()]
        wanted = {"gather": {"naive"}}.get(ax.get_title(), {name.split("_")[-1] for name in names})
        assert drawn.keys() == wanted | {"native", "memory copy"}
        assert drawn["native"] == [[s, factor(ax.get_title(), 4) * s / 5e8] for s in (1000, 4000)]
        assert "GB/s" in ax.get_ylabel() and "bytes" in ax.get_xlabel()
    assert len({ax.get_ylim() for ax in figure.axes}) == 1
    (alone,) = bench_collectives.draw(rows[:2]).axes
    assert alone.get_title() == "memory copy"
    assert len(bench_collectives.draw(rows[:2] + rows[-10:]).axes) == 2
