"""Wrong answers to lesson 04 that its checks once took for right."""

import torch

from manyhands.collectives.alpha_beta import fit_alpha_beta


def fit_in_32_bits(sizes_bytes, times_s):
    """With 4 ms and 10 GB/s one of the two columns is taken for rounding."""
    sizes, times = torch.tensor(sizes_bytes).float(), torch.tensor(times_s).float()
    design = torch.stack([1 / times, sizes / times], dim=1)
    solution = torch.linalg.lstsq(design, torch.ones(len(sizes), 1)).solution
    return solution[0].item(), solution[1].item()


def fit_above_zero(sizes_bytes, times_s):
    """The least sum of squares may take a negative alpha."""
    alpha, beta = fit_alpha_beta(sizes_bytes, times_s)
    return max(0.0, alpha), beta


WRONG = {"4.11": [(fit_in_32_bits, "gives alpha"), (fit_above_zero, "gives alpha")]}
