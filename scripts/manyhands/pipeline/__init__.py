"""Lesson 12: a model in stages, run by schedules that are data."""
