"""The checks of lesson 04: each exercise is a Spec.

trees.py      what goes up and down a tree, or from a rank to all others: 4.2 to 4.5
exchange.py   two messages at once, whole and in pieces: 4.6, 4.8
rings.py      the ring collectives: 4.7, 4.9, 4.10
cost.py       the cost of messages: 4.11, 4.12
calls.py      what a call is given, what is seen of it, and words that several exercises share
tape.py       what a rank does in one call: messages, waits, uses of tensors
"""

from manyhands.checks.collectives import cost, exchange, rings, trees
from manyhands.checks.engine.lesson import Lesson

lesson = Lesson("collectives")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

broadcast_naive = lesson.add(trees.broadcast_naive)
broadcast_tree = lesson.add(trees.broadcast_tree)
reduce_tree = lesson.add(trees.reduce_tree)
gather = lesson.add(trees.gather)
start_exchange = lesson.add(exchange.start_exchange)
all_gather_ring = lesson.add(rings.all_gather_ring)
exchange_in_pieces = lesson.add(exchange.exchange_in_pieces)
reduce_scatter_ring = lesson.add(rings.reduce_scatter_ring)
all_reduce_ring = lesson.add(rings.all_reduce_ring)
fit_alpha_beta = lesson.add(cost.fit_alpha_beta)
rounds_and_message = lesson.add(cost.rounds_and_message)
