"""One row for each cross-field rule of our kinds: a manifest that breaks only this rule, and its neighbour.

`change` and `neighbour` say what is different from the accepted manifest, as {path: value}; `...` removes the
field, and an empty change is the accepted manifest itself. A row with `before` is an update: the accepted manifest
with `before` is stored, and the change is applied to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.cluster import manifests as m
from tests.cluster.manifests import JSON

Change = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One rule (by the path of its model and its message), and the two manifests."""

    base: Callable[[], JSON]
    at: str
    says: str
    change: Change
    neighbour: Change = field(default_factory=dict)
    before: Change | None = None
    blames: str = ""
    """The field that the refusal names; default `at` without its brackets."""

    @property
    def kind(self) -> str:
        return str(self.base()["kind"])

    @property
    def is_not_built(self) -> bool:
        """Whether the rule refuses a field whatever its value."""
        return self.says.endswith(" yet")

    @property
    def id(self) -> str:
        return f"{self.kind} {self.at or 'name'}: {self.says}"

    def stored(self) -> JSON:
        """The stored manifest before an update, as changes of the accepted one."""
        return edited(self.base(), self.before or {})

    def bad(self) -> JSON:
        return edited(self.stored(), self.change)

    def good(self) -> JSON:
        return edited(self.stored(), self.neighbour)


def edited(document: JSON, change: Change) -> JSON:
    """A copy with these paths set or removed; a step in digits is an item of a list."""
    copied = copy.deepcopy(document)
    for path, value in change.items():
        steps: list[Any] = [int(step) if step.isdigit() else step for step in path.split("/")]
        node: Any = copied
        for step in steps[:-1]:
            node = node[step]
        if value is ...:
            del node[steps[-1]]
        else:
            node[steps[-1]] = value
    return copied


SUSPENDED: Change = {"spec/suspend": True}
RUNNING: Change = {}
DATA: dict[str, Any] = {"uri": "pvc://rows/a.jsonl"}
FAST: Change = {"spec/engine/parallelism": {"order": "fast"}}
ZEROTH_ORDER: Change = {
    "spec/engine/optimizer/name": "ZerothOrder",
    "spec/engine/activations": "auto",
    "spec/engine/mode": "auto",
    "spec/engine/parallelism": {"order": "fast"},
}
SHARED: Change = {"spec/engine/parallelism": {"sequence": 2}}
FIXED = "cannot change after creation"
WHILE_SUSPENDED = "can change only while spec.suspend is true"


def pods(least: int, most: int | None = None) -> Change:
    return {"spec/shape": {"minPods": least, "maxPods": most or least}}


def several(processes: int, accelerators: int = 0, pods: int = 1, order: str = "fast") -> Change:
    """Pods of several processes; of as many accelerators unless said."""
    shape = {"minPods": pods, "maxPods": pods, "acceleratorsPerPod": accelerators or processes}
    return {"spec/shape": shape, "spec/engine/parallelism": {"order": order, "processesPerPod": processes}}


