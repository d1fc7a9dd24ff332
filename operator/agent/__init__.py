"""The node agent: says what the boards and processors of a node draw, and, where it may, limits the boards.

Two processes of their own, agent and guard. They import nothing of the operator and dial nobody but, on a unix socket, the
node's kubelet. `main.py` is the process, `meters.py` keeps the counters, `nvml.py`, `rapl.py` and `simulated.py` are the back
ends, `probing.py` chooses them, `pod_resources.py` asks the kubelet which pods hold which devices, `board_pods.py` finds the
boards among these, `leases.py` is what a node holds, `signing.py` says who may change that, `split.py` shares it out among
the boards, `limits.py` writes it, `server.py` is the port, `guard.py` lowers the boards when the agent is dead, and
`heartbeat.py` is how it knows.
"""
