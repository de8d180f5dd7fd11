"""Lesson 13: the matrices of a Transformer cut over ranks."""
