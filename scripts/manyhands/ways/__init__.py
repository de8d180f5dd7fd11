"""Ways to train one model, each assembled once: for jobs, comparisons, measurements and tests."""
