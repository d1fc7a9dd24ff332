"""`busbar describe` against the real API: jobs, services and tenants, and which object a name means."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml
from tests.api.conftest import JOB, SERVICE
from tests.cli.conftest import Site

from busbar.cli.commands.describe import _trained
from busbar.kube.resources import MODEL_SERVICES, TENANTS, TRAINING_JOBS


async def test_describe_shows_state_reason_and_progress(site: Site) -> None:
    status: dict[str, Any] = {
        "phase": "Running",
        "reason": "Training",
        "message": "Training on pool cpu.",
        "progress": {
            "step": 20,
            "totalSteps": 100,
            "loss": 3.25,
            "tokensPerSecond": 812.4,
            "etaSeconds": 300,
            "modelTflops": 0.0421,
            "stepSeconds": {"predicted": 1.2, "measured": 1.25, "ratio": 0.96},
            "slowLink": {"direction": "load", "mibPerSecond": 3100, "usualMibPerSecond": 24800},
            "phases": {"forward": 31, "backward": 62, "wait": 7, "exchange": 0},
            "workers": [
                {"rank": 2, "ownSeconds": 1.2},
                {"rank": 0, "ownSeconds": 0.6},
                {"rank": 1, "ownSeconds": 0.4},
            ],
        },
        "checkpoint": {
            "step": 10,
            "savedAt": "2026-03-01T12:00:00Z",
            "mibPerSecond": 41,
            "usualMibPerSecond": 310,
            "slowInARow": 2,
        },
        "admission": {
            "id": "x",
            "pool": "cpu",
            "accelerator": "A100",
            "pods": 1,
            "nodes": ["n"],
            "powerCapPercent": 70,
            "powerCapWatts": 280.0,
            "replaced": [
                {"rank": 1, "times": 1, "since": "2026-03-01T12:00:00Z"},
                {"rank": 2, "times": 3, "needsNode": True, "since": "2026-03-01T12:00:00Z"},
            ],
        },
        "memory": {
            "plannedDeviceMib": 3000,
            "peakDeviceMib": 2100,
            "owners": [
                {"place": "device", "owner": "parameters", "mib": 2000},
                {"place": "device", "owner": "activations", "mib": 1000},
                {"place": "disk", "owner": "checkpoints", "mib": 6144},
                {"place": "disk", "owner": "tokens", "mib": 12},
            ],
        },
        "usage": {"energyJoules": 3.6e6},
        "attempt": 1,
        "power": {"attempt": 1, "limitPercent": 72, "seconds": 900, "slowdown": 1.083},
        "model": {"adapter": "LoRA of rank 8 on q_proj", "parameters": 64_000, "trainableParameters": 1024},
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Training",
                "message": "m",
                "lastTransitionTime": "2026-03-01T12:00:00Z",
            }
        ],
    }
    site.world.kube.status(TRAINING_JOBS, "ada-lab", "ada-run", **status)
    await site.world.settle()
    done = await site.busbar("describe", "ada-run")
    for text in (
        "20 of 100 steps",
        "LoRA of rank 8 on q_proj: 1,024 of 64,000 parameters",
        "812 tokens/s",
        "70 % of each board's limit (280 W)",
        "boards at 72 % of their highest, 1.08 times as long as without limits so far",
        "1.000 kWh so far, about 5.000 at its end",
        "1.25 s (predicted 1.2, 0.96 of it)",
        "backward 62 %, forward 31 %, wait 7 %",
        "rank 2: 1.2 s of each step, 2.40 times the others",
        "3100 MiB/s to the accelerator (usually 24800)",
        "2.9 GiB planned, peak 2.1 GiB: weights 2.0 GiB, activations 1000 MiB",
        "6.0 GiB planned: checkpoints 6.0 GiB, tokens 12 MiB",
        "made again: rank 1, rank 2 (3 times) (waits for another node)",
        "812 tokens/s, 0.0421 model TFLOP/s",
        "5m00s",
        "Training on pool cpu.",
        "step 10, 2026-03-01T12:00:00Z, 41 MiB/s (usually 310)",
        "Conditions",
    ):
        assert text in done.out, text


async def test_describe_says_what_is_promised_of_a_deadline(site: Site) -> None:
    at = "2030-01-31T18:00:00Z"
    metadata = {"name": "due", "namespace": "ada-lab"}
    spec = {**JOB["spec"], "deadline": at}
    said = {"at": at, "answer": "Keeps", "message": "Promised: it needs 4 H100 from now on."}
    status = {"phase": "Running", "deadline": said}
    site.world.kube.put(TRAINING_JOBS, {**JOB, "metadata": metadata, "spec": spec, "status": status})
    await site.world.settle()
    done = await site.busbar("describe", "due")
    assert f"{at}: Promised: it needs 4 H100 from now on." in done.out


async def test_describe_of_a_waiting_job_says_when_it_is_likely_to_start_and_end(site: Site) -> None:
    def later(seconds: float) -> str:
        return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()

    forecast = {
        "madeAt": later(-60), "startP50": later(3630), "startP90": later(7230),
        "endP50": later(-5), "endP90": later(14_430),
    }  # fmt: skip
    place = {
        "pool": "h100", "accelerator": "H100", "pods": 2, "acceleratorsPerPod": 8, "collected": 1, "needed": 2,
        "startBy": later(-5), "nodes": [{"name": f"h100-node-{i}", "since": later(-60)} for i in range(2)],
    }  # fmt: skip
    told = {"forecast": forecast, "reservation": place}
    site.world.kube.status(TRAINING_JOBS, "ada-lab", "ada-run", phase="Queued", **told)
    await site.world.settle()
    done = await site.busbar("describe", "ada-run")
    assert "likely in 1h00m, nine times in ten in 2h00m or sooner" in done.out
    assert "likely any moment, nine times in ten in 4h00m or sooner" in done.out
    assert "Starts any moment on 2 × 8 H100 in pool h100: 1 of 2 nodes collected." in done.out


async def test_describe_of_a_service_and_of_a_kind_that_is_named(site: Site) -> None:
    done = await site.busbar("describe", "service/ada-chat")
    assert "Kind:" in done.out
    assert "ModelService" in done.out
    assert (await site.busbar("describe", "bbms/ada-chat", "-o", "name")).out == "modelservice/ada-chat\n"


async def test_describe_of_a_service_says_what_decides_its_replicas_and_why_they_changed(site: Site) -> None:
    change = {
        "time": "2026-03-01T12:00:00Z",
        "previous": 1,
        "desired": 3,
        "cause": "Panic",
        "reason": "It waited.",
    }
    site.world.kube.status(
        MODEL_SERVICES,
        "ada-lab",
        "ada-chat",
        slo={"scaledBy": "Promise", "attainmentRecent": 0.98, "requestsRecent": 50},
        pools=[{"pool": "l4", "replicas": 1, "desired": 3}],
        scalingHistory=[change],
        departures=[
            {
                "time": "2026-03-01T12:00:00Z",
                "replica": "ada-chat-2",
                "uid": "u2",
                "requests": 7,
                "copied": 4,
                "recomputed": 1,
            }
        ],
        crashes=[
            {
                "time": "2026-03-01T12:00:00Z",
                "replica": "ada-chat-1",
                "uid": "u1",
                "restarts": 1,
                "cause": "the server was killed by SIGSEGV",
            }
        ],
    )
    await site.world.settle()
    done = await site.busbar("describe", "service/ada-chat")
    for text in ("the latency target", "98.0 % of 50 requests", "1 on l4 (3 wanted)", "Last scalings"):
        assert text in done.out, text
    moved = (
        "ada-chat-2 +5 of 7 requests went on at other replicas, 4 with their keys and values, 1 by computing"
    )
    assert re.search(rf"Streams that moved\n.*\n.*{moved}", done.out)
    assert re.search(r"Crashes\n.*\n.*ada-chat-1 +the server was killed by SIGSEGV", done.out)
    assert re.search(r"1 → 3 +Panic +It waited\.", done.out)


async def test_describe_of_a_tenant_shows_what_its_keys_use_of_its_limits(site: Site) -> None:
    ada = site.world.kube.objects["tenants", "", "ada"]
    budgets = [{"period": "month", "cost": 20.0}]
    ada["spec"]["inference"] = {"tokensPerMinute": 200_000, "budgets": budgets}
    month = {"period": "month", "started": "2026-11-01T00:00:00Z", "ends": "2026-12-01T00:00:00Z"}
    spent = {**month, "cost": 5.25, "costLeft": 14.75, "state": "Within"}
    ada["status"] = {"inference": {"tokensLastMinute": 70, "budgets": [spent]}}
    site.world.kube.put(TENANTS, ada)
    await site.world.settle()
    shown = (await site.busbar("describe", "tenant/ada")).out
    assert "70 of 200,000 tokens/min, 5.25 of 20 this month" in shown


async def test_describe_of_a_tenant_shows_what_it_uses_of_its_limits(site: Site) -> None:
    assert "not limited" in (await site.busbar("describe", "tenant/ada")).out
    stored = site.world.kube.objects["tenants", "", "ada"]
    limits = {"waitingJobs": 9, "trainingJobs": 3, "storageGib": 20_000}
    use = [{"namespace": "ada-lab", "trainingJobs": 2, "storageGib": 12345.5}]
    site.world.kube.put(
        TENANTS,
        {
            **stored,
            "spec": {**stored["spec"], "limits": limits},
            "status": {"waitingJobs": 4, "limitUse": use},
        },
    )
    await site.world.settle()
    done = await site.busbar("describe", "tenant/ada")
    rows = [line.split() for line in done.out.partition("Limits\n")[2].splitlines()]
    assert ["all", "waiting", "jobs", "4", "9"] in rows
    assert ["ada-lab", "TrainingJobs", "2", "3"] in rows
    assert ["ada-lab", "storage,", "GiB", "12345.5", "20000"] in rows
    shown = yaml.safe_load((await site.busbar("describe", "tenant/ada", "-o", "yaml")).out)
    assert shown["status"]["limitUse"] == use
    foreign = await site.busbar("describe", "tenant/bob-corp")
    assert (foreign.code, "no tenant 'bob-corp' that you may see" in foreign.err) == (3, True)
    assert (await site.busbar("describe", "tenant/ada", "--watch")).code == 2


async def test_a_foreign_or_absent_object_is_not_found(site: Site) -> None:
    for arguments in (
        ("describe", "nothing"),
        ("describe", "job/bob-run", "-n", "bob-lab"),
        ("logs", "bob-run", "-n", "bob-lab"),
        ("cancel", "nothing"),
        ("delete", "nothing"),
        ("scale", "nothing", "--replicas", "1"),
    ):
        done = await site.busbar(*arguments)
        assert done.code == 3, arguments
        assert done.err.startswith("Error: There is no "), arguments


async def test_a_name_that_means_two_objects_must_say_its_kind(site: Site) -> None:
    site.world.kube.put(MODEL_SERVICES, {**SERVICE, "metadata": {"name": "ada-run", "namespace": "ada-lab"}})
    await site.world.settle()
    done = await site.busbar("describe", "ada-run")
    assert done.code == 2
    assert "job/ada-run or service/ada-run" in done.err
    assert (await site.busbar("describe", "job/ada-run", "-o", "name")).out == "trainingjob/ada-run\n"


def test_describe_says_how_much_is_trained_beside_frozen_parts() -> None:
    assert _trained({"parameters": 5000, "trainableParameters": 1250}) == (
        "weights that are not frozen: 1,250 of 5,000 parameters"
    )
    assert _trained({"parameters": 5000, "trainableParameters": 5000}) is None
    assert _trained({}) is None
