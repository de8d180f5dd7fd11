"""Checks of lesson 14, each a Spec: the mesh, techniques combined on it, and how one plans."""

from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.mesh import choosing, clip, combined, fitting, grid, hsdp, numbers, seeds

lesson = Lesson("mesh")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep
give, compare = lesson.give, lesson.compare

coordinates = lesson.add(grid.places)
make_groups = lesson.add(grid.make_groups)
shard_and_cut = lesson.add(combined.shard_and_cut)
mesh_norm = lesson.add(clip.mesh_norm)
seed_of = lesson.add(seeds.seed_of)
spread_of_sum = lesson.add(numbers.spread_of_sum)
tokens_to_hide = lesson.add(numbers.tokens_to_hide)
largest_tensor_degree = lesson.add(numbers.largest_tensor_degree)
approach = lesson.add(choosing.approach)
smallest_tensor_degree = lesson.add(choosing.smallest_tensor_degree)
ranks_to_fit = lesson.add(fitting.ranks_to_fit)
hsdp_bytes = lesson.add(hsdp.hsdp_bytes)
