"""Checks of lesson 11: what a run is made of, sharded and asynchronous saves, survival."""

from manyhands.checks.checkpoint import (
    asynchronous,
    atomic,
    boxes,
    dcp,
    elastic,
    interval,
    pods,
    sharded,
    state,
)
from manyhands.checks.engine.lesson import Lesson

lesson = Lesson("checkpoint")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

Position = lesson.add(state.position)
TrainingState = lesson.add(state.training_state)
write_whole = lesson.add(atomic.write_whole)
plan = lesson.add(sharded.plan)
overlap = lesson.add(boxes.overlap)
parts_to_copy = lesson.add(sharded.parts_to_copy)
AsyncSaver = lesson.add(asynchronous.async_saver)
AppState = lesson.add(dcp.app_state)
best_interval = lesson.add(interval.best_interval)
account = lesson.add(interval.account)
samples_of_step = lesson.add(elastic.samples_of_step)
mended_job = lesson.add(pods.mended_job)
