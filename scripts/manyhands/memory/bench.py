"""What lesson 09 counts and times: the arithmetic of a step, and its seconds."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.instruments import timing


class MatmulFlops(TorchDispatchMode):
    """Count the floating-point operations of all matrix products while the block runs.

    A product of (n, k) with (k, m) takes 2 n k m: as many multiplications as additions. What runs
    inside a fused kernel, such as attention, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Torch's own signature: called with every operation."""
        if func is torch.ops.aten.mm.default:
            left, right = args
            self.total += 2 * left.numel() * right.shape[1]
        return func(*args, **(kwargs or {}))


def work_and_time(
    steps: Mapping[str, Callable[[], object]], num_rounds: int = 9
) -> dict[str, tuple[int, float]]:
    """Return, for each of `steps` by its name, the operations of its products and its seconds.

    The seconds are the least of `num_rounds`. The steps are timed in turn, so that a busy minute of
    the machine hits all of them.
    """
    flops = []
    for step in steps.values():
        with MatmulFlops() as counted:
            step()
        flops.append(counted.total)
    seconds = [min(times_s) for times_s in timing.in_turn(list(steps.values()), num_rounds)]
    return dict(zip(steps, zip(flops, seconds, strict=True), strict=True))
