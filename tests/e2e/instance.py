"""Shared by the tests of this tier: the running cluster and functions that call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from busbar.local.errors import StartError
from busbar.local.instance import running
from busbar.local.kubectl import repeated

ROOT = Path(__file__).resolve().parents[2]
BUSBAR = (sys.executable, "-m", "busbar.cli.main")


@dataclass(frozen=True)
class Cluster:
    """The running instance, and the programs and addresses to call it."""

    name: str
    kubectl: str
    helm: str
    kubeconfig: str
    portal_url: str
    gateway_url: str

    def run(self, program: str, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run ``program`` against this cluster, again where etcd is late.

        Returns its output, or raises AssertionError with its error output.
        """

        def once() -> str:
            done = subprocess.run(
                [program, *arguments],
                input=stdin,
                capture_output=True,
                text=True,
                timeout=180,
                env={**os.environ, "KUBECONFIG": self.kubeconfig},
            )
            if done.returncode == 0:
                return done.stdout
            raise StartError(done.stdout + done.stderr)

        try:
            return repeated(once)
        except StartError as failed:
            if check:
                said = f"{Path(program).name} {' '.join(arguments)}: {failed}"
                raise AssertionError(said) from failed
            return str(failed)

    def up(self) -> None:
        """``busbar up`` on this instance, as a person repeats it."""
        busbar(os.environ, "up", "--name", self.name, timeout_s=600)

    def evidence(self) -> str:
        """What runs, what waits, the last warnings, and the end of the operator's log."""
        looks = {
            "pods": ("get", "pods", "-A", "-o", "wide"),
            "objects": ("get", "trainingjobs,modelservices", "-A"),
            "warnings": ("get", "events", "-A", "--field-selector=type=Warning", "--sort-by=.lastTimestamp"),
            "operator": ("-n", "busbar-system", "logs", "deploy/busbar-operator", "--tail=30"),
        }
        found = {name: self.kube(*arguments, check=False) for name, arguments in looks.items()}
        return "\n".join(f"{name}:\n{text[-3000:]}" for name, text in found.items())

    def supervisor(self) -> int:
        """The ancestor of every process of the instance."""
        found = running(self.name)
        assert found is not None, f"no instance {self.name} is running"
        return found.pid

    def kube(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """kubectl."""
        return self.run(self.kubectl, *arguments, stdin=stdin, check=check)

    def get(self, *arguments: str) -> dict[str, Any]:
        """``kubectl get … -o json``."""
        found: dict[str, Any] = json.loads(self.kube("get", *arguments, "-o", "json"))
        return found

    def wait(self, what: str, probe: Callable[[], Any], limit_s: float = 120) -> Any:
        """Poll ``probe`` until its value is true; after the timeout, an AssertionError shows the last value.

        A call that a busy API server refused is repeated, like any other unwanted answer.
        """
        deadline = time.monotonic() + limit_s
        seen: Any = None
        while time.monotonic() < deadline:
            try:
                seen = value = probe()
            except AssertionError as refused:
                seen, value = refused, None
            if value:
                return value
            time.sleep(1)
        raise AssertionError(f"{what} did not happen within {limit_s:g} s; last seen: {seen!r}")

    def status(self, kind: str, name: str, namespace: str = "demo") -> dict[str, Any]:
        """The status of one of our objects; empty while it has none."""
        status: dict[str, Any] = self.get("-n", namespace, kind, name).get("status", {})
        return status

    def phase(self, kind: str, name: str, namespace: str = "demo") -> str:
        """The phase of one of our objects."""
        return str(self.status(kind, name, namespace).get("phase", ""))

    def submit(self, job: dict[str, Any]) -> None:
        """Apply a job of the demo's tenant, after its claim."""
        self.make_claim()
        self.kube("-n", "demo", "apply", "-f", "-", stdin=json.dumps(job))

    def make_claim(self) -> None:
        """The claim that holds the files of all jobs of the demo's tenant."""
        example = (ROOT / "examples" / "train-python-stdlib.yaml").read_text()
        claim = next(d for d in yaml.safe_load_all(example) if d["kind"] == "PersistentVolumeClaim")
        self.kube("-n", "demo", "apply", "-f", "-", stdin=json.dumps(claim))

    def is_gone(self, kind: str, name: str, namespace: str = "demo") -> bool:
        """True when the object no longer exists."""
        return not self.kube("-n", namespace, "get", kind, name, "--ignore-not-found").strip()


def busbar(env: Mapping[str, str], *arguments: str, timeout_s: float = 120) -> str:
    """Run the CLI; returns its output, or raises AssertionError with what it said."""
    done = subprocess.run(
        [*BUSBAR, *arguments], env={**env}, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"busbar {' '.join(arguments)}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    return done.stdout


def small_job(name: str, steps: int = 60, **spec: Any) -> dict[str, Any]:
    """A TrainingJob that trains a very small model for a minute or less."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 512,
        "max_position_embeddings": 128,
    }
    engine = {
        "model": {"config": config},
        "tokenizer": {"train": {"vocabSize": 512}},
        "data": {"uri": "builtin://python-stdlib", "sequenceLength": 64},
        "steps": steps,
        "batch": {"sequences": 4, "microBatch": 4},
        "optimizer": {"learningRate": 0.003, "warmupSteps": 5},
        "mode": "optimizer-offload",
    }
    return {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "demo"},
        "spec": {
            "engine": engine,
            "accelerators": ["cpu"],
            "shape": {"acceleratorsPerPod": 1, "memory": "1500Mi"},
            "checkpoint": {"everySteps": 10},
            "output": {"uri": f"pvc://stdlib/{name}"},
            **spec,
        },
    }
