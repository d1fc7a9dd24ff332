"""What is read from the API server: the watches, the caches, and the projections that the caches hold."""
