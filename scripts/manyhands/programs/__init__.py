"""Whole programs of lessons: a training with DDP, one that is killed, and an elastic one."""
