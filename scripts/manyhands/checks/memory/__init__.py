"""Checks of lesson 09: memory by formulas and by counting, and ways to need less of it."""

from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.memory import accounting, savings

lesson = Lesson("memory")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

recipe = lesson.add(accounting.recipe)
bytes_per_rank = lesson.add(accounting.bytes_per_rank)
block_activations = lesson.add(accounting.block_activations)
saved_bytes = lesson.add(accounting.saved_bytes)
accumulate = lesson.add(savings.accumulate)
Checkpoint = lesson.add(savings.checkpoint)
MasterWeights = lesson.add(savings.master_weights)
offload = lesson.add(accounting.offload)
