"""Checks of lesson 13, each a Spec: the layers, the vocabulary, the sequence, the whole model."""

from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.tensor import dtensor, layers, model, sequence, vocabulary

lesson = Lesson("tensor")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

CopyToRanks = lesson.add(layers.regions)
ColumnLinear = lesson.add(layers.linear_layers)
cut_block = lesson.add(layers.cut_block)
VocabEmbedding = lesson.add(vocabulary.embedding)
vocab_cross_entropy = lesson.add(vocabulary.cross_entropy)
GatherSequence = lesson.add(sequence.positions_of_ranks)
sum_gradients = lesson.add(sequence.gradient_sums)
OwnRandom = lesson.add(sequence.own_random)
TensorParallel = lesson.add(model.tensor_parallel)
data_place = lesson.add(model.data_place)
calls_per_step = lesson.add(model.calls_per_step)
plan = lesson.add(dtensor.plan)
TensorSequenceParallel = lesson.add(model.tensor_sequence_parallel)
