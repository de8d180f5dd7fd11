"""A first job in numbers: how long a training takes, who does what, and what was used.

    tasks 0..6 on 4 ranks      0, 4   1, 5   2, 6   3       each rank takes its share

Price: the shares cost no message at all.
"""

from collections.abc import Sequence


def days_on_devices(
    petaflops_days: float, num_devices: int, peak_tflops: float, utilisation: float
) -> float:
    """How many days a training run takes, not rounded.

    Args:
        petaflops_days: its work in PF/s-days. One is what a machine does that takes 1e15
            floating-point operations in each second of a whole day.
        peak_tflops: what the data sheet promises of one device, in 1e12 operations per second.
        utilisation: the share of that peak that the training reaches, from 0 to 1.
    """
    petaflops = num_devices * peak_tflops / 1000 * utilisation
    return petaflops_days / petaflops


def my_share(tasks: Sequence, rank: int, world_size: int) -> list:
    """The tasks of one rank: those at the positions rank, rank + world_size, rank + 2 world_size...

    A list; `tasks` stays as it is. Each task is done by exactly one rank, and the numbers of tasks
    differ by at most one.
    """
    return list(tasks[rank::world_size])


def solid_share(tasks: Sequence, rank: int, world_size: int) -> list:
    """The same number of tasks for one rank, but as one solid piece of the list."""
    first = len(tasks) * rank // world_size
    last = len(tasks) * (rank + 1) // world_size
    return list(tasks[first:last])


def device_hours(
    busy: Sequence[Sequence[float]], num_granted: int, seconds: float
) -> tuple[float, float]:
    """The device-hours that a job is charged, and those of them in which a device worked.

    Args:
        busy: for each rank how busy its device was, from 0 to 1, sampled at equal intervals; a
            rank may have no sample, and counts as idle. Each rank's mean is over its own samples.
        num_granted: devices that the job asked for and got, with a rank or without one.
        seconds: how long the job had them.
    """
    hours = seconds / 3600
    means = [sum(samples) / len(samples) if samples else 0.0 for samples in busy]
    return num_granted * hours, sum(means) * hours
