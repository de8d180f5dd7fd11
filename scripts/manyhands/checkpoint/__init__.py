"""Checkpoints: what a run is made of, on the disk and back, on any number of ranks."""
