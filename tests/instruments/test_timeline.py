"""Time lines: spans of what a rank did, and a link that is made slow on purpose."""

import time

import pytest
import torch
import torch.distributed as dist

from manyhands.instruments import figures
from manyhands.instruments.timeline import Timeline
from manyhands.ranks.lab import run_ranks

pytestmark = pytest.mark.fast


def two_messages():
    """Two messages of 80,000 bytes, 20 ms + 1 s a MB, while 50 ms are spent on something else."""
    line = Timeline()
    line.watch_all_reduces(bytes_per_s=1e6, latency_s=0.02)
    first, second = torch.ones(20_000), torch.ones(20_000)
    start = time.time()
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    with line.span("backward"):
        time.sleep(0.05)
    for work in works:
        work.wait()
    return line.spans, time.time() - start, first.sum().item() + second.sum().item()


def test_messages_pass_one_after_the_other_while_the_rank_works():
    for rank, (spans, seconds, total) in enumerate(run_ranks(two_messages, 2)):
        assert total == 2 * 2 * 20_000  # the sums are real
        assert 0.19 < seconds < 2  # 0.1 s each, and the work in between costs nothing more
        messages = [span for span in spans if span[1] == "communication"]
        assert [span[0] for span in spans] == [rank] * len(spans) and len(messages) == 2
        (_, _, start, _), (_, _, _, stop) = messages
        assert 0.19 < stop - start < 2
        assert any(role == "backward" and stop - start >= 0.05 for _, role, start, stop in spans)
        assert any(role == "idle" and stop - start > 0.02 for _, role, start, stop in spans)


def blocking_message():
    line = Timeline()
    line.watch_all_reduces()
    tensor = torch.ones(10)
    assert dist.all_reduce(tensor) is None
    return tensor.tolist(), [role for _, role, *_ in line.spans]


def test_a_blocking_message_is_recorded_too():
    for values, roles in run_ranks(blocking_message, 2):
        assert values == [2.0] * 10 and "communication" in roles


def test_messages_get_a_lane_of_their_own():
    figure, ax = figures.new_figure()
    figures.timeline(ax, [(0, "backward", 0.0, 1.0), (0, "communication", 0.5, 1.5)])
    work, message = sorted(ax.patches, key=lambda bar: bar.get_y())
    assert work.get_y() + work.get_height() <= message.get_y()
    assert (message.get_x(), message.get_width()) == (500, 1000)
    figures.legend_below(figure, ax)
    assert figure.legends and ax.get_legend() is None