TRAINING = (
    Row(
        m.template_job,
        "",
        "at most 46 lower-case letters",
        {"metadata/name": "a" * 47},
        {"metadata/name": "a" * 46},
        blames="metadata.name",
    ),
    Row(
        m.template_job,
        "spec",
        "exactly one of engine and template",
        {"spec/template": ...},
    ),
    Row(m.engine_job, "spec", "needs spec.output.uri", {"spec/output": ...}),
    Row(
        m.engine_job,
        "spec",
        "each process of spec.engine, or each group of",
        {"spec/shape": {"maxPods": 5}, "spec/engine/batch": {"sequences": 8, "microBatch": 2}, **FAST},
        {"spec/shape": {"maxPods": 4}, "spec/engine/batch": {"sequences": 8, "microBatch": 2}, **FAST},
        blames="spec.shape",
    ),
    Row(
        m.engine_job,
        "spec",
        "order: fixed needs 1, 2, 4 or 8 processes",
        {"spec/shape": {"minPods": 1, "maxPods": 2}, "spec/engine/parallelism": {"order": "fixed"}},
        {"spec/shape": {"minPods": 2, "maxPods": 2}, "spec/engine/parallelism": {"order": "fixed"}},
        blames="spec.shape",
    ),
    Row(
        m.engine_job,
        "spec",
        "order: fixed needs 1, 2, 4 or 8 processes",
        {"spec/shape": {"minPods": 3, "maxPods": 3}, "spec/engine/parallelism": {"order": "fixed"}},
        {"spec/shape": {"minPods": 3, "maxPods": 3}, "spec/engine/parallelism": {"order": "fast"}},
        blames="spec.shape",
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "an adapter needs model.uri",
        {"spec/engine/adapter": {"rank": 8}, "spec/engine/freeze": ...},
        {
            "spec/engine/adapter": {"rank": 8},
            "spec/engine/freeze": ...,
            "spec/engine/model": {"uri": "pvc://base/model"},
        },
    ),
    Row(
        m.engine_job_with_adapters,
        "spec.engine",
        "adapters need model.uri",
        {"spec/engine/model": {"config": {"model_type": "llama"}}},
        {"spec/engine/model": {"config": {"model_type": "llama"}}, "spec/engine/adapters": ...},
    ),
    Row(
        m.engine_job_with_adapters,
        "spec.engine",
        "adapter is one, and adapters are several",
        {"spec/engine/adapter": {"rank": 8}},
        {"spec/engine/adapter": {"rank": 8}, "spec/engine/adapters": ...},
    ),
    Row(
        m.engine_job_with_adapters,
        "spec.engine",
        "remove freeze, or adapter",
        {"spec/engine/freeze": ["lm_head.*"]},
        {"spec/engine/freeze": ["lm_head.*"], "spec/engine/adapters": ...},
    ),
    Row(
        m.engine_job_with_adapters,
        "spec.engine",
        "an adapter's optimizer.warmupSteps must not exceed its steps",
        {"spec/engine/adapters": [{"name": "a", "steps": 2, "optimizer": {"warmupSteps": 3}}]},
        {"spec/engine/adapters": [{"name": "a", "steps": 3, "optimizer": {"warmupSteps": 3}}]},
        blames="spec.engine.adapters",
    ),
    Row(
        m.engine_job_with_adapters,
        "spec.engine.adapters[].batch",
        "must be a multiple of microBatch",
        {"spec/engine/adapters": [{"name": "a", "batch": {"sequences": 8, "microBatch": 3}}]},
        {"spec/engine/adapters": [{"name": "a", "batch": {"sequences": 9, "microBatch": 3}}]},
        blames="spec.engine.adapters[0].batch",
    ),
    Row(
        m.engine_job_with_adapters,
        "spec.engine.adapters[].data",
        "data.fields are of rows",
        {
            "spec/engine/adapters": [
                {"name": "a", "data": {**DATA, "format": "text", "fields": {"text": "t"}}}
            ]
        },
        {
            "spec/engine/adapters": [
                {"name": "a", "data": {**DATA, "format": "jsonl", "fields": {"text": "t"}}}
            ]
        },
        blames="spec.engine.adapters[0].data",
    ),
    Row(
        m.engine_job_with_adapters,
        "spec.engine.adapters[].data",
        "plain text has no conversations",
        {"spec/engine/adapters": [{"name": "a", "data": {**DATA, "format": "text", "chatTemplate": "x"}}]},
        {"spec/engine/adapters": [{"name": "a", "data": {**DATA, "format": "jsonl", "chatTemplate": "x"}}]},
        blames="spec.engine.adapters[0].data",
    ),
    Row(
        m.engine_job_with_adapters,
        "spec.engine.adapters[].data",
        "data.fields does not name messages",
        {
            "spec/engine/adapters": [
                {"name": "a", "data": {**DATA, "fields": {"text": "t"}, "chatTemplate": "x"}}
            ]
        },
        {
            "spec/engine/adapters": [
                {"name": "a", "data": {**DATA, "fields": {"messages": "t"}, "chatTemplate": "x"}}
            ]
        },
        blames="spec.engine.adapters[0].data",
    ),
    Row(
        m.engine_job_with_adapters,
        "spec.engine.adapters[].data.fields",
        "at least one of text, completion and messages",
        {"spec/engine/adapters": [{"name": "a", "data": {**DATA, "fields": {}}}]},
        {"spec/engine/adapters": [{"name": "a", "data": {**DATA, "fields": {"text": "t"}}}]},
        blames="spec.engine.adapters[0].data.fields",
    ),
    Row(
        m.engine_job_with_adapters,
        "spec.engine.adapters[].data.fields",
        "prompt and completion are named together",
        {"spec/engine/adapters": [{"name": "a", "data": {**DATA, "fields": {"text": "t", "prompt": "p"}}}]},
        {"spec/engine/adapters": [{"name": "a", "data": {**DATA, "fields": {"text": "t"}}}]},
        blames="spec.engine.adapters[0].data.fields",
    ),
    Row(
        m.engine_job_with_adapters,
        "spec",
        "engine.adapters are trained in one process",
        {"spec/shape": {"maxPods": 2}, **FAST},
        {"spec/shape": {"maxPods": 2}, "spec/engine/adapters": ..., **FAST},
        blames="spec.engine.adapters",
    ),
    Row(
        m.engine_job_with_adapters,
        "spec",
        "engine.adapters are trained in one process",
        {"spec/checkpoint": {"memory": {"everySteps": 2}}},
        {"spec/checkpoint": {"everySteps": 2}},
        blames="spec.engine.adapters",
    ),
    Row(
        m.engine_job_from_weights,
        "spec.engine",
        "remove freeze, or adapter",
        {"spec/engine/freeze": ["lm_head.*"]},
        {"spec/engine/freeze": ["lm_head.*"], "spec/engine/adapter": ...},
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "with optimizer.betas[1] of at most 0.99",
        {"spec/engine/state": "int8", "spec/engine/optimizer/betas": [0.9, 0.999]},
        {"spec/engine/state": "int8", "spec/engine/optimizer/betas": [0.9, 0.99]},
        blames="spec.engine.state",
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "state: bf16 and int8 are of AdamW's moments",
        {
            "spec/engine/state": "bf16",
            "spec/engine/optimizer/name": "ZerothOrder",
            "spec/engine/activations": "auto",
            "spec/engine/mode": "auto",
            **FAST,
        },
        {"spec/engine/state": "bf16", **FAST},
        blames="spec.engine.state",
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "mode: parameter-offload recomputes activations",
        {"spec/engine/mode": "parameter-offload", "spec/engine/activations": "keep", **FAST},
        {"spec/engine/mode": "parameter-offload", "spec/engine/activations": "swap", **FAST},
    ),
    Row(
        m.engine_job,
        "spec",
        "mode: parameter-offload runs in one process",
        {"spec/engine/mode": "parameter-offload", "spec/shape": {"maxPods": 2}, **FAST},
        {"spec/engine/mode": "parameter-offload", "spec/shape": {"maxPods": 1}, **FAST},
    ),
    Row(
        m.engine_job,
        "spec",
        "mode: parameter-offload runs in one process",
        {"spec/engine/mode": "parameter-offload", "spec/engine/parallelism": {"order": "fixed"}},
        {"spec/engine/mode": "parameter-offload", **FAST},
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "ZerothOrder has no gradients to add up",
        {**ZEROTH_ORDER, "spec/engine/gradientSums": "float32"},
        {**ZEROTH_ORDER, "spec/engine/gradientSums": "weights"},
        blames="spec.engine.gradientSums",
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "optimizer.name: ZerothOrder has no state that could move",
        {"spec/engine/optimizer/name": "ZerothOrder", "spec/engine/activations": "auto", **FAST},
        {
            "spec/engine/optimizer/name": "ZerothOrder",
            "spec/engine/activations": "auto",
            "spec/engine/mode": "parameter-offload",
            **FAST,
        },
        blames="spec.engine.optimizer.name",
    ),
    Row(
        m.engine_job,
        "spec",
        "optimizer.name: ZerothOrder runs in one process",
        {
            "spec/engine/optimizer/name": "ZerothOrder",
            "spec/engine/activations": "auto",
            "spec/engine/mode": "auto",
        },
        {
            "spec/engine/optimizer/name": "ZerothOrder",
            "spec/engine/activations": "auto",
            "spec/engine/mode": "auto",
            **FAST,
        },
    ),
    Row(
        m.engine_job_from_weights,
        "spec.engine",
        "scratchDisk takes state of mode parameter-offload only",
        {"spec/engine/mode": "resident", **FAST},
        {"spec/engine/mode": "parameter-offload", **FAST},
        blames="spec.engine.scratchDisk",
    ),
    Row(
        m.engine_job_from_weights,
        "spec",
        "engine.scratchDisk runs in one process",
        {"spec/shape": {"maxPods": 2}, "spec/checkpoint": {}},
        {"spec/shape": {"maxPods": 2}, "spec/checkpoint": {}, "spec/engine/scratchDisk": ...},
    ),
    Row(
        m.engine_job_from_weights,
        "spec",
        "engine.scratchDisk runs in one process",
        {"spec/engine/parallelism": {"order": "fixed"}},
        {"spec/engine/parallelism": {"order": "fixed"}, "spec/engine/scratchDisk": ...},
    ),
    Row(
        m.engine_job,
        "spec.engine.parallelism",
        "processes that share sequences add up in the order fast",
        {**pods(2), "spec/engine/parallelism": {"order": "fixed", "sequence": 2}},
        {**pods(2), "spec/engine/parallelism": {"order": "fast", "sequence": 2}},
    ),
    Row(
        m.engine_job,
        "spec",
        "parallelism.sequence divides the processes",
        {**pods(1, 2), **SHARED},
        {**pods(2), **SHARED},
        blames="spec.shape",
    ),
    Row(
        m.engine_job,
        "spec",
        "parallelism.sequence divides the processes",
        {**pods(3), **SHARED},
        {**pods(4), **SHARED},
        blames="spec.shape",
    ),
    Row(
        m.engine_job,
        "spec",
        "and a length that it divides",
        {**pods(2), **SHARED, "spec/engine/data/sequenceLength": 1023},
        {**pods(2), **SHARED, "spec/engine/data/sequenceLength": 1024},
        blames="spec.shape",
    ),
    Row(
        m.engine_job,
        "spec",
        "each group of parallelism.sequence processes, needs a micro-batch of its own",
        {**pods(2), "spec/engine/batch": {"sequences": 1, "microBatch": 1}, **FAST},
        {**pods(2), "spec/engine/batch": {"sequences": 1, "microBatch": 1}, **SHARED},
        blames="spec.shape",
    ),
    Row(
        m.engine_job,
        "spec",
        "parallelism.sharding divides the model among several processes",
        {"spec/shape": {"maxPods": 1}, "spec/engine/parallelism": {"sharding": "gradients"}},
        {"spec/shape": {"maxPods": 2}, "spec/engine/parallelism": {"sharding": "gradients"}},
        blames="spec.shape",
    ),
    Row(
        m.engine_job,
        "spec",
        "each process of a pod needs an accelerator",
        several(2, accelerators=1),
        several(2),
        blames="spec.shape.acceleratorsPerPod",
    ),
    Row(
        m.engine_job,
        "spec",
        "each process of spec.engine, or each group of",
        {**several(2, pods=3), "spec/engine/batch": {"sequences": 8, "microBatch": 2}},
        {**several(2, pods=2), "spec/engine/batch": {"sequences": 8, "microBatch": 2}},
        blames="spec.shape",
    ),
    Row(
        m.engine_job,
        "spec",
        "order: fixed needs 1, 2, 4 or 8 processes",
        several(3, order="fixed"),
        several(2, order="fixed"),
        blames="spec.shape",
    ),
    Row(
        m.engine_job,
        "spec",
        "mode: parameter-offload runs in one process; set shape.maxPods: 1 and remove parallelism",
        {**several(2), "spec/engine/mode": "parameter-offload"},
        {"spec/engine/parallelism": ..., "spec/engine/mode": "parameter-offload"},
    ),
    Row(
        m.engine_job,
        "spec",
        "of so many pods the others cannot rebuild the parts",
        {**several(8, pods=33), "spec/checkpoint": {"memory": {"everySteps": 2}}},
        {**several(8, pods=32), "spec/checkpoint": {"memory": {"everySteps": 2}}},
        blames="spec.checkpoint.memory.parity",
    ),
    Row(
        m.engine_job_from_weights,
        "spec.engine.data",
        "plain text has none",
        {"spec/engine/data/format": "text", "spec/engine/data/chatTemplate": ...},
        {
            "spec/engine/data/format": "text",
            "spec/engine/data/chatTemplate": ...,
            "spec/engine/data/fields": ...,
        },
    ),
    Row(
        m.engine_job_from_weights,
        "spec.engine.data",
        "plain text has no conversations",
        {"spec/engine/data/format": "text", "spec/engine/data/fields": ...},
        {"spec/engine/data/fields": ...},
    ),
    Row(
        m.engine_job_from_weights,
        "spec.engine.data",
        "data.fields does not name messages",
        {"spec/engine/data/fields": {"text": "body"}},
        {"spec/engine/data/fields": {"messages": "turns"}},
    ),
    Row(
        m.engine_job_from_weights,
        "spec.engine.data.fields",
        "at least one of text, completion and messages",
        {"spec/engine/data/fields": {}, "spec/engine/data/chatTemplate": ...},
        {"spec/engine/data/fields": {"messages": "turns"}},
    ),
    Row(
        m.engine_job_from_weights,
        "spec.engine.data.fields",
        "named together",
        {"spec/engine/data/fields/prompt": ...},
        {"spec/engine/data/fields": {"prompt": "q", "completion": "a", "messages": "turns"}},
    ),
    Row(
        m.template_job,
        "spec",
        "nothing knows how long an own image runs",
        {"spec/deadline": "2030-01-01T00:00:00Z"},
        blames="spec.deadline",
    ),
    Row(m.engine_job, "spec", f"spec.engine {FIXED}", {"spec/engine/seed": 1}, {}, RUNNING),
    Row(m.template_job, "spec", f"spec.template {FIXED}", {"spec/template/image": "other"}, {}, RUNNING),
    Row(
        m.template_job, "spec", f"spec.output {FIXED}", {"spec/output": ...}, {"spec/retryLimit": 5}, RUNNING
    ),
    Row(
        m.engine_job,
        "spec",
        f"spec.checkpoint {FIXED}",
        {"spec/checkpoint/keep": 3},
        {"spec/priority": 7},
        RUNNING,
    ),
    Row(
        m.engine_job,
        "spec",
        f"spec.preemption {FIXED}",
        {"spec/preemption/gracePeriodSeconds": 61},
        {"spec/ttlSecondsAfterFinished": 1},
        RUNNING,
    ),
    Row(m.engine_job, "spec", f"spec.managedBy {FIXED}", {"spec/managedBy": ...}, SUSPENDED, RUNNING),
    Row(
        m.template_job,
        "spec",
        f"spec.shape {WHILE_SUSPENDED}",
        {"spec/shape/minPods": 2},
        {"spec/suspend": True},
        RUNNING,
    ),
    Row(
        m.engine_job,
        "spec",
        f"spec.accelerators {WHILE_SUSPENDED}",
        {"spec/accelerators": ["H100"]},
        {"spec/suspend": True},
        RUNNING,
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "has no tokenizer of its own",
        {"spec/engine/tokenizer": ...},
        {"spec/engine/tokenizer": ..., "spec/engine/model": {"uri": "pvc://base/model"}},
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "warmupSteps must not be greater than steps",
        {"spec/engine/steps": 10, "spec/engine/optimizer/warmupSteps": 11},
        {"spec/engine/steps": 10, "spec/engine/optimizer/warmupSteps": 10},
    ),
    Row(
        m.engine_job,
        "spec.engine.model",
        "exactly one of config and uri",
        {"spec/engine/model/uri": "pvc://base/model"},
    ),
    Row(
        m.engine_job,
        "spec.engine.tokenizer",
        "exactly one of train and uri",
        {"spec/engine/tokenizer/uri": "pvc://base/model"},
    ),
    Row(
        m.engine_job,
        "spec.engine.batch",
        "must be a multiple of microBatch",
        {"spec/engine/batch": {"sequences": 8, "microBatch": 3}},
        {"spec/engine/batch": {"sequences": 9, "microBatch": 3}},
    ),
    Row(
        m.template_job,
        "spec.template.env[]",
        "value or valueFrom, not both",
        {"spec/template/env/1/value": "x"},
        blames="spec.template.env[1]",
    ),
    Row(
        m.template_job,
        "spec.template.env[]",
        "are set by Busbar; choose another name",
        {"spec/template/env/0/name": "WORLD_SIZE"},
        {"spec/template/env/0/name": "MY_WORLD_SIZE"},
        blames="spec.template.env[0].name",
    ),
    Row(
        m.template_job,
        "spec.template.env[].valueFrom",
        "exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        {"spec/template/env/1/valueFrom": {}},
        blames="spec.template.env[1].valueFrom",
    ),
    Row(
        m.template_job,
        "spec.template.envFrom[]",
        "exactly one of secretRef and configMapRef",
        {"spec/template/envFrom/0/configMapRef": {"name": "c"}},
        blames="spec.template.envFrom[0]",
    ),
    Row(
        m.template_job,
        "spec.template.volumes[]",
        "exactly one of claim, configMap, secret and emptyDir",
        {"spec/template/volumes/0/emptyDir": {}},
        blames="spec.template.volumes[0]",
    ),
    Row(
        m.template_job,
        "spec.template.volumes[]",
        "belongs to the platform or the system",
        {"spec/template/volumes/0/mountPath": "/artifacts/other"},
        {"spec/template/volumes/0/mountPath": "/my/artifacts"},
        blames="spec.template.volumes[0].mountPath",
    ),
    *(
        Row(
            m.template_job,
            "spec.template.volumes[]",
            "belongs to the platform or the system",
            {"spec/template/volumes/0/mountPath": reserved},
            {"spec/template/volumes/0/mountPath": allowed},
            blames="spec.template.volumes[0].mountPath",
        )
        for reserved, allowed in (
            ("/run", "/running"),
            ("/run/secrets", "/my/run/secrets"),
            ("/run/secrets/busbar", "/srv/secrets/busbar"),
            ("/var/run", "/var/data"),
            ("/var/run/secrets", "/var/running/secrets"),
        )
    ),
    Row(
        m.template_job,
        "spec.template.volumes[]",
        "begin with busbar- are the platform's",
        {"spec/template/volumes/0/name": "busbar-tmp"},
        {"spec/template/volumes/0/name": "my-busbar-tmp"},
        blames="spec.template.volumes[0].name",
    ),
    Row(
        m.template_job,
        "spec.template.metadata",
        "labels under busbar.dev, kubernetes.io and k8s.io are the platform's",
        {"spec/template/metadata/labels": {"busbar.dev/job": "another"}},
        {"spec/template/metadata/labels": {"notbusbar.dev/job": "another"}},
        blames="spec.template.metadata.labels",
    ),
    Row(
        m.template_job,
        "spec.template.metadata",
        "annotations under busbar.dev, kubernetes.io and k8s.io are the platform's",
        {"spec/template/metadata/annotations": {"container.apparmor.security.beta.kubernetes.io/main": "x"}},
        {"spec/template/metadata/annotations": {"kwok.x-k8s.io/duration": "10s"}},
        blames="spec.template.metadata.annotations",
    ),
    Row(
        m.template_job,
        "spec.template.metadata.labels",
        "every key must have at most 316 characters",
        {"spec/template/metadata/labels": {"not a key": "x"}},
        {"spec/template/metadata/labels": {"a-key": "x"}},
    ),
    Row(
        m.template_job,
        "spec.template.metadata.annotations",
        "every key must have at most 316 characters",
        {"spec/template/metadata/annotations": {"not a key": "x"}},
        {"spec/template/metadata/annotations": {"a-key": "x"}},
    ),
    Row(
        m.template_job,
        "spec.shape",
        "minPods must not be greater than maxPods",
        {"spec/shape/minPods": 5, "spec/shape/maxPods": 4},
        {"spec/shape/minPods": 4, "spec/shape/maxPods": 4},
    ),
    Row(
        m.engine_job,
        "spec.checkpoint",
        "everySteps or everySeconds, not both",
        {"spec/checkpoint/everySeconds": 60},
        {"spec/checkpoint": {"everySeconds": 60}},
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "nor lengthWarmup.start than data.sequenceLength",
        {"spec/engine/lengthWarmup": {"start": 257, "steps": 10}, "spec/engine/data/sequenceLength": 256},
        {"spec/engine/lengthWarmup": {"start": 256, "steps": 10}, "spec/engine/data/sequenceLength": 256},
        blames="spec.engine.lengthWarmup",
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "lengthWarmup.steps must not be greater than steps",
        {"spec/engine/lengthWarmup": {"start": 8, "steps": 11}, "spec/engine/steps": 10},
        {"spec/engine/lengthWarmup": {"start": 8, "steps": 10}, "spec/engine/steps": 10},
        blames="spec.engine.lengthWarmup",
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "processes that share sequences have parts of one length",
        {**pods(2), **SHARED, "spec/engine/lengthWarmup": {"start": 8, "steps": 10}},
        {**pods(2), **FAST, "spec/engine/lengthWarmup": {"start": 8, "steps": 10}},
        blames="spec.engine.lengthWarmup",
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "layerDrop does not go with processes that share sequences",
        {**pods(2), **SHARED, "spec/engine/layerDrop": {}},
        {**pods(2), **FAST, "spec/engine/layerDrop": {}},
        blames="spec.engine.layerDrop",
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "layerDrop does not go with processes that share sequences or divide weights",
        {**pods(2), "spec/engine/parallelism": {"sharding": "parameters"}, "spec/engine/layerDrop": {}},
        {**pods(2), "spec/engine/parallelism": {"sharding": "gradients"}, "spec/engine/layerDrop": {}},
        blames="spec.engine.layerDrop",
    ),
    Row(
        m.engine_job_from_weights,
        "spec.engine",
        "layerDrop trains the blocks of a model, and an adapter leaves them as they are",
        {"spec/engine/layerDrop": {}},
        {"spec/engine/layerDrop": {}, "spec/engine/adapter": ...},
        blames="spec.engine.layerDrop",
    ),
    Row(
        m.engine_job,
        "spec.engine",
        "ZerothOrder compares losses of whole models",
        {**ZEROTH_ORDER, "spec/engine/layerDrop": {}},
        {"spec/engine/layerDrop": {}},
        blames="spec.engine.layerDrop",
    ),
    Row(
        m.template_job,
        "spec",
        "checkpoint.memory is for jobs with spec.engine",
        {"spec/checkpoint": {"memory": {}}},
        {},
        blames="spec.checkpoint",
    ),
    Row(
        m.engine_job,
        "spec",
        "parity has to be less than shape.minPods, and of more than 256 processes at most one may be lost at once",
        {"spec/checkpoint": {"memory": {"parity": 2}}, "spec/shape": {"minPods": 2, "maxPods": 4}, **FAST},
        {"spec/checkpoint": {"memory": {"parity": 2}}, "spec/shape": {"minPods": 3, "maxPods": 4}, **FAST},
        blames="spec.checkpoint.memory.parity",
    ),
    Row(
        m.engine_job,
        "spec",
        "parity has to be less than shape.minPods, and of more than 256 processes at most one may be lost at once",
        {"spec/checkpoint": {"memory": {"parity": 2}}, "spec/shape": {"minPods": 4, "maxPods": 257}, **FAST},
        {"spec/checkpoint": {"memory": {"parity": 1}}, "spec/shape": {"minPods": 4, "maxPods": 257}, **FAST},
        blames="spec.checkpoint.memory.parity",
    ),
)

