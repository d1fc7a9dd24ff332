"""The trace-driven simulator: the same `plan` that runs in production, on a simulated cluster.

trace.py     what is replayed          readers.py   Gavel, Philly and openb files
scaling.py   Pollux and ElasticFlow: elastic jobs with measured speeds
engine.py    discrete events           rounds.py    Gavel's rules, to check against published numbers
speeds.py    what the policy sees      learner.py   what it learns    past.py      past use of tenants
metrics.py   numbers                   plots.py     pictures          command.py   `busbar simulate`
"""
