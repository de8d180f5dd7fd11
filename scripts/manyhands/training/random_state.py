"""Where torch's random numbers stand: part of a run's state, on each rank its own."""

import torch
from torch import Tensor


def get_rng(device: torch.device) -> dict[str, Tensor]:
    """Where torch's random numbers stand, on the CPU and on `device`."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng(states: dict[str, Tensor], device: torch.device) -> None:
    """Go on with the random numbers from where `get_rng` found them."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