_SERVICE_FIELDS: tuple[tuple[str, Change], ...] = (
    ("model", {"spec/model": {"trainingJob": "other"}}),
    ("image", {"spec/image": "other"}),
    ("args", {"spec/args": ...}),
    ("shape", {"spec/shape/memory": "3Gi"}),
    ("accelerators", {"spec/accelerators": ["L4"]}),
    ("maxModelLen", {"spec/maxModelLen": 512}),
    ("kvCacheMemory", {"spec/kvCacheMemory": ...}),
)
OTHER_ADAPTER: Change = {"spec/adapters": [{"name": "support", "uri": "pvc://stdlib/other"}]}


def _shared(**guest: Any) -> JSON:
    return {"tenants": [{"name": "guest", **guest}, {"name": "research", "maxKv": 0.5}]}


BUILTIN: Change = {"spec/image": ..., "spec/engine": "builtin"}
SERVICE = (
    Row(
        m.model_service,
        "spec.access.tenants[]",
        "guaranteedKv must not be greater than maxKv",
        {"spec/access": {"tenants": [{"name": "guest", "guaranteedKv": 0.5, "maxKv": 0.25}]}, **BUILTIN},
        {"spec/access": {"tenants": [{"name": "guest", "guaranteedKv": 0.25, "maxKv": 0.25}]}, **BUILTIN},
        blames="spec.access.tenants[0]",
    ),
    Row(
        m.model_service,
        "spec.access",
        "the guaranteedKv of all tenants together must not be greater than 1",
        {
            "spec/access": {"tenants": [{"name": f"guest{n}", "guaranteedKv": 0.11} for n in range(10)]},
            **BUILTIN,
        },
        {
            "spec/access": {"tenants": [{"name": f"guest{n}", "guaranteedKv": 0.1} for n in range(10)]},
            **BUILTIN,
        },
    ),
    Row(
        m.model_service,
        "spec",
        "guaranteedKv and maxKv of spec.access are kept by the builtin engine alone",
        {"spec/access": {"tenants": [{"name": "guest", "maxKv": 0.5}]}},
        {"spec/access": {"tenants": [{"name": "guest", "maxKv": 0.5}]}, **BUILTIN},
    ),
    Row(
        m.model_service,
        "",
        "at most 46 lower-case letters",
        {"metadata/name": "1service"},
        {"metadata/name": "service1"},
        blames="metadata.name",
    ),
    Row(
        m.model_service,
        "spec.slo",
        "ttftMilliseconds needs tpotMilliseconds beside it",
        {"spec/slo": {"ttftMilliseconds": 500}, **BUILTIN},
        {"spec/slo": {"ttftMilliseconds": 500, "tpotMilliseconds": 50}, **BUILTIN},
    ),
    Row(
        m.model_service,
        "spec.slo",
        "percentile needs ttftMilliseconds and tpotMilliseconds",
        {"spec/slo": {"percentile": 99, "tpotMilliseconds": 50}, **BUILTIN},
        {"spec/slo": {"percentile": 99, "ttftMilliseconds": 500, "tpotMilliseconds": 50}, **BUILTIN},
    ),
    Row(
        m.model_service,
        "spec",
        "slo of engine vllm needs ttftMilliseconds",
        {"spec/slo": {"tpotMilliseconds": 50}},
        {"spec/slo": {"ttftMilliseconds": 500, "tpotMilliseconds": 50}},
    ),
    Row(
        m.model_service,
        "spec",
        "engine vllm needs spec.image",
        {"spec/image": ...},
        {"spec/image": ..., "spec/engine": "builtin"},
    ),
    Row(
        m.model_service,
        "spec",
        "--api-key and --config of engine vllm are set by Busbar",
        {"spec/args": ["--api_key=mine"]},
        {"spec/args": ["--api-server-count=2", "--config-format", "hf"]},
        blames="spec",
    ),
    Row(
        m.model_service,
        "spec",
        "minReplicas must not be greater than maxReplicas",
        {"spec/minReplicas": 3, "spec/maxReplicas": 2},
        {"spec/minReplicas": 2, "spec/maxReplicas": 2},
    ),
    Row(
        m.model_service,
        "spec",
        "scaling.warm.replicas must not be greater than maxReplicas",
        {"spec/scaling/warm/replicas": 3, "spec/maxReplicas": 2},
        {"spec/scaling/warm/replicas": 2, "spec/maxReplicas": 2},
    ),
    Row(
        m.model_service,
        "spec",
        "scaling.warm.replicas must not be greater than maxReplicas",
        {"spec/scaling/warm/replicas": 3, "spec/minReplicas": 2, "spec/maxReplicas": ...},
        {"spec/scaling/warm/replicas": 2, "spec/minReplicas": 2, "spec/maxReplicas": ...},
    ),
    Row(
        m.model_service_from_weights,
        "spec",
        "replicas and scaling.external each decide the number of replicas; give one of them",
        {"spec/replicas": 1},
        {"spec/replicas": 1, "spec/scaling/external": ...},
    ),
    Row(
        m.model_service_from_weights,
        "spec.scaling.external",
        "every key must have at most 63 characters and match",
        {"spec/scaling/external": {"L4": 1}},
        {"spec/scaling/external": {"l4": 1}},
    ),
    Row(
        m.model_service_from_weights,
        "spec",
        "scaling.maxCostPerHour needs slo.ttftMilliseconds and slo.tpotMilliseconds",
        {"spec/slo": {"tpotMilliseconds": 50}},
        {"spec/slo": {"tpotMilliseconds": 50}, "spec/scaling/maxCostPerHour": ...},
    ),
    Row(
        m.model_service_in_zones,
        "spec",
        "scaling.minZones needs slo.ttftMilliseconds and slo.tpotMilliseconds",
        {"spec/slo": {"tpotMilliseconds": 50}},
        {"spec/slo": {"tpotMilliseconds": 50}, "spec/scaling/minZones": ...},
    ),
    Row(
        m.model_service_in_zones,
        "spec",
        "scaling.minZones must not be greater than minReplicas: each zone needs a replica",
        {"spec/minReplicas": 1},
        {"spec/minReplicas": 2},
    ),
    Row(
        m.model_service_with_roles,
        "spec",
        "prefillReplicas needs spec.replicas above it",
        {"spec/replicas": 1},
        {"spec/replicas": 2},
    ),
    Row(
        m.model_service_in_zones,
        "spec",
        "prefillReplicas and scaling.minZones are not built together",
        {"spec/replicas": 3, "spec/prefillReplicas": 1},
        {"spec/replicas": 3, "spec/prefillReplicas": 1, "spec/scaling/minZones": ...},
    ),
    Row(
        m.model_service,
        "spec",
        "prefillReplicas is for the builtin engine",
        {"spec/prefillReplicas": 1, "spec/replicas": 2},
        {"spec/replicas": 2},
    ),
    Row(
        m.model_service_with_roles,
        "spec",
        f"spec.prefillReplicas {WHILE_SUSPENDED}",
        {"spec/prefillReplicas": 2},
        {"spec/replicas": 4},
        RUNNING,
    ),
    Row(
        m.model_service_in_zones,
        "spec",
        "scaling.external chooses the pools, and with them the zones; leave scaling.minZones out",
        {"spec/scaling/external": {"l4": 2}},
        {"spec/scaling/external": {"l4": 2}, "spec/scaling/minZones": ...},
    ),
    Row(
        m.model_service,
        "spec",
        "Busbar does not use the sleep mode of engine vllm; set scaling.warm.level to loaded",
        {"spec/scaling/warm/level": "sleeping"},
        {"spec/scaling/warm/level": "loaded"},
    ),
    Row(
        m.model_service,
        "spec",
        f"spec.engine {FIXED}",
        {"spec/engine": "builtin"},
        {"spec/replicas": ...},
        RUNNING,
    ),
    Row(
        m.model_service,
        "spec",
        f"spec.modelId {FIXED}",
        {"spec/modelId": "other"},
        {"spec/minReplicas": 0},
        SUSPENDED,
    ),
    *(
        Row(
            m.model_service,
            "spec",
            f"spec.{name} {WHILE_SUSPENDED}",
            change,
            {"spec/maxReplicas": 3},
            RUNNING,
        )
        for name, change in _SERVICE_FIELDS
    ),
    Row(
        m.model_service,
        "spec",
        f"spec.adapters of engine vllm {WHILE_SUSPENDED}",
        OTHER_ADAPTER,
        before=RUNNING,
    ),
    *(
        Row(m.model_service_of_sglang, "spec", says, bad, good, blames="spec")
        for says, bad, good in (
            ("engine sglang needs spec.image", {"spec/image": ...}, BUILTIN),
            (
                "slo of engine sglang needs ttftMilliseconds",
                {"spec/slo": {"tpotMilliseconds": 50}},
                {"spec/slo": {"tpotMilliseconds": 50}, **BUILTIN},
            ),
            (
                "--api-key and --config of engine sglang are set by Busbar",
                {"spec/args": ["--api-key", "mine"]},
                {"spec/args": ["--context-length=4096", "--attention-backend", "triton"]},
            ),
            (
                "--api-key and --config of engine sglang are set by Busbar",
                {"spec/args": ["--config=/own.yaml"]},
                {"spec/args": ["--constrained-json-disable-any-whitespace"]},
            ),
            (
                "Busbar does not use the sleep mode of engine sglang; set scaling.warm.level to loaded",
                {"spec/scaling/warm/level": "sleeping"},
                {"spec/scaling/warm/level": "loaded"},
            ),
            (
                "kvCacheMemory is not for engine sglang, which takes no size in bytes",
                {"spec/kvCacheMemory": "2Gi"},
                {"spec/args": ["--max-total-tokens", "65536"]},
            ),
            (
                "modelId of engine sglang must have no colon",
                {"spec/modelId": "llama:8b"},
                {"spec/modelId": "llama-8b"},
            ),
        )
    ),
    Row(
        m.model_service_of_sglang,
        "spec",
        f"spec.adapters of engine sglang {WHILE_SUSPENDED}",
        OTHER_ADAPTER,
        before=RUNNING,
    ),
    Row(
        m.model_service_from_weights,
        "spec",
        "a new adapter of a service that runs must be on a claim that its pods mount",
        {"spec/adapters": [{"name": "support", "uri": "pvc://elsewhere/support"}]},
        {
            "spec/adapters": [
                {"name": "sql", "uri": "pvc://adapters"},
                {"name": "new", "uri": "pvc://stdlib/a/b"},
            ]
        },
        before=RUNNING,
    ),
    Row(
        m.model_service,
        "spec.model",
        "exactly one of uri and trainingJob",
        {"spec/model": {}},
    ),
)

