"""Lesson 07: what large batches cost, and every remedy for it."""
