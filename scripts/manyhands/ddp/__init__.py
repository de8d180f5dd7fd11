"""Lesson 06: PyTorch's DistributedDataParallel, and a mean over uneven ranks."""
