"""Checks of lesson 00."""

from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.first_job import files, numbers, ranks, site

lesson = Lesson("first_job")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep

days_on_devices = lesson.add(numbers.days_on_devices)
device_map = lesson.add(ranks.device_map)
my_share = lesson.add(ranks.my_share)
fit_power_law = lesson.add(numbers.fit_power_law)
job_file = lesson.add(files.job_file)
site_file = lesson.add(site.site_file)
device_hours = lesson.add(numbers.device_hours)
