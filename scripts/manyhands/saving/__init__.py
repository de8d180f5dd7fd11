"""Saving: the state of a run in pieces on any store; needs torch and fsspec, and nothing else."""
