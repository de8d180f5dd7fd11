"""The planner: memory, time and price of a layout of a training, beside published runs."""
