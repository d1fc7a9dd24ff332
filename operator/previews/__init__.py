"""Previews of drafts: what the next round would do with them, and the worker process that computes it."""
