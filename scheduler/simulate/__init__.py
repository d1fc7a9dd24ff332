"""The trace-driven simulator: the same `plan` that runs in production, on a cluster that does not exist.

trace.py     what is replayed          readers.py   Gavel and Philly files
engine.py    discrete events           rounds.py    Gavel's rules, to check against published numbers
speeds.py    what the policy is told   learner.py   what it learns    past.py      who has used how much
metrics.py   numbers                   plots.py     pictures          command.py   `busbar simulate`
"""
