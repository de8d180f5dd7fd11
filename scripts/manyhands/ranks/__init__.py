"""Processes: what a rank knows of itself, real ranks from a notebook, and which failed first."""
