"""All ways to train one model on several ranks, measured side by side."""
