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

import math
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
    blocks: int,
    steps: int,
    synchronize: Callable[[], object],
) -> float:
    """Samples per second, from the median time of a block of steps.

    The first steps are slower, since memory is allocated and caches are cold, so the steps of the
    warm-up do not count. On a GPU `step` returns before the work is done, and `synchronize` waits
    for the GPU. Within a block nothing waits, so the CPU may prepare the next step meanwhile.

    Args:
        step: trains one step on `batch` samples.
        warm_up: steps before the first that counts.
        blocks: how many blocks to time; the clock is read before and after each.
        steps: number of steps in each block.
        synchronize: torch.cuda.synchronize on a GPU; on a CPU a function that does nothing.
    """
    for _ in range(warm_up):
        step()
    times_s = []
    for _ in range(blocks):
        synchronize()
        start_s = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        times_s.append(time.perf_counter() - start_s)
    return batch * steps / median(times_s)


def steps_to_target(
    step: Callable[[], object],
    evaluate: Callable[[], float],
    target: float,
    patience: int,
    every: int,
    max_steps: int,
) -> int | None:
    """Train until the target is reached, and stays reached: how many steps did that take?

    The model is evaluated after every `every` steps. A single good evaluation may be luck, so
    training goes on until `patience` of them in a row are at least `target`; then it stops.

    Args:
        step: trains one step.
        evaluate: gives the accuracy of the model as it is now.
        max_steps: train for at most this many steps.

    Returns:
        Steps done when the model first was as good as it then stayed; None where the training ends
        before that is sure.
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

    Errors count relative to the steps, which range from tens to thousands: the sum of
    (fitted steps / steps - 1)^2 is the smallest possible.

    Args:
        batches: at least two different sizes.
        steps: to the target, one for each batch.
    """
    sizes = torch.tensor(list(batches), dtype=torch.float64)
    counts = torch.tensor(list(steps), dtype=torch.float64)
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
    both = torch.cat([gradient, gradient.square().sum()[None]])  # one all-reduce for the two
    dist.all_reduce(both, group=group)
    both /= dist.get_world_size(group)
    return both[:-1], both[-1].item()


def noise_scale(
    small_squares: Sequence[float], large_squares: Sequence[float], small: int, large: int
) -> float:
    """The noise scale V / |true gradient|^2, in samples, from gradients at two batch sizes.

    V is the noise of a single sample: the mean squared distance of its gradient from the true one.
    Neither V nor the true gradient can be measured with a batch, but squared lengths can.

    Args:
        small_squares: squared lengths of gradients of batches of `small` samples, at least one.
        large_squares: likewise of `large` samples; the lists may have different lengths.
    """
    small_square = fmean(small_squares)
    large_square = fmean(large_squares)
    variance = (small_square - large_square) / (1 / small - 1 / large)
    true_square = (large * large_square - small * small_square) / (large - small)
    return variance / true_square


def fewest_processors(
    least: float, critical: float, batch: int, step_s: float, limit_s: float
) -> int | None:
    """The fewest processors that reach the target within a time limit.

    Every processor trains on `batch` samples of its own in a step, and their gradients are
    averaged. A step takes as long with many processors as with one.

    Args:
        least, critical: least steps and critical batch, as `fit_steps` finds them.
        batch: samples of one processor in a step.
        step_s: seconds that a step takes.
        limit_s: seconds that the training may take.

    Returns:
        None if no number of processors is enough.
    """
    spare_s = limit_s - least * step_s  # for the steps that noise costs
    if spare_s <= 0:
        return None
    return math.ceil(least * critical * step_s / (batch * spare_s))
