"""What only GPUs can show, for `make gpu`: speed, memory, NCCL, and every job of the course."""
