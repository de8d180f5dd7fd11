"""Checks of lesson 06: a job around data parallelism, on one process and on ranks.

job.py       a process's place, joining and leaving, and how nodes find each other
samples.py   which rank reads which samples
training.py  gradients of several micro-batches, and a mean over uneven ranks
saving.py    one file, written by one rank
program.py   the whole program
"""

from manyhands.checks.ddp import job, program, samples, saving, training
from manyhands.checks.engine.lesson import Lesson

lesson = Lesson("ddp")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

place = lesson.add(job.place)
process_group = lesson.add(job.process_group)
ShardedSampler = lesson.add(samples.sampler)
accumulate = lesson.add(training.accumulate)
mean_over_ranks = lesson.add(training.mean_over_ranks)
save_once = lesson.add(saving.save_once)
rendezvous_arguments = lesson.add(job.rendezvous_arguments)
train = lesson.add(program.train)
