"""C/W: the two bounds against a count of bytes and FLOPs, and against the time machine."""

import math

import pytest

from manyhands.instruments import figures as look
from manyhands.mesh import bench, figures
from manyhands.mesh.ratio import largest_tensor_degree, step_s, tokens_to_hide
from manyhands.planner.hardware import GPUS, group_link
from manyhands.simulator import figures as pictures
from manyhands.simulator.clock import replay, summary
from manyhands.simulator.events import Collective, Compute, Wait
from manyhands.simulator.traffic import Machine
from manyhands.tensor.cost import Link, messages_s, products_s


def test_tokens_to_hide_is_c_over_w_for_many_ranks_of_two_bytes():
    assert tokens_to_hide(2000, 10**9) == pytest.approx(2000)
    assert tokens_to_hide(2000, 2) == 1000  # half of a ring's bytes stay at home
    assert tokens_to_hide(2000, 2, bytes_per_number=4) == 2000
    assert tokens_to_hide(2000, 1) == 0
    for sharded in (False, True):
        assert tokens_to_hide(600, 4, 4, sharded) == pytest.approx(3 / 4 * 4 / 2 * 600)


# N parameters in two-byte numbers, C and W: 300 FLOPs per byte
N, C, W = 1e6, 3e12, 1e10
UNITS = 50


def replicas(tokens):
    """Backward in equal parts, each followed by the all-reduce of its gradients."""
    backward = []
    for unit in range(UNITS):
        backward += [Compute(4 * N * tokens / UNITS)]
        backward += [Collective("all_reduce", "dp", 2 * N / UNITS, unit)]
    return backward + [Wait(unit) for unit in range(UNITS)]


def sharded(tokens):
    """A unit computes while the weights of the next one come, and the gradients of the last leave:
    first forward, 2 FLOPs for each token, then backward, 4."""
    program, handle = [], 0
    for flops, ops in ((2, ["all_gather"]), (4, ["all_gather", "reduce_scatter"])):
        for _ in range(UNITS):
            started = []
            for op in ops:
                program.append(Collective(op, "dp", 2 * N / UNITS, handle))
                started.append(Wait(handle))
                handle += 1
            program += [Compute(flops * N * tokens / UNITS), *started]
    return program


@pytest.mark.parametrize("program", [replicas, sharded])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_messages_begin_to_show_at_these_tokens(program, num_ranks):
    wanted = tokens_to_hide(C / W, num_ranks, sharded=program is sharded)
    machine = Machine(C, {"dp": Link("", W, 0.0)})
    for tokens, shows in ((1.05 * wanted, False), (0.95 * wanted, True)):
        found = summary(replay([program(tokens)] * num_ranks, {"dp": num_ranks}, machine))
        # in backward of replicas the last message has nothing to hide behind
        last_s = 2 * N / W / UNITS * 2 * (num_ranks - 1) / num_ranks
        allowed_s = last_s if program is replicas else 0.0
        assert (found.exposed_s.get("dp", 0.0) > allowed_s * (1 + 1e-9)) is shows


@pytest.mark.parametrize("width", [1024, 4096, 16384])
@pytest.mark.parametrize("flops_per_byte", [500, 2200])
def test_the_largest_tensor_degree_is_where_lesson_13_has_equal_times(width, flops_per_byte):
    most = largest_tensor_degree(width, flops_per_byte)
    link, tokens = Link("", 1e9, 0.0), 8192
    for n in (most, most + 1):
        ratio = messages_s(width, tokens, n, link) / products_s(
            width, tokens, n, flops_per_byte * 1e9
        )
        assert (ratio <= 1) is (n == most)
    assert most >= 1 and largest_tensor_degree(width, flops_per_byte, 4) <= most


def test_published_numbers():
    """An H100 has 989 TFLOP/s in bfloat16; NVLink 450 GB/s, a network card 50 GB/s.

    "How to Scale Your Model" has 2,200 tokens in a node and 2,475 beyond one, of 990 TFLOP/s.
    """
    h100 = GPUS["H100-80GB"]
    assert round(tokens_to_hide(990e12 / group_link(h100, 8).bytes_per_s, 10**6)) == 2200
    assert round(tokens_to_hide(990e12 / group_link(h100, 1024).bytes_per_s, 10**6)) == 2475
    assert round(tokens_to_hide(989e12 / 50e9, 1024)) == 19761
    assert largest_tensor_degree(8192, 989e12 / 450e9) == 17
    assert largest_tensor_degree(8192, 989e12 / 50e9) == 2


def test_the_time_of_a_step():
    assert step_s(1.0, 2.0, 1.5) == 3.0 and step_s(1.0, 2.0, 5.0) == 6.0
    # by hand, 4 buckets: the last one shows 0.5 s; or the first one begins 0.5 s late
    assert step_s(1.0, 2.0, 2.0, 4) == 3.5
    assert step_s(1.0, 2.0, 8.0, 4) == 1.0 + 0.5 + 8.0
    machine = Machine(1.0, {"dp": Link("", 1.0, 0.0)})
    for size in (0.5, 2.0, 8.0):
        parts = [[Compute(0.5), Collective("all_reduce", "dp", size / 4, i)] for i in range(4)]
        program = [Compute(1.0), *(event for part in parts for event in part)]
        program += [Wait(i) for i in range(4)]
        found = summary(replay([program] * 2, {"dp": 2}, machine))
        assert found.step_s == pytest.approx(step_s(1.0, 2.0, size, 4))


def test_the_crossing_is_read_from_steps():
    """Steps whose backward takes 1 ms for 100 tokens, and messages of 5 ms in 5 buckets."""
    tokens = [100, 200, 400, 800]
    quick_s = [1.5e-5 * one for one in tokens]
    slow_s = [step_s(one / 3, 2 / 3 * one, 5e-3, 5) for one in quick_s]
    assert bench.where_they_cross(tokens, quick_s, slow_s[:2], 5) == pytest.approx(500)
    assert bench.where_they_cross(tokens[:2], quick_s[:2], slow_s[:2], 5) == pytest.approx(500)
    found = bench.Crossing(tokens, quick_s, slow_s, slow_s, 500.0, 500.0, 500.0)
    figure = figures.crossing(found)
    assert look.png(figure) and len(figure.axes[0].get_lines()) >= 3


def test_a_picture_of_scaling():
    found = [summary(replay([[Compute(1.0)]], {"dp": 1}, Machine(1.0, {})))] * 3
    figure = pictures.against_ranks([8, 64, 512], {"50 GB/s": found, "12 GB/s": found})
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["8", "64", "512"]
    assert look.png(figure) and math.isclose(figure.axes[1].get_ylim()[1], 100)


def test_the_bench_measures_what_it_says():
    """Numbers of a machine are not tested: only that they are there, and that they fit together."""
    ratio = bench.measure_ratio(num_rounds=1)
    assert min(ratio) > 0 and ratio.flops_per_byte == ratio.step_flops_per_s / ratio.bytes_per_s
    found = bench.crossing([2, 4, 8], num_rounds=1)
    assert found.tokens == [32, 64, 128] and min(found.quick_s + found.slow_s) > 0
    assert found.predicted_tokens == pytest.approx(found.flops_per_byte)
    assert math.isfinite(found.measured_tokens)
