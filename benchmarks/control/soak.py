"""An hour of churn: whether the operator's memory stays flat, and whether anything is left behind.

    python benchmarks/control/soak.py [--minutes 60] [--per-minute 30] [--seed 1] [--output FILE]

A real API server with our kinds and Kubernetes' own garbage collector, one node of sixteen places, and two operators as
processes of their own with production settings: one leads, one stands by. A stand-in kubelet runs the pods.
All the time objects are made, one of: a job of one pod, a gang, a job that fails and is tried again, a job that removes
itself after its end, a job that is suspended and resumed, a service that is scaled and answers as a model server. Each is
deleted within a minute or so, whatever it is doing then. At the end everything is deleted, and what stays in the
tenant's namespace beside what stayed there after five seconds of the same is an orphan.

An API on SQLite keeps the history of these objects. A person makes a token every five seconds, uses it and revokes it. At
the end no token of theirs is live, and no row of the history is open.

Resident memory, threads and open files of both operators and of the API are looked at every ten seconds. Growth compares
the median of the last quarter with that of the second one: the first fills caches. The gateway takes no part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.control.report import publish
from sqlalchemy import func, select
from tests.api.process import ApiProcess
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.replicas import two
from tests.cluster.tenancy import becomes

from busbar.api.access.identity import CallerRole
from busbar.api.access.tokens import Tokens
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.kube.client import Object
from busbar.kube.errors import ApiError, NotFound
from busbar.kube.resources import MODEL_SERVICES, PODS, TRAINING_JOBS, Resource
from busbar.local.build import binary

LEASE_S = 12.0
LOOK_S = 10.0
TOKEN_EVERY_S = 5.0
PERSON = "somebody"
PLACES = 16
LIVES_S = (3.0, 60.0)
BARS = {
    "leader_growth_mib": 10.0,
    "standby_growth_mib": 2.0,
    "api_growth_mib": 10.0,
    "orphans": 0,
    "tokens_left": 0,
    "rows_left_open": 0,
    "pods_of_jobs_made_twice": 0,
    "processes_ended": 0,
}
LEFT_BEHIND = (
    "api/v1/{}/pods", "api/v1/{}/services", "api/v1/{}/secrets", "api/v1/{}/endpoints", "api/v1/{}/resourcequotas",
    "api/v1/{}/persistentvolumeclaims", "apis/discovery.k8s.io/v1/{}/endpointslices",
    "apis/networking.k8s.io/v1/{}/networkpolicies", "apis/rbac.authorization.k8s.io/v1/{}/rolebindings",
    "apis/batch/v1/{}/jobs", "apis/busbar.dev/v1alpha1/{}/trainingjobs", "apis/busbar.dev/v1alpha1/{}/modelservices",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One look at a process."""

    second: int
    resident_mib: float
    threads: int
    files: int

    @classmethod
    def of(cls, pid: int, second: int) -> Sample:
        here = Path(f"/proc/{pid}")
        status = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", (here / "status").read_text(), re.MULTILINE))
        files = len(list((here / "fd").iterdir()))
        return cls(second, round(int(status["VmRSS"]) / 1024, 1), int(status["Threads"]), files)


def serves(seconds: float) -> dict[str, Any]:
    return {"kind": "serving", "ready": True, "running": 0, "waiting": 0}


def script(pod: Object) -> Script:
    """What a pod does, by the name of its owner."""
    what = pod["metadata"]["labels"]["busbar.dev/job"].partition("-")[0]
    if what == "service":
        return Script(status=serves)
    return Script(run_s=4.0, exit_code=1 if what == "fails" else 0)


def service(name: str) -> Object:
    return {
        "kind": "ModelService",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "pvc://claim/model"}, "replicas": 1, "drainSeconds": 5},
    }


Kind = tuple[Resource, Callable[[str], Object]]
KINDS: dict[str, Kind] = {
    "ends": (TRAINING_JOBS, lambda name: gang_job(name, 1)),
    "gang": (TRAINING_JOBS, lambda name: gang_job(name, 3)),
    "fails": (TRAINING_JOBS, lambda name: gang_job(name, 1, retryLimit=1)),
    "removes": (TRAINING_JOBS, lambda name: gang_job(name, 1, ttlSecondsAfterFinished=5)),
    "pauses": (TRAINING_JOBS, lambda name: gang_job(name, 1)),
    "service": (MODEL_SERVICES, service),
}


