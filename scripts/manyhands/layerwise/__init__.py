"""Lesson 08: optimizers that give every layer a step length of its own, also over shards."""
