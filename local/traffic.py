"""The simulated tenants' jobs: they are submitted, wait, run for some time on simulated nodes, and end.

``python -m busbar.local.traffic URL PKI_FOLDER IMAGE`` runs as one of the instance's parts, with rights on
TrainingJobs only.  Jobs use an image of their own (which no simulated node pulls) and the annotation that tells KWOK
when they end.  New ones are made as jobs end, so that between three and eight always wait: the pools are full, and
the queue shows reasons and forecasts.
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from busbar.local.simulated import DURATION, MODELS, TENANTS, namespace

PAUSE_S = 4.0  # mean pause between two checks of the queue
WAITING_LEAST, WAITING_MOST = 3, 8  # length of the queue while the simulated tenants are active
REFILL = 6  # a queue that is too short is filled up to this length
ALIVE_LIMIT = 120  # upper limit on unfinished jobs
WAITING = ("", "Pending", "Queued")  # phases of a job that is not placed yet
KEEP_FINISHED_S = 180
NAMES = ("pretrain", "finetune", "distill", "ablation", "eval", "sweep", "align", "caption", "rerank")
API = "/apis/busbar.dev/v1alpha1"


class Client:
    """A minimal API client: JSON over mutual TLS."""

    def __init__(self, url: str, pki: Path) -> None:
        self.host = urlsplit(url).netloc
        self.tls = ssl.create_default_context(cafile=str(pki / "cluster.crt"))
        self.tls.load_cert_chain(pki / "traffic.crt", pki / "traffic.key")

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """One request.

        Raises:
            OSError: the server is unreachable or refused the request.
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
    if chance.random() < 0.5:  # half of the jobs accept any accelerator
        accelerators = [model.accelerator for model in allowed]
    usable = [model for model in allowed if model.accelerator in accelerators]
    smallest = min(model.per_node for model in usable)
    per_pod = chance.choice([size for size in (1, 1, 2, 4, 4, 8) if size <= smallest])
    # A gang of more than half of a pool's nodes would wait for most of the demo and occupy the queue.
    most = max(1, min(model.nodes for model in usable) // 2)
    pods = min(most, chance.choice((1, 1, 1, 1, 2, 2, 4))) if per_pod == smallest else 1
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


@dataclass(frozen=True)
class Load:
    """Jobs of the simulated tenants that have not ended, and how many of these are not placed yet."""

    unfinished: int
    waiting: int


def load(client: Client) -> Load:
    """The current load; a job whose status was not written yet counts as waiting."""
    phases: list[str] = []
    for tenant in TENANTS:
        path = f"{API}/namespaces/{namespace(tenant)}/trainingjobs?resourceVersion=0"
        items = client.call("GET", path)["items"]
        phases += [item.get("status", {}).get("phase") or "" for item in items]
    unfinished = [phase for phase in phases if phase not in ("Succeeded", "Failed")]
    return Load(len(unfinished), sum(phase in WAITING for phase in unfinished))


def arrivals(now: Load) -> int:
    """How many jobs to submit now: a short queue is filled up, a long one gets none, any other gets one more."""
    room = max(0, ALIVE_LIMIT - now.unfinished)
    if now.waiting < WAITING_LEAST:
        return min(room, REFILL - now.waiting)
    return min(room, 1 if now.waiting < WAITING_MOST else 0)


def main() -> int:
    """Submit jobs until stopped."""
    url, pki, image = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    client = Client(url, pki)
    chance = random.Random(int(time.time()))
    number = int(time.time()) % 100_000
    while True:
        try:
            for _ in range(arrivals(load(client))):
                number += 1
                job = draw(chance, number, image)
                client.call("POST", f"{API}/namespaces/{job['metadata']['namespace']}/trainingjobs", job)
        except OSError as error:
            print(error, file=sys.stderr, flush=True)
            time.sleep(5)
        time.sleep(chance.expovariate(1 / PAUSE_S))


if __name__ == "__main__":
    raise SystemExit(main())
