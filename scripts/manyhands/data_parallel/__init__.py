"""Lesson 05: replicas that average their gradients, from a server to buckets."""
