"""Checks of lesson 02.

hill.py      a landscape that remembers where its loss was computed
lines.py     the loss some way off, on a line, and random directions
surfaces.py  a surface computed by many ranks, its roughness, and the sharpness
"""

from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.loss_surface import lines, surfaces

lesson = Lesson("loss_surface")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

loss_at = lesson.add(lines.loss_at)
slice_between = lesson.add(lines.slice_between)
random_direction = lesson.add(lines.random_direction)
surface = lesson.add(surfaces.surface)
roughness = lesson.add(surfaces.roughness)
sharpness = lesson.add(surfaces.sharpness)
