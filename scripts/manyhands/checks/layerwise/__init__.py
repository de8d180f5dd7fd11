"""Checks of lesson 08.

rates.py       the learning-rate range test
optimizers.py  LARS, LARC, LAMB and NovoGrad
steps.py       how these four are observed
norms.py       the norms of whole tensors of which every rank holds a part
"""

from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.layerwise import norms, optimizers, rates

lesson = Lesson("layerwise")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

range_test = lesson.add(rates.range_test)
LARS = lesson.add(optimizers.lars)
LARC = lesson.add(optimizers.larc)
LAMB = lesson.add(optimizers.lamb)
NovoGrad = lesson.add(optimizers.novograd)
shard_norms = lesson.add(norms.shard_norms)
