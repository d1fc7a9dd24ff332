"""When a waiting job would start: the queue simulated with lengths and submissions drawn from history."""
