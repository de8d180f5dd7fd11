"""Lesson 11: what a run is made of, asynchronous and elastic saves, and what survival costs."""