async def live(cluster: Cluster, what: str, name: str, chance: random.Random) -> None:
    """One object's life, from its creation to its deletion."""
    resource, make = KINDS[what]
    await cluster.create(make(name))
    left_s = chance.uniform(*LIVES_S)
    with contextlib.suppress(NotFound):
        if what in ("pauses", "service"):
            await asyncio.sleep(left_s / 3)
            first, second = (
                ({"suspend": True}, {"suspend": False})
                if what == "pauses"
                else ({"replicas": 2}, {"replicas": 0})
            )
            for spec in (first, second):
                await cluster.client.patch(resource, name, {"spec": spec}, cluster.namespace)
                await asyncio.sleep(left_s / 3)
        else:
            await asyncio.sleep(left_s)
        await cluster.client.delete(resource, name, cluster.namespace)


@contextlib.contextmanager
def garbage_collector(server: ApiServer) -> Iterator[None]:
    """Kubernetes' own: without it, nothing goes with its owner."""
    command = [
        str(binary("kube-controller-manager")), f"--kubeconfig={server.kubeconfig()}", "--leader-elect=false",
        "--controllers=garbage-collector-controller", "--bind-address=127.0.0.1", "--secure-port=0",
    ]  # fmt: skip
    with (server.directory / "kube-controller-manager.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
        if process.poll() is not None:
            raise SystemExit((server.directory / "kube-controller-manager.log").read_text()[-2000:])
    finally:
        process.kill()
        process.wait()


def present(cluster: Cluster) -> Counter[str]:
    """The objects in the tenant's namespace, by kind."""
    found: Counter[str] = Counter()
    for path in LEFT_BEHIND:
        body = cluster.server.admin.get("/" + path.format(f"namespaces/{cluster.namespace}")).expect()
        found[path.rpartition("/")[2]] = len(body["items"])
    return found


async def churn(
    cluster: Cluster, seconds: float, per_minute: float, seed: int, made: Counter[str], mark: str = ""
) -> None:
    """Makes objects at random moments, and waits for the end of each."""
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for number in itertools.count():
            if time.monotonic() >= end:
                return
            what = chance.choice(sorted(KINDS))
            made[what] += 1
            group.create_task(live(cluster, what, f"{what}-{mark}{number}", random.Random(chance.random())))
            await asyncio.sleep(chance.expovariate(per_minute / 60))


async def people(
    api: ApiProcess, bearer: dict[str, str], made: Counter[str], stopping: asyncio.Event
) -> None:
    """Somebody makes tokens, uses and revokes them."""
    at, patience_s = "/api/v1alpha1", 30.0
    while not stopping.is_set():
        answer = await api.http.post(
            f"{at}/tokens", json={"scopes": ["rest"]}, headers=bearer, timeout=patience_s
        )
        token = answer.raise_for_status().json()
        used = {"Authorization": f"Bearer {token['token']}"}
        (await api.http.get(f"{at}/me", headers=used, timeout=patience_s)).raise_for_status()
        gone = await api.http.delete(f"{at}/tokens/{token['info']['id']}", headers=bearer, timeout=patience_s)
        gone.raise_for_status()
        made["token"] += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOKEN_EVERY_S):
                await stopping.wait()


async def left_in(database: Database) -> tuple[int, int]:
    """Live tokens beside the one that was given, and open rows of the history."""
    live = select(func.count()).select_from(tables.tokens).where(tables.tokens.c.revoked_at.is_(None))
    rows = select(func.count()).select_from(tables.jobs).where(tables.jobs.c.deleted_at.is_(None))
    async with database.read() as db:
        return (await db.execute(live)).scalar_one() - 1, (await db.execute(rows)).scalar_one()


async def looking(pids: tuple[int, int, int], seconds: float, samples: list[list[Sample]]) -> None:
    """Looks at the processes, until cancelled."""
    began = time.monotonic()
    while True:
        second = round(time.monotonic() - began)
        for pid, seen in zip(pids, samples, strict=True):
            seen.append(Sample.of(pid, second))
        print(f"{second} of {seconds:.0f} s: {[seen[-1] for seen in samples]}", file=sys.stderr, flush=True)
        await asyncio.sleep(LOOK_S)


