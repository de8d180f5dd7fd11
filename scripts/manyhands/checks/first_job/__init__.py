"""Checks of lesson 00."""

from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.first_job import files, numbers, preparing, ranks, site

lesson = Lesson("first_job")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

device_map = lesson.add(ranks.device_map)
prepare_once = lesson.add(preparing.prepare_once)
fit_power_law = lesson.add(numbers.fit_power_law)
mended_job = lesson.add(files.mended_job)
device_hours = lesson.add(numbers.device_hours)
site_file = lesson.add(site.site_file)
