"""Checks of lesson 03.

sweeps.py  time of a step, steps to the target, the best rate, the law of the steps
noise.py   the average of gradients, and the noise scale
costs.py   the fewest processors for a time limit
"""

from manyhands.checks.batch_size import costs, noise, sweeps
from manyhands.checks.engine.lesson import Lesson

lesson = Lesson("batch_size")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

throughput = lesson.add(sweeps.throughput)
steps_to_target = lesson.add(sweeps.steps_to_target)
best_rate = lesson.add(sweeps.best_rate)
fit_steps = lesson.add(sweeps.fit_steps)
average_over_ranks = lesson.add(noise.average_over_ranks)
noise_scale = lesson.add(noise.noise_scale)
fewest_processors = lesson.add(costs.fewest_processors)