POOL = (
    Row(
        m.pool,
        "",
        "at most 63 lower-case letters",
        {"metadata/name": "a.b"},
        {"metadata/name": "a-b"},
        blames="metadata.name",
    ),
    Row(
        m.pool,
        "spec.interconnect.nvlinkIsland",
        "NVLink islands are not built yet",
        {"spec/interconnect": {"nvlinkIsland": 8}},
        {"spec/interconnect": {"linkClass": "pcie5"}},
    ),
    Row(
        m.pool,
        "spec.interconnect.nicClass",
        "classes of networks are not built yet",
        {"spec/interconnect": {"nicClass": "ib-400"}},
        {"spec/interconnect": {"linkClass": "nvlink-c2c"}},
    ),
    Row(
        m.pool,
        "spec.interconnect.fabric",
        "fabric resources under busbar.dev",
        {"spec/interconnect/fabric/resources": {"busbar.dev/x": 1}},
        {"spec/interconnect/fabric/resources": {"openshift.io/x": 1}},
        blames="spec.interconnect.fabric.resources",
    ),
    Row(
        m.pool,
        "spec.interconnect.fabric",
        "fabric annotations under busbar.dev",
        {"spec/interconnect/fabric/annotations": {"x.k8s.io/a": "b"}},
        {"spec/interconnect/fabric/annotations": {"v1.multus-cni.io/default-network": "b"}},
        blames="spec.interconnect.fabric.annotations",
    ),
    Row(
        m.pool,
        "spec.interconnect.fabric",
        "fabric env: BUSBAR_*, PET_* and the rendezvous variables",
        {"spec/interconnect/fabric/env": {"MASTER_ADDR": "here"}},
        {"spec/interconnect/fabric/env": {"NCCL_SOCKET_IFNAME": "eth0"}},
        blames="spec.interconnect.fabric.env",
    ),
    Row(
        m.pool,
        "spec.interconnect.fabric.resources",
        "every key must have at most 316 characters and match ^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/",
        {"spec/interconnect/fabric/resources": {"memory": 1}},
        {"spec/interconnect/fabric/resources": {"rdma/memory": 1}},
    ),
    Row(
        m.pool,
        "spec.interconnect.fabric.annotations",
        "every key must have at most 316 characters",
        {"spec/interconnect/fabric/annotations": {"a b": "x"}},
        {"spec/interconnect/fabric/annotations": {"a.b/c": "x"}},
    ),
    Row(
        m.pool,
        "spec.interconnect.fabric.env",
        "every key must have at most 128 characters",
        {"spec/interconnect/fabric/env": {"1A": "x"}},
        {"spec/interconnect/fabric/env": {"A1": "x"}},
    ),
    Row(
        m.pool,
        "spec",
        "the pool's own resource is no part of its fabric",
        {"spec/interconnect/fabric/resources": {"nvidia.com/gpu": 1}},
        {"spec/interconnect/fabric/resources": {"nvidia.com/hostdev": 1}},
        blames="spec.interconnect.fabric.resources",
    ),
    Row(
        m.cpu_pool,
        "spec",
        "pods of a cpu pool request no devices",
        {"spec/interconnect/fabric/resources": {"rdma/hca": 1}},
        {"spec/interconnect/fabric/env": {"GLOO_SOCKET_IFNAME": "eth1"}},
        blames="spec.interconnect",
    ),
    Row(
        m.pool,
        "spec",
        "only a cpu pool divides its resource",
        {"spec/unit": "500m"},
        {"spec/unit": 1},
        blames="spec.unit",
    ),
    Row(
        m.pool,
        "spec",
        f"spec.accelerator {FIXED}",
        {"spec/accelerator": "L4"},
        {"spec/tenants": ...},
        RUNNING,
    ),
    Row(
        m.pool,
        "spec",
        f"spec.resourceName {FIXED}",
        {"spec/resourceName": "amd.com/gpu"},
        {"spec/pricePerHour": 3},
        RUNNING,
    ),
    Row(
        m.pool,
        "spec.nodeSelector",
        "every key must have at most 316 characters",
        {"spec/nodeSelector": {"a b": "x"}},
        {"spec/nodeSelector": {"a.b/c": "x"}},
    ),
    Row(
        m.pool,
        "spec.tolerations[]",
        "operator Exists has no value",
        {"spec/tolerations/0/operator": "Exists"},
        {"spec/tolerations/0/operator": "Exists", "spec/tolerations/0/value": ...},
        blames="spec.tolerations[0].operator",
    ),
    Row(
        m.pool,
        "spec.reserved",
        "every key must have at most 316 characters",
        {"spec/reserved": {"": "1"}},
        {"spec/reserved": {"memory": "1"}},
    ),
)

