"""Checks of lesson 12."""

from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.pipeline import bubbles, schedules, stages, steps, wiring

lesson = Lesson("pipeline")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

partition = lesson.add(stages.partition)
Pipeline = lesson.add(steps.Pipeline)
sum_tied = lesson.add(wiring.sum_tied)
gpipe = lesson.add(schedules.gpipe)
simulate = lesson.add(bubbles.simulate)
bubble = lesson.add(bubbles.bubble, "bubble")
one_f_one_b = lesson.add(schedules.one_f_one_b)
in_flight = lesson.add(schedules.in_flight)
interleaved = lesson.add(schedules.interleaved)
torch_pipeline = lesson.add(wiring.torch_pipeline)
make_grid = lesson.add(wiring.make_grid)
