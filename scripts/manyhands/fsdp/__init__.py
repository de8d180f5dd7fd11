"""Lesson 10: optimizer state, gradients and weights in shards, by hand and with fully_shard."""
