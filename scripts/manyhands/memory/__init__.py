"""Lesson 09: where the memory of training goes, and ways to need less of it."""
