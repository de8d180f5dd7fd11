"""Lesson 01: a line fitted by gradient descent, with all samples or with batches."""
