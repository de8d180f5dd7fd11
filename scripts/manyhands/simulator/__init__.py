"""The simulator: what ranks do is recorded once, and played on a virtual clock with other links."""
