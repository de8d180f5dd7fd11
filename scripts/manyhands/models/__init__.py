"""What is trained: a small language model, and a small network for images."""
