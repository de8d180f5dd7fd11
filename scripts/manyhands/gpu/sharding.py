"""FSDP in time and memory: what gathering ahead gains, and what offloading saves and costs."""

from itertools import chain

import torch
import torch.distributed as dist

from manyhands.fsdp import flat
from manyhands.gpu import techniques
from manyhands.gpu.measuring import Memory, Rows
from manyhands.gpu.scales import Scale
from manyhands.instruments.timing import median_s
from manyhands.ways.fsdp import fsdp


def prefetch(device: torch.device, scale: Scale) -> Rows:
    """FSDP by hand, gathering the next unit while one computes, and only when it is needed."""
    shape = scale.small
    steps = {}
    for name in ("gathered ahead", "gathered when needed"):
        whole, setting = techniques.begin(shape, device), techniques.setting_of(shape, 0)
        ready = fsdp(whole, setting, dtype=scale.dtype)
        if name == "gathered when needed":
            for one in chain(*ready.model.units):
                hold(one)
        steps[name] = techniques.step_of(ready, shape, device)
    times_s = median_s(list(steps.values()), scale.steps, device)
    ranks = dist.get_world_size()
    return [
        {"what": f"weights {name}", "model": shape.name, "ranks": ranks, "step_s": time_s}
        for name, time_s in zip(steps, times_s, strict=True)
    ]


def hold(one: flat.ShardedFlat) -> None:
    """Let a vector of weights be gathered only when somebody waits for it."""
    start, wait = one.start, one.wait

    def start_and_wait() -> None:
        start()
        wait()

    one.start = lambda: None  # which `wait` calls as well, too late to matter
    one.wait = start_and_wait


def offload(device: torch.device, scale: Scale) -> Rows:
    """The larger model under fully_shard: in the GPU's memory, and offloaded to the CPU's."""
    return [
        one_way(device, scale, name, is_offloaded)
        for name, is_offloaded in (("on the device", False), ("offloaded", True))
    ]


def one_way(device: torch.device, scale: Scale, name: str, offloaded: bool) -> dict[str, object]:
    """Time and peak memory of a step in one of the two ways."""
    shape = scale.large
    with Memory(device) as gauge:
        options = {"native": True, "dtype": scale.dtype, "offload": offloaded}
        step = techniques.train_step(fsdp, shape, device, **options)
        step()  # from now on there is optimizer state
        gauge.begin_peak()
        step()
        peak_bytes = gauge.peak()
    (time_s,) = median_s([step], max(2, scale.steps // 4), device)
    row = {"what": f"shards {name}", "model": shape.name, "ranks": dist.get_world_size()}
    return row | {"step_s": time_s, "peak_bytes": peak_bytes}
