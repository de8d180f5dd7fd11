"""Checks of lesson 07.

noise.py   the variance of a step, and noise that makes up for a large batch
rates.py   the learning rate and the batch of a schedule
ghosts.py  batch norm over parts of a batch
norms.py   batch norm over the ranks
ties.py    which differences are more than chance
"""

from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.large_batch import ghosts, noise, norms, rates, ties

lesson = Lesson("large_batch")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

step_variance = lesson.add(noise.step_variance)
scaled_rate = lesson.add(rates.scaled_rate)
warmed_up_rate = lesson.add(rates.warmed_up_rate)
noise_size = lesson.add(noise.noisy_mean)
GhostBatchNorm = lesson.add(ghosts.ghost)
NormOverRanks = lesson.add(norms.over_ranks)
grown_batch = lesson.add(rates.grown_batch)
is_tie = lesson.add(ties.ranked)
