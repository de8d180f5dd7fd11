"""Lesson 14: a mesh of ranks, techniques combined on it, and how a training is planned."""
