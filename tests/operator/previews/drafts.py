"""Drafts, and the cluster that they are asked about: two nodes of eight cores, or of eight GPUs of a type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.operator.builders import (
    NOW,
    engine_of,
    job,
    pool,
    tenant,
)

from busbar.kube.types import AcceleratorPool, TrainingJob
from busbar.operator.previews.preview import (
    PreviewQuestion,
)
from busbar.operator.scheduling.snapshot import ClusterObjects, Draft, build
from busbar.operator.watch.projections import Node
from busbar.scheduler import (
    JobId,
    Placement,
    Policy,
    Resources,
    Run,
)

NODES = tuple(
    Node(f"node-{i}", (("busbar.dev/pool", "cpu"),), (), 8000, 65536, 100_000, (), True) for i in range(2)
)
TENANTS = (tenant("team", ["team"]), tenant("others", ["others"]))
POLICY = Policy(solver=False)


def asked(draft: Draft, *, full: bool = False, admin: bool = False, **fields: object) -> PreviewQuestion:
    pools = (pool("cpu"),)
    seen = ClusterObjects(pools=pools, nodes=nodes_of(), tenants=TENANTS)
    snapshot = build(seen, NOW, draft)
    if full:
        own = snapshot.jobs[0]
        held = [
            replace(
                own,
                id=JobId(f"theirs-{node.name}"),
                name=f"secret-{node.name}",
                namespace="others",
                tenant="others",
                preemptible=False,
                run=Run(
                    Placement("cpu", "cpu", "resident", (node.name,), Resources(8000, 8000, 60_000)), 0.0
                ),
            )
            for node in snapshot.nodes
        ]
        snapshot = replace(snapshot, jobs=(*snapshot.jobs, *held))
    question = PreviewQuestion(
        base=snapshot,
        drafts=(),
        policy=POLICY,
        now=NOW.timestamp(),
        key=draft.key,
        service=draft.kind == "ModelService",
        admin=admin,
    )
    return replace(question, **fields)  # type: ignore[arg-type]


def nodes_of() -> tuple[Node, ...]:
    [selector] = pool("cpu").spec.node_selector.items()
    return tuple(replace(node, labels=(selector,)) for node in NODES)


LARGE = {
    "model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "intermediate_size": 53248, "vocab_size": 128256,
}  # fmt: skip


def gpu_pool(kind: str) -> tuple[AcceleratorPool, Node]:
    made = pool(kind.lower(), accelerator=kind, resourceName="nvidia.com/gpu")
    [selector] = made.spec.node_selector.items()
    node = Node(f"n-{kind}", (selector,), (), 64_000, 512_000, 100_000, (("nvidia.com/gpu", 8),), True)
    return made, node


CONFIG = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 256, "vocab_size": 512,
}  # fmt: skip


def sized(name: str, width: int = 128, **spec: Any) -> TrainingJob:
    config = CONFIG | {"hidden_size": width}
    return job(name, engine=engine_of(config), **spec)
