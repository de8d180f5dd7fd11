"""What is measured and drawn: messages, time, bytes that live, GPUs, figures."""
