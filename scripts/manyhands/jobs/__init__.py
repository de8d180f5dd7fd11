"""Jobs: submitted, watched, and run with a learner's own functions."""