def growth(samples: list[Sample]) -> dict[str, float]:
    """Of memory, threads and files: the median of the last quarter, less that of the second."""
    quarter = max(1, len(samples) // 4)
    second, last = samples[quarter : 2 * quarter] or samples, samples[-quarter:]

    def median(of: list[Sample], name: str) -> float:
        return statistics.median(float(getattr(sample, name)) for sample in of)

    names = ("resident_mib", "threads", "files")
    return {name: round(median(last, name) - median(second, name), 1) for name in names}


async def measure(minutes: float, per_minute: float, seed: int, folder: Path) -> dict[str, Any]:
    seconds, made, samples = minutes * 60, Counter[str](), [list[Sample]() for _ in range(3)]
    url = f"sqlite+aiosqlite:///{folder}/api.db"
    with ApiServer.start() as server, garbage_collector(server):
        server.install_crds()
        async with (
            Cluster(server, script=script, cpu=str(PLACES)) as cluster,
            two(cluster, folder, LEASE_S) as both,
            ApiProcess(server, folder / "api", url, token=server.admin_token) as api,
        ):
            database = Database(url)
            given, _ = await Tokens(database).create(PERSON, created_by="soak", role=CallerRole.USER)
            bearer = {"Authorization": f"Bearer {given}"}
            pids = both[0].process.pid, both[1].process.pid, api.process.pid
            # Bindings, policies and profiles are made. Under names of its own: pods are told apart by their owners.
            await churn(cluster, 5.0, per_minute, seed + 1, Counter(), mark="first-")
            before = await _settled(cluster)
            stopping = asyncio.Event()
            async with asyncio.TaskGroup() as beside:
                looks = beside.create_task(looking(pids, seconds, samples))
                beside.create_task(people(api, bearer, made, stopping))
                await churn(cluster, seconds, per_minute, seed, made)
                looks.cancel()
                stopping.set()
            after = await _settled(cluster)
            ends = sum(replica.process.poll() is not None for replica in both)
            ends += api.process.returncode is not None
            leads = [await replica.leads() for replica in both]
            tokens_left, rows_left_open = await left_in(database)
            await database.close()
    leader, standby, of_api = (growth(seen) for seen in samples)
    kubelet = cluster.kubelet
    # A replica's name is used again, and a pod of a later job of the same name is another pod.
    pods = Counter(
        (kubelet.owners[uid], pod)
        for uid, pod in kubelet.created.items()
        if not _name(pod).startswith("service-")
    )
    found = {
        "leader_growth_mib": leader["resident_mib"],
        "standby_growth_mib": standby["resident_mib"],
        "api_growth_mib": of_api["resident_mib"],
        "orphans": sum((after - before).values()),
        "tokens_left": tokens_left,
        "rows_left_open": rows_left_open,
        "pods_of_jobs_made_twice": pods.total() - len(pods),
        "processes_ended": ends,
    }
    return {
        "minutes": minutes,
        "objects_made": dict(sorted(made.items())),
        "pods_made": len(cluster.kubelet.created) - len(both),
        "pods_made_twice": sorted(_name(pod) for (_, pod), count in pods.items() if count > 1),
        "left_before": dict(+before),
        "left_after": dict(+after),
        "still_leads": leads == [True, False],
        **{name: {"found": found[name], "bar": bar, "met": found[name] <= bar} for name, bar in BARS.items()},
        "growth": {"leader": leader, "standby": standby, "api": of_api},
        "first_and_last": [[asdict(seen[0]), asdict(seen[-1])] for seen in samples],
        "leader_mib_each_minute": [sample.resident_mib for sample in samples[0][::6]],
        "api_mib_each_minute": [sample.resident_mib for sample in samples[2][::6]],
    }


def _name(pod: str) -> str:
    return pod.partition("/")[2]


async def _settled(cluster: Cluster) -> Counter[str]:
    """What is left when nothing of ours goes any more."""

    async def pods() -> int:
        for resource in (TRAINING_JOBS, MODEL_SERVICES):
            for one in (await cluster.client.list(resource, cluster.namespace))[0]:
                with contextlib.suppress(ApiError):
                    await cluster.client.delete(resource, one["metadata"]["name"], cluster.namespace)
        return len((await cluster.client.list(PODS, cluster.namespace))[0])

    with contextlib.suppress(AssertionError):  # then they are counted as orphans
        await becomes(pods, lambda count: count == 0)
    last = present(cluster)
    while True:  # what the garbage collector still takes
        await asyncio.sleep(LOOK_S)
        now = present(cluster)
        if now == last:
            return now
        last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--per-minute", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    command = (
        f"python benchmarks/control/soak.py --minutes {given.minutes:g} --per-minute {given.per_minute:g}"
        f" --seed {given.seed}"
    )
    with tempfile.TemporaryDirectory() as folder:
        made = measure(given.minutes, given.per_minute, given.seed, Path(folder))
        publish(command, made, given.output)


if __name__ == "__main__":
    main()
