"""Lesson 06: PyTorch's DistributedDataParallel in a real program, and what can go wrong there."""
