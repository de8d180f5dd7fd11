"""Lesson 02: cuts through the loss of real networks."""
