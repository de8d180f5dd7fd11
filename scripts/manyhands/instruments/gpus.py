"""The GPUs that were granted, as NVIDIA's library NVML sees them, also those without a rank.

CUDA_VISIBLE_DEVICES says which GPUs of the node they are, by number or by UUID, and in which order
torch counts them. What NVML cannot tell is None, and "why" has its words: a GPU cut in parts (MIG)
has no utilisation, a driver may be missing.
Price: about a millisecond a GPU for a sample.
Source: https://docs.nvidia.com/deploy/nvml-api/
"""

import os
import re
from collections.abc import Callable
from itertools import takewhile

import pynvml

READ: dict[str, Callable] = {
    "percent": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_bytes": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "power_w": lambda gpu: round(pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3, 1),  # it says mW
}


def visible_gpus() -> list[str] | None:
    """Numbers or UUIDs of the GPUs that CUDA shows to this process; None where it shows all."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return None
    listed = [name.strip() for name in names.split(",")]
    # What stands behind a name that is no GPU does not count.
    return list(takewhile(lambda name: re.match(r"\d|GPU-|MIG-", name), listed))


def least_used(names: list[str], used_bytes: list[int | None], count: int) -> list[str]:
    """The `count` GPUs whose memory is used least, in their order; those that tell nothing last."""
    order = sorted(
        range(len(names)),
        key=lambda gpu: (used_bytes[gpu] is None, used_bytes[gpu] or 0, gpu),
    )
    return [names[gpu] for gpu in sorted(order[:count])]


class Gpus:
    """The GPUs granted on this node, counted as torch counts them."""

    def __init__(self, num_granted: int) -> None:
        self.num_granted = num_granted
        self.names: list[str] = []
        self.handles: list[object] = []
        self.why = "not visible to this process"
        if num_granted == 0:
            return
        try:
            pynvml.nvmlInit()
            names = visible_gpus()
            if names is None:
                names = [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
            self.names = names
            self.handles = [self._find(name) for name in names]
        except pynvml.NVMLError as problem:
            self.why = str(problem)

    def _find(self, name: str) -> object:
        """NVML's handle of a GPU; None where it knows no such GPU."""
        try:
            if name.isdigit():
                return pynvml.nvmlDeviceGetHandleByIndex(int(name))
            return pynvml.nvmlDeviceGetHandleByUUID(name)
        except pynvml.NVMLError as problem:
            self.why = f"{name}: {problem}"
            return None

    def sample(self, index: int) -> dict[str, object]:
        """How busy GPU `index` is now: {"percent", "memory_bytes", "power_w"}, and "why" not."""
        handle = self.handles[index] if index < len(self.handles) else None
        if handle is None:
            return {**dict.fromkeys(READ), "why": self.why}
        values: dict[str, object] = {}
        for name, read in READ.items():
            try:
                values[name] = read(handle)
            except pynvml.NVMLError as problem:
                values |= {name: None, "why": f"{name}: {problem}"}
        return values

    def share(self, count: int) -> list[str]:
        """The names of the `count` GPUs in whose memory least is now."""
        used = [self.sample(gpu)["memory_bytes"] for gpu in range(len(self.names))]
        return least_used(self.names, used, count)
