"""The trace-driven simulator: the same `plan` that runs in production, on a cluster that does not exist.

trace.py     what is replayed          readers.py   Gavel and Philly files
engine.py    discrete events           rounds.py    Gavel's rules, to check against published numbers
metrics.py   numbers                   plots.py     pictures          command.py   `busbar simulate`
"""
