"""How an engine sizes the pieces of prompts in its steps: what ours does, and what forecasts and simulations count with."""

CHUNK_STEP_FRACTION = 0.9
"""Part of the promised time per token that a step with a piece of a prompt may take: steps vary."""
MIN_CHUNK_TOKENS = 32
"""Prompt tokens of a step that even a promise under pressure leaves."""
