"""Checks of lesson 05: replicas that average their gradients, from a server to buckets.

order.py     the steps of one GPU, and what several ranks change in them
server.py    a worker and its parameter server, one message each way
means.py     equal starts and averaged gradients
training.py  a whole training loop
buckets.py   which gradients travel together, and in which order they arrive
overlap.py   buckets that are sent during backward
hidden.py    how much of the messages they hide; slow is told, and costs no points
"""

from manyhands.checks.data_parallel import buckets, means, order, overlap, server, training
from manyhands.checks.data_parallel.hidden import measure_overlap  # noqa: F401
from manyhands.checks.data_parallel.order import LURES  # noqa: F401
from manyhands.checks.engine.lesson import Lesson

lesson = Lesson("data_parallel")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

order_of_steps = lesson.add(order.order_of_steps)
steps_that_change = lesson.add(order.steps_that_change)
worker_step = lesson.add(server.worker_step)
server_step = lesson.add(server.server_step)
broadcast_state = lesson.add(means.broadcast_state)
average_gradients = lesson.add(means.average_gradients)
train_replicas = lesson.add(training.train_replicas)
make_buckets = lesson.add(buckets.make_buckets)
watch_arrivals = lesson.add(buckets.watch_arrivals)
BucketSender = lesson.add(overlap.bucket_sender)
BucketedDDP = lesson.add(overlap.bucketed_ddp)
