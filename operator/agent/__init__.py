"""The node agent: says what the boards and processors of a node draw. A process of its own; it limits nothing.

It imports nothing of the operator and dials nobody. `main.py` is the process, `meters.py` keeps the counters,
`nvml.py`, `rapl.py` and `simulated.py` are the back ends, `server.py` is its port.
"""
