"""The scheduling round: the snapshot, the plan, and the decisions that each object receives."""
