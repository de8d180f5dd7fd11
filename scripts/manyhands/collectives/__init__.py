"""Lesson 04: broadcast, reduce, gather, all-reduce from send and recv, and their cost."""
