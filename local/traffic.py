"""The simulated tenants' life: jobs that come, wait, run for a while on simulated nodes, and go.

``python -m busbar.local.traffic URL PKI_FOLDER IMAGE`` runs as one of the instance's parts, with rights on
TrainingJobs only.  Jobs bring their own image (which no simulated node ever pulls) and the annotation that
tells KWOK when they end.  They arrive a little faster than the pools can take them, so that there is always a
short queue, some borrowing and a mixed pool to look at.
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from busbar.local.simulated import DURATION, MODELS, TENANTS, namespace

ARRIVAL_S = 7.0  # mean pause between two jobs
ALIVE_LIMIT = 90  # never more unfinished jobs than this
KEEP_FINISHED_S = 180
NAMES = ("pretrain", "finetune", "distill", "ablation", "eval", "sweep", "align", "caption", "rerank")
API = "/apis/busbar.dev/v1alpha1"


class Client:
    """Just enough of an API client: JSON over mutual TLS."""

    def __init__(self, url: str, pki: Path) -> None:
        self.host = urlsplit(url).netloc
        self.tls = ssl.create_default_context(cafile=str(pki / "cluster.crt"))
        self.tls.load_cert_chain(pki / "traffic.crt", pki / "traffic.key")

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """One request.

        Raises:
            OSError: the server is away or refused.
        """
        connection = http.client.HTTPSConnection(self.host, context=self.tls, timeout=20)
        try:
            data = json.dumps(body) if body is not None else None
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except http.client.HTTPException as error:
            raise OSError(f"{method} {path}: {error}") from error
        finally:
            connection.close()
        if response.status >= 400:
            raise OSError(f"{method} {path}: {response.status} {text[:300].decode(errors='replace')}")
        found: dict[str, Any] = json.loads(text)
        return found


def draw(chance: random.Random, number: int, image: str) -> dict[str, Any]:
    """One job of one tenant."""
    tenant = chance.choice(sorted(TENANTS))
    allowed = [model for model in MODELS if tenant in model.tenants]
    first = chance.choice(allowed)
    accelerators = [first.accelerator]
    if chance.random() < 0.5:  # half of the jobs do not mind where they run
        accelerators = [model.accelerator for model in allowed]
    smallest = min(model.per_node for model in allowed if model.accelerator in accelerators)
    per_pod = chance.choice([size for size in (1, 1, 2, 4, 4, 8) if size <= smallest])
    pods = chance.choice((1, 1, 1, 1, 2, 2, 4)) if per_pod == smallest else 1
    seconds = int(chance.lognormvariate(5.2, 0.6))  # median three minutes
    return {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": f"{chance.choice(NAMES)}-{number}", "namespace": namespace(tenant)},
        "spec": {
            "template": {
                "image": image,
                "command": ["simulated"],
                "metadata": {"annotations": {DURATION: str(max(30, min(seconds, 1200)))}},
            },
            "shape": {"minPods": pods, "maxPods": pods, "acceleratorsPerPod": per_pod, "memory": "16Gi"},
            "accelerators": accelerators,
            "priority": chance.choice((50, 100, 100, 100, 200)),
            "ttlSecondsAfterFinished": KEEP_FINISHED_S,
        },
    }


def alive(client: Client) -> int:
    """Unfinished jobs of the simulated tenants."""
    count = 0
    for tenant in TENANTS:
        items = client.call("GET", f"{API}/namespaces/{namespace(tenant)}/trainingjobs?resourceVersion=0")[
            "items"
        ]
        count += sum(item.get("status", {}).get("phase") not in ("Succeeded", "Failed") for item in items)
    return count


def main() -> int:
    """Make jobs until stopped."""
    url, pki, image = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    client = Client(url, pki)
    chance = random.Random(int(time.time()))
    number = int(time.time()) % 100_000
    while True:
        try:
            unfinished = alive(client)
            # The first minute fills the pools; then jobs come as they end.
            burst = 6 if unfinished < 24 else 1
            for _ in range(burst if unfinished < ALIVE_LIMIT else 0):
                number += 1
                job = draw(chance, number, image)
                client.call("POST", f"{API}/namespaces/{job['metadata']['namespace']}/trainingjobs", job)
        except OSError as error:
            print(error, file=sys.stderr, flush=True)
            time.sleep(5)
        time.sleep(chance.expovariate(1 / ARRIVAL_S))


if __name__ == "__main__":
    raise SystemExit(main())
