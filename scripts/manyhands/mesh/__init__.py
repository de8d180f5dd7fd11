"""Lesson 14: a mesh of ranks, and techniques combined on it."""