TENANT = (
    Row(
        m.tenant,
        "",
        "at most 40 lower-case letters",
        {"metadata/name": "a" * 41},
        {"metadata/name": "a" * 40},
        blames="metadata.name",
    ),
    Row(
        m.tenant,
        "spec",
        "kube-*) cannot belong to a tenant",
        {"spec/namespaces": ["kube-system"]},
        {"spec/namespaces": ["mykube-system"]},
        blames="spec.namespaces",
    ),
    Row(
        m.tenant,
        "spec",
        "the namespace default cannot belong to a tenant",
        {"spec/namespaces": ["research", "default"]},
        {"spec/namespaces": ["research", "default-2"]},
        blames="spec.namespaces",
    ),
    Row(
        m.tenant,
        "spec.members[].subject",
        "a ServiceAccount needs its namespace",
        {"spec/members/1/subject/namespace": ...},
        blames="spec.members[1].subject",
    ),
    Row(
        m.tenant,
        "spec.quota[]",
        "guaranteed must not be greater than ceiling",
        {"spec/quota/0/guaranteed": 5, "spec/quota/0/ceiling": 4},
        {"spec/quota/0/guaranteed": 4, "spec/quota/0/ceiling": 4},
        blames="spec.quota[0]",
    ),
    Row(
        m.tenant,
        "spec.budgets[]",
        "at least one of acceleratorHours, cost and kilowattHours",
        {"spec/budgets/0": {"period": "day"}},
        {"spec/budgets/0": {"period": "day", "cost": 1}},
        blames="spec.budgets[0]",
    ),
    Row(
        m.tenant,
        "spec.inference",
        "at least one of requestsPerMinute, tokensPerMinute and budgets",
        {"spec/inference": {}},
        {"spec/inference": {"requestsPerMinute": 1}},
    ),
)

