"""A training run from start to report: progress, checkpoints, tasks, record and page."""
