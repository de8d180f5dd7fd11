"""Checks of lesson 05: replicas that average their gradients, from a server to buckets.

order.py     the steps of one GPU, and what several ranks change in them
server.py    a worker and its parameter server, one message each way
means.py     equal starts and averaged gradients, by parameter and by bucket
training.py  a whole training loop
overlap.py   buckets that are sent during backward
"""

from manyhands.checks.data_parallel import means, order, overlap, server, training
from manyhands.checks.data_parallel.order import LURES  # noqa: F401
from manyhands.checks.engine.lesson import Lesson

lesson = Lesson("data_parallel")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep

order_of_steps = lesson.add(order.order_of_steps)
steps_that_change = lesson.add(order.steps_that_change)
worker_step = lesson.add(server.worker_step)
server_step = lesson.add(server.server_step)
broadcast_state = lesson.add(means.broadcast_state)
average_gradients = lesson.add(means.average_gradients)
train_replicas = lesson.add(training.train_replicas)
average_buckets = lesson.add(means.average_buckets)
BucketedDDP = lesson.add(overlap.bucketed_ddp)