PROFILE = (
    Row(
        m.profile,
        "spec.cells[]",
        "low must not be greater than tokensPerSecond",
        {"spec/cells/0/low": 91_000},
        {"spec/cells/0/low": 90_000.5},
        blames="spec.cells[0].low",
    ),
    Row(
        m.profile,
        "spec.cells[]",
        "high must not be less than tokensPerSecond",
        {"spec/cells/0/high": 90_000},
        {"spec/cells/0/high": 90_000.5},
        blames="spec.cells[0].high",
    ),
    Row(
        m.profile,
        "spec",
        "spec.workloadClass cannot change",
        {"spec/workloadClass": "llama-7B-00000000"},
        {"spec/cells/0/tokensPerSecond": 85_000},
        before={},
    ),
)

POWER = (
    Row(
        m.power_domain,
        "",
        "a domain cannot be its own parent",
        {"spec/parent": "sample"},
        {"spec/parent": "sample-2"},
        blames="spec.parent",
    ),
    Row(
        m.power_domain,
        "",
        "policies that limit nodes need spec.hostWatts",
        {"spec/hostWatts": ...},
        {
            "spec/hostWatts": ...,
            "spec/policy": "Observe",
            "spec/enforcement": ...,
            "spec/rideThroughSeconds": ...,
        },
        blames="spec.hostWatts",
    ),
    Row(
        m.power_domain,
        "",
        "Preempt needs a spec.policy that limits nodes",
        {"spec/policy": "Observe", "spec/rideThroughSeconds": ...},
        {"spec/policy": "Static", "spec/rideThroughSeconds": ...},
        blames="spec.enforcement",
    ),
    Row(
        m.power_domain,
        "",
        "only spec.policy LeaseWithBurst lets peaks pass above leases",
        {"spec/policy": "Lease"},
        {"spec/policy": "Lease", "spec/rideThroughSeconds": ...},
        blames="spec.rideThroughSeconds",
    ),
    Row(
        m.power_domain,
        "",
        "a meter is read in one way",
        {"spec/meter/redfish": {"url": "https://pdu.example/redfish/v1/Sensors/1"}},
        {
            "spec/meter/redfish": {"url": "https://pdu.example/redfish/v1/Sensors/1"},
            "spec/meter/prometheus": ...,
        },
        blames="spec.meter",
    ),
    Row(
        m.power_domain,
        "",
        "credentials are sent over https only",
        {"spec/meter/prometheus/url": "http://prometheus:9090"},
        {"spec/meter/prometheus/url": "http://prometheus:9090", "spec/meter/secretName": ...},
        blames="spec.meter.secretName",
    ),
    Row(
        m.power_domain,
        "spec.nodeSelector",
        "every key must have at most 316 characters",
        {"spec/nodeSelector": {"a b": "x"}},
        {"spec/nodeSelector": {"a.b/c": "x"}},
    ),
)

