"""How the batch size decides how many steps a training takes, and how long a step takes.

    steps to the target (log)                steps = least steps * (1 + critical batch / batch)
      | \\
      |   \\    perfect scaling               Left of the critical batch twice the batch halves the
      |     `._                              steps; right of it more samples say nothing new.
      |        ``---.....___  plateau
      +-----------|----------> batch (log)
            critical batch

The noise scale predicts the critical batch from gradients alone: how much do the gradients of
single samples scatter, compared with the square of their mean? Price of that on N ranks that
average their gradients anyway: 4 more bytes in the all-reduce.
Sources: McCandlish et al. 2018, https://arxiv.org/abs/1812.06162 (section 2 and appendix A.1);
Shallue et al. 2019, https://arxiv.org/abs/1811.03600.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor


def throughput(
    step: Callable[[], object],
    batch: int,
    warm_up: int,
    repeats: int,
    synchronize: Callable[[], object],
) -> float:
    """Samples per second: the batch, divided by the median time of a step.

    The first steps are slower, since memory is allocated and caches are cold: they do not count. On
    a GPU `step` returns before the work is done. `synchronize` waits for it: call it before every
    look at the clock.

    Args:
        step: trains one step on `batch` samples.
        warm_up: steps before the first that counts.
        repeats: steps to time, one by one.
        synchronize: torch.cuda.synchronize on a GPU; on a CPU a function that does nothing.
    """
    for _ in range(warm_up):
        step()
    times_s = []
    for _ in range(repeats):
        synchronize()
        start_s = time.perf_counter()
        step()
        synchronize()
        times_s.append(time.perf_counter() - start_s)
    return batch / median(times_s)


def steps_to_target(
    step: Callable[[], object],
    evaluate: Callable[[], float],
    target: float,
    patience: int,
    every: int,
    max_steps: int,
) -> int | None:
    """Train until the target is reached, and stays reached: how many steps did that take?

    The model is evaluated after every `every` steps. The target is reached at the first of
    `patience` evaluations in a row that are all at least `target`: a single good one may be luck.

    Args:
        step: trains one step.
        evaluate: gives the accuracy of the model as it is now.
        max_steps: do not train for more steps than these.

    Returns:
        Steps done by that first evaluation; None where the training ends before it is sure.
    """
    in_a_row = 0
    for num_steps in range(1, max_steps + 1):
        step()
        if num_steps % every == 0:
            in_a_row = in_a_row + 1 if evaluate() >= target else 0
            if in_a_row == patience:
                return num_steps - (patience - 1) * every
    return None


def best_rate(steps: Mapping[float, Sequence[int | None]]) -> tuple[float, float] | None:
    """Find the learning rate that reaches the target in the fewest steps, on average over seeds.

    Args:
        steps: for each learning rate the steps of each seed, None where it missed the target.

    Returns:
        The rate and its mean number of steps. A rate counts only if no seed missed the target; None
        where no rate does.
    """
    means = {rate: fmean(counts) for rate, counts in steps.items() if None not in counts}
    return min(means.items(), key=lambda item: item[1], default=None)


def fit_steps(batches: Sequence[float], steps: Sequence[float]) -> tuple[float, float]:
    """Find the least steps and the critical batch: steps = least_steps * (1 + critical / batch).

    Errors count relative to the steps, which reach from tens to thousands: the sum of
    (fitted steps / steps - 1)^2 is the smallest possible.

    Args:
        batches: at least two different sizes.
        steps: to the target, one for each batch.
    """
    sizes, counts = (torch.tensor(list(v), dtype=torch.float64) for v in (batches, steps))
    columns = torch.stack([1 / counts, 1 / (sizes * counts)], dim=1)  # (batches, 2)
    least, slope = torch.linalg.lstsq(columns, torch.ones_like(counts)).solution.tolist()
    return least, slope / least


def average_over_ranks(
    gradient: Tensor, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, float]:
    """Average the gradients of all ranks: the result is the gradient of one large batch.

    Args:
        gradient: of this rank's own batch; all ranks have batches of one size. Left as it is. (P,)

    Returns: the mean of the ranks' gradients (P,), and the mean of the squared lengths they had.
    """
    both = torch.cat([gradient, gradient.square().sum()[None]])  # one message for the two
    dist.all_reduce(both, group=group)
    both /= dist.get_world_size(group)
    return both[:-1], both[-1].item()


def noise_scale(
    small_squares: Sequence[float], large_squares: Sequence[float], small: int, large: int
) -> float:
    """The noise scale (samples), from squared lengths of gradients at two batch sizes.

    A batch's gradient is the true gradient plus noise of variance V / batch. So its squared length
    is, on average, |true gradient|^2 + V / batch. The averages at two batch sizes give two
    equations, and the noise scale is V / |true gradient|^2.

    Args:
        small_squares, large_squares: squared lengths at the batch sizes `small` and `large`.
    """
    small_square, large_square = fmean(small_squares), fmean(large_squares)
    variance = (small_square - large_square) / (1 / small - 1 / large)
    true_square = (large * large_square - small * small_square) / (large - small)
    return variance / true_square
