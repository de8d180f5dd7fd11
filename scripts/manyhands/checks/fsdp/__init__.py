"""Checks of lesson 10: vectors in shards, ZeRO, FSDP, and PyTorch's own."""

from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.fsdp import flat, fully_shard, units, zero

lesson = Lesson("fsdp")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

Flat = lesson.add(flat.flat)
ShardedOptimizer = lesson.add(zero.sharded_optimizer)
reduce_during_backward = lesson.add(zero.reduce_during_backward)
ShardedFlat = lesson.add(flat.sharded_flat)
FSDP = lesson.add(units.fsdp)
calls_per_step = lesson.add(fully_shard.calls_per_step)
torch_fsdp = lesson.add(fully_shard.torch_fsdp)
make_mesh = lesson.add(fully_shard.make_mesh)
options_of = lesson.add(fully_shard.options_of)
train_sharded = lesson.add(fully_shard.train_sharded)