ROWS = (*TRAINING, *SERVICE, *POOL, *TENANT, *PROFILE, *POWER)

STAYS_MUTABLE = (
    ("a suspended job changes its size", m.template_job, SUSPENDED, {"spec/shape/minPods": 2}),
    ("a suspended job changes its types", m.engine_job, SUSPENDED, {"spec/accelerators": ["H100"]}),
    ("a job is suspended", m.engine_job, RUNNING, SUSPENDED),
    ("a job changes its priority", m.engine_job, RUNNING, {"spec/priority": 1}),
    ("a job changes its retries", m.engine_job, RUNNING, {"spec/retryLimit": 0}),
    ("a job changes when it is cleaned up", m.engine_job, RUNNING, {"spec/ttlSecondsAfterFinished": ...}),
    ("a service gets an external target", m.model_service, {"spec/replicas": ...}, {"spec/replicas": 0}),
    ("a service changes its range", m.model_service, RUNNING, {"spec/minReplicas": 0, "spec/maxReplicas": 9}),
    ("a feed gets another budget", m.power_domain, {}, {"spec/budgetWatts": 40_000}),
    ("a feed moves in the tree", m.power_domain, {}, {"spec/parent": "row-2"}),
    ("a feed becomes the root", m.power_domain, {}, {"spec/parent": ...}),
    ("a feed gets other nodes", m.power_domain, {}, {"spec/nodeSelector": {"rack": "b1"}}),
    ("a feed stops no work", m.power_domain, {}, {"spec/enforcement": "Cap"}),
    (
        "a feed is limited no more",
        m.power_domain,
        {},
        {"spec/policy": "Observe", "spec/enforcement": ..., "spec/rideThroughSeconds": ...},
    ),
    (
        "a feed is limited from now on",
        m.power_domain,
        {"spec/policy": "Observe", "spec/enforcement": ..., "spec/rideThroughSeconds": ...},
        {"spec/policy": "Static"},
    ),
    ("a feed gets another margin", m.power_domain, {}, {"spec/marginPercent": 5}),
    *(
        (f"a suspended service changes its {name}", m.model_service, SUSPENDED, change)
        for name, change in (*_SERVICE_FIELDS, ("adapters", OTHER_ADAPTER))
    ),
    ("a running service drops its adapters", m.model_service_from_weights, RUNNING, {"spec/adapters": ...}),
    (
        "a running service gets its first adapter",
        m.model_service_from_weights,
        {"spec/adapters": ...},
        OTHER_ADAPTER,
    ),
    (
        "a running service changes its tenants' KV cache",
        m.model_service_from_weights,
        RUNNING,
        {"spec/access": _shared(maxKv=0.5)},
    ),
    (
        "a running service is opened to a tenant without a part of its KV cache",
        m.model_service_from_weights,
        RUNNING,
        {"spec/access": {"tenants": [*_shared(guaranteedKv=0.25)["tenants"], {"name": "sales"}]}},
    ),
)
"""What people may change: (why, accepted manifest, before, change)."""
