"""Checks of lesson 01.

line.py     samples near a line, and the largest learning rate
batches.py  batches, descent with them, the variance of their gradients, momentum
"""

from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.gradient_descent import batches, line

lesson = Lesson("gradient_descent")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

largest_rate = lesson.add(line.largest_rate)
mini_batches = lesson.add(batches.mini_batches)
descend_in_batches = lesson.add(batches.descend_in_batches)
gradient_variance = lesson.add(batches.gradient_variance)
Momentum = lesson.add(batches.momentum)
