"""REST: one module per group of routes, and the schemas of their requests and answers."""
