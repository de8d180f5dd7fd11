"""How equal is equal: by how much a sum changes when its terms are added in another order.

    one by one   ((a + b) + c) + d      error of each sum: its size x eps / sqrt(12), at random
    in pairs     (a + b) + (c + d)      fewer roundings of large sums: depth log2(n) in place of n

n terms of random sign and size r add up to about r sqrt(n). One by one, the k-th sum has size
r sqrt(k), and the squares of all errors add up to r^2 eps^2 n^2 / 24. In pairs, each of the log2(n)
levels adds r^2 eps^2 n / 12. Divided by the size of the result:

    one by one   eps sqrt(n / 24)        in pairs   eps sqrt(log2(n) / 12)

Parallel training changes the order of sums, and nothing else. So a difference of a few such spreads
is rounding, and one of a hundred is a bug. eps is the distance from 1 to the next number of a type:
1.2e-7 in float32, 7.8e-3 in bfloat16.

Source: Higham 1993, "The accuracy of floating point summation", SIAM J. Sci. Comput. 14 (the
orders; the constants follow from uniform rounding errors).
"""

import math

import torch
from torch import Tensor


def spread_of_sum(num_terms: int, dtype: torch.dtype, in_pairs: bool = False) -> float:
    """Return the standard deviation of a sum's rounding error, relative to the sum's usual size.

    Terms have random signs and equal sizes. Added one by one, the error is eps sqrt(n / 24) for n
    terms; added `in_pairs`, of pairs and so on, eps sqrt(log2(n) / 12), also where n is no power of
    two. A sum of one term has no error.
    """
    eps = torch.finfo(dtype).eps
    if num_terms == 1:
        return 0.0
    roundings = math.log2(num_terms) / 12 if in_pairs else num_terms / 24
    return eps * math.sqrt(roundings)


def tolerance(size: float, num_terms: int, dtype: torch.dtype, in_pairs: bool = False) -> float:
    """Return the largest difference between two orders of one sum that is still rounding.

    Both sums have an error, so the difference spreads sqrt(2) times as much. Six times that spread
    is practically never exceeded by chance.

    Args:
        size: of a usual result, such as the root mean square of a gradient.
    """
    return 6 * math.sqrt(2) * spread_of_sum(num_terms, dtype, in_pairs) * size


def add_up(terms: Tensor) -> Tensor:
    """The sum of `terms` (n, columns) one by one in their own type: (columns,)."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def add_pairs(terms: Tensor) -> Tensor:
    """The sum of `terms` (n, columns) in pairs, n a power of two: (columns,)."""
    while len(terms) > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def measured_spread(
    num_terms: int, dtype: torch.dtype, in_pairs: bool = False, columns: int = 4096, seed: int = 0
) -> float:
    """The standard deviation of such sums' errors over `columns` sums, by their usual size.

    The truth is the same sum in float64.
    """
    draws = torch.Generator().manual_seed(seed)
    terms = torch.randn(num_terms, columns, generator=draws).to(dtype)
    exact = terms.double().sum(0)
    found = (add_pairs if in_pairs else add_up)(terms).double()
    return ((found - exact).square().mean() / exact.square().mean()).sqrt().item()
