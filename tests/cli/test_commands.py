"""The commands against the real API: what they do, what they print, what they exit with."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml
from tests.api.conftest import JOB, SERVICE
from tests.cli.conftest import Site

from busbar.cli.commands.describe import _trained
from busbar.cli.commands.power import _ordered, bar, explained, moves
from busbar.kube.contracts.power import LeaseState
from busbar.kube.contracts.power_view import FeedPower, NodePower
from busbar.kube.contracts.service_plan import PlannedPool, ServicePlanAnswer
from busbar.kube.resources import MODEL_SERVICES, PERFORMANCE_PROFILES, PODS, TENANTS, TRAINING_JOBS
from busbar.scheduler import Finished


def names(site: Site, plural: str = "trainingjobs") -> set[str]:
    return {name for kind, space, name in site.world.kube.objects if kind == plural and space == "ada-lab"}


async def test_apply_creates_then_changes_then_says_unchanged(site: Site) -> None:
    file = site.manifest()
    assert (await site.busbar("apply", "-f", file)).out == "trainingjob/stdlib created\n"
    assert "stdlib" in names(site)
    site.manifest(document={**JOB, "spec": {**JOB["spec"], "priority": 200}})
    assert (await site.busbar("apply", "-f", file)).out == "trainingjob/stdlib changed\n"
    stored = site.world.kube.objects["trainingjobs", "ada-lab", "stdlib"]
    assert stored["spec"]["priority"] == 200
    assert stored["spec"]["engine"]["steps"] == 100


async def test_apply_takes_many_documents_from_standard_input(site: Site) -> None:
    text = yaml.safe_dump_all([JOB, SERVICE])
    done = await site.busbar("apply", "-f", "-", "-o", "name", stdin=text)
    assert done.lines == ["trainingjob/stdlib", "modelservice/chat"]
    assert (done.code, done.err) == (0, "")


async def test_a_wrong_field_is_told_with_its_path_and_nothing_is_made(site: Site) -> None:
    spec = {**JOB["spec"], "priority": 5000}
    done = await site.busbar("apply", "-f", site.manifest(document={**JOB, "spec": spec}))
    assert done.code == 1
    assert "priority" in done.err
    assert done.out == ""
    assert "stdlib" not in names(site)


async def test_a_kind_that_busbar_does_not_manage_is_refused_before_anything_is_made(site: Site) -> None:
    text = yaml.safe_dump_all([JOB, {"kind": "Pod", "metadata": {"name": "x"}}])
    done = await site.busbar("apply", "-f", "-", stdin=text)
    assert done.code == 2
    assert "kubectl apply" in done.err
    assert "stdlib" not in names(site)


async def test_a_file_that_is_absent_or_not_yaml_is_wrong_use(site: Site) -> None:
    assert (await site.busbar("apply", "-f", "/nowhere.yaml")).code == 2
    done = await site.busbar("apply", "-f", "-", stdin="a: [")
    assert done.code == 2
    assert "not YAML" in done.err


async def test_the_namespace_of_the_file_and_of_the_option_must_agree(site: Site) -> None:
    file = site.manifest(document={**JOB, "metadata": {"name": "x", "namespace": "ada-lab"}})
    done = await site.busbar("apply", "-f", file, "-n", "bob-lab")
    assert done.code == 2
    assert "ada-lab" in done.err


async def test_list_shows_the_own_namespace_and_nothing_of_others(site: Site) -> None:
    site.world.kube.status(TRAINING_JOBS, "ada-lab", "ada-run", phase="Running", reason="Training")
    await site.world.settle()
    done = await site.busbar("list")
    assert done.lines[0].split() == ["JOB", "PHASE", "REASON", "POOL", "STEPS", "LOSS", "AGE"]
    assert done.lines[1].split()[:3] == ["ada-run", "Running", "Training"]
    assert "ada-chat" in done.out
    assert "bob" not in done.out
    everywhere = await site.busbar("list", "jobs", "-A", "-o", "name")
    assert everywhere.lines == ["trainingjob/ada-run"]


async def test_list_speaks_json_and_yaml(site: Site) -> None:
    found = json.loads((await site.busbar("list", "jobs", "-o", "json")).out)
    assert [item["metadata"]["name"] for item in found["items"]] == ["ada-run"]
    again = yaml.safe_load((await site.busbar("list", "jobs", "-o", "yaml")).out)
    assert again == found


async def test_list_pools_and_nodes_and_models_and_tenants(site: Site) -> None:
    pools = await site.busbar("list", "pools")
    assert "h100" in pools.out
    assert "bobs-own" not in pools.out
    assert (await site.busbar("list", "nodes", "-o", "json")).code == 0
    assert (await site.busbar("list", "models", "-o", "name")).code == 0
    assert (await site.busbar("list", "tenants", "-o", "name")).lines == ["ada"]


async def test_power_shows_the_tree_of_feeds_and_the_nodes(site: Site) -> None:
    done = await site.busbar("power")
    assert done.code == 0, done.err
    assert done.lines[0].split() == (
        [
            "DOMAIN",
            "USE",
            "DRAW",
            "LEASED",
            "BUDGET",
            "HEADROOM",
            "NODES",
            "CAPPED",
            "SILENT",
            "SIMULATED",
            "REASON",
        ]
    )
    assert done.lines[1].startswith("row ")
    assert "[....................]    ?" in done.lines[1]
    assert done.lines[2].startswith("  rack-cpu ")
    assert "[########++++++++++..]  90%" in done.lines[2]
    assert done.lines[2].split()[-11:] == [
        "1.9",
        "kW",
        "2.0",
        "kW",
        "180",
        "W",
        "2",
        "1",
        "1",
        "2",
        "Leasing",
    ]
    assert done.lines[1].split()[4] == "-", "nothing is leased"
    assert "bobs" not in done.out
    nodes = await site.busbar("power", "nodes")
    shown = " ".join(nodes.lines[1].split())
    assert shown == "cpu-node-0 rack-cpu 800 W 850 W leased, capped 1.0 kW 8 simulated none 0s"
    assert nodes.lines[2].endswith("0s silent")
    assert len(json.loads((await site.busbar("power", "nodes", "-o", "json")).out)["items"]) == 4
    assert (await site.busbar("power", "-o", "name")).lines == ["row", "rack-cpu", "rack-h100"]


async def test_power_watch_looks_again_and_says_what_has_changed(site: Site) -> None:
    site.monkeypatch.setattr("busbar.cli.commands.power.time.sleep", lambda seconds: None)
    done = await site.busbar("power", "watch", "--times", "2")
    assert done.code == 0
    assert done.out == 2 * (await site.busbar("power")).out
    assert (await site.busbar("power", "watch", "--every", "0")).code == 2


def test_leases_limits_and_silence_that_have_changed_are_told() -> None:
    def node(name: str, lease: float | None = None, **more: Any) -> NodePower:
        state = LeaseState.STANDING if lease is None else LeaseState.LEASED
        return NodePower(name=name, lease_watts=lease, limits=state, silent=more.get("silent", False))

    before = {n.name: n for n in (node("a", 4000.0), node("b", 4000.0), node("c"), node("d"), node("e"))}
    now = {
        n.name: n
        for n in (node("a", 4050.0), node("b", 3000.0), node("c", 900.0), node("d", silent=True), node("f"))
    }
    assert list(moves(before, now)) == [
        "b: lease 4.0 kW -> 3.0 kW",
        "c: standing -> leased",
        "d: silent",
        "f: new",
        "e: gone",
    ]


async def test_power_explain_says_what_limits_a_node_or_the_nodes_of_a_job(site: Site) -> None:
    done = await site.busbar("power", "explain", "cpu-node-0")
    assert done.code == 0, done.err
    assert done.lines[0] == (
        "cpu-node-0 hangs on rack-cpu. It draws 800 W, at most 1.0 kW, and ? with its boards at their lowest limits. "
        "A lease of 850 W limits it, by the policy Lease of its domain."
    )
    assert [line.split()[0] for line in done.lines[1:]] == ["DOMAIN", "row", "rack-cpu"]
    told = json.loads((await site.busbar("power", "explain", "cpu-node-1", "-o", "json")).out)
    assert ([n["name"] for n in told["nodes"]], [d["name"] for d in told["domains"]]) == (
        ["cpu-node-1"],
        ["rack-cpu", "row"],
    )
    await site.busbar("apply", "-f", site.manifest())
    waits = await site.busbar("power", "explain", "stdlib")
    assert (waits.code, waits.out) == (0, "stdlib has no nodes: nobody has looked at it yet\n")
    stored = site.world.kube.objects["trainingjobs", "ada-lab", "stdlib"]
    stored["status"] = {"phase": "Queued", "message": "Needs 2,696 W on the power domain rack-cpu."}
    waits = await site.busbar("power", "explain", "job/stdlib", "-o", "table")
    assert waits.out == "stdlib has no nodes: Needs 2,696 W on the power domain rack-cpu.\n"
    place = {
        "id": "x",
        "pool": "cpu",
        "accelerator": "cpu",
        "pods": 2,
        "nodes": ["cpu-node-1", "gone", "cpu-node-1"],
    }
    stored["status"] = {"phase": "Running", "admission": {**place, "acceleratorsPerPod": 1}}
    placed = await site.busbar("power", "explain", "stdlib")
    assert placed.lines[0] == (
        "stdlib has its place on cpu-node-1, gone. Nothing is known of the watts of gone."
    )
    assert "It is silent: these are the numbers of 0s ago." in placed.lines[1]
    assert (await site.busbar("power", "explain", "nobody")).code == 3


def test_an_explained_node_says_why_nothing_limits_it() -> None:
    red = FeedPower(name="red", budget_watts=500.0, ready=False, reason="FloorAboveBudget", nodes=1)
    node = NodePower(
        name="n", feeds=("red",), watts=5.0, floor_watts=300.0, nameplate_watts=900.0, silent=False
    )
    says = {
        None: "Its agent may set no limits",
        LeaseState.STANDING: "no lease in force, so its boards are at their lowest limits",
        LeaseState.RELEASED: "Its boards are released",
    }
    for state, text in says.items():
        told = explained(node.model_copy(update={"limits": state}), {"red": red})
        assert text in told
        assert told.endswith("Even the lowest limits are above the budget of red.")
    assert explained(NodePower(name="n"), {}) == (
        "n hangs on no power domain. It has never reported what it draws."
    )


def test_a_bar_ends_at_the_budget_and_says_when_it_is_passed() -> None:
    assert bar(None, 0.0, 100.0) == "[....................]    ?"
    assert bar(0.0, 0.0, 100.0) == "[....................]   0%"
    assert bar(90.0, 20.0, 100.0) == "[##################++> 110%"
    assert bar(None, 50.0, 100.0) == "[++++++++++..........]  50%"


def test_a_tree_of_feeds_shows_each_once_whatever_their_parents() -> None:
    def feed(name: str, parent: str) -> FeedPower:
        return FeedPower(name=name, parent=parent, budget_watts=1.0, ready=False, reason="Cycle", nodes=0)

    found = [feed("a", "b"), feed("b", "a"), feed("c", "gone"), feed("d", "c")]
    assert [(each.name, depth) for each, depth in _ordered(found)] == [("c", 0), ("d", 1), ("a", 0), ("b", 0)]


async def test_list_profiles_shows_one_line_per_place(site: Site) -> None:
    at = {"accelerators": 2, "nodes": 1, "mode": "resident", "low": 90.0, "high": 110.4, "reports": 7}
    at |= {"predicted": 140.4, "memoryGib": 12.34, "measuredMemoryGib": 11.96}
    site.world.kube.put(
        PERFORMANCE_PROFILES,
        {
            "metadata": {"name": "small"},
            "spec": {"workloadClass": "llama-7M-3f9a0c11"},
            "status": {
                "cells": [
                    {
                        "accelerator": "cpu",
                        "linkClass": "ddr5",
                        **at,
                        "tokensPerSecond": 100.2,
                        "source": "Measured",
                    }
                ],
            },
        },
    )
    site.world.kube.status(TRAINING_JOBS, "ada-lab", "ada-run", workloadClass="llama-7M-3f9a0c11")
    await site.world.settle()
    shown = await site.busbar("list", "profiles")
    assert shown.lines[1].split() == [
        "llama-7M-3f9a0c11", "cpu/ddr5", "2", "1", "resident", "100", "90-110", "140", "12.3", "12.0", "Measured", "7", "-",
    ]  # fmt: skip
    assert (await site.busbar("list", "profiles", "-o", "name")).lines == ["small"]


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
            "stepSeconds": {"predicted": 1.2, "measured": 1.25, "ratio": 0.96},
        },
        "checkpoint": {"step": 10, "savedAt": "2026-03-01T12:00:00Z"},
        "admission": {
            "id": "x",
            "pool": "cpu",
            "accelerator": "A100",
            "pods": 1,
            "nodes": ["n"],
            "powerCapPercent": 70,
            "powerCapWatts": 280.0,
        },
        "usage": {"energyJoules": 3.6e6},
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
        "1.000 kWh so far, about 5.000 at its end",
        "1.25 s (predicted 1.2, 0.96 of it)",
        "5m00s",
        "Training on pool cpu.",
        "step 10",
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


async def test_preview_of_a_draft_that_waits_says_when_it_is_likely_to_start(site: Site) -> None:
    for index in range(2):
        bobs = {"metadata": {"name": f"bobs-{index}", "namespace": "bob-lab"}, "kind": "TrainingJob"}
        spec = {"template": {"image": "x"}, "shape": {"acceleratorsPerPod": 8}, "preemptible": False}
        site.world.kube.put(TRAINING_JOBS, {**bobs, "spec": {**spec, "accelerators": ["H100"]}})
        admission = {"pool": "h100", "accelerator": "H100", "nodes": [f"h100-node-{index}"]}
        site.world.kube.status(
            TRAINING_JOBS, "bob-lab", f"bobs-{index}", phase="Running", admission=admission
        )
    site.world.operator.ended = tuple(Finished("bob", 8000, time.time() + 1000.0 * i) for i in range(50))
    draft = {
        **JOB,
        "spec": {"template": {"image": "x"}, "shape": {"acceleratorsPerPod": 8}, "accelerators": ["H100"]},
    }
    done = await site.busbar("preview", "-f", "-", stdin=yaml.safe_dump(draft))
    assert done.code == 0
    assert re.search(r"When: +Likely in .+, nine times in ten within ", done.out)
    assert "of 20, 45% started before the likely time and 90% before the nine-in-ten time" in done.out
    assert "bob" not in done.out


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
    )
    await site.world.settle()
    done = await site.busbar("describe", "service/ada-chat")
    for text in ("the latency target", "98.0 % of 50 requests", "1 on l4 (3 wanted)", "Last scalings"):
        assert text in done.out, text
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


async def test_logs_prints_the_log_and_its_tail(site: Site) -> None:
    assert (await site.busbar("logs", "ada-run")).lines == ["ada step 1", "ada step 2"]


async def test_following_a_log_waits_for_its_pod(site: Site) -> None:
    site.monkeypatch.setattr("busbar.cli.commands.logs.PAUSE_S", 0.01)
    await site.busbar("apply", "-f", site.manifest())
    pod = {
        "metadata": {
            "name": "stdlib-1-0",
            "namespace": "ada-lab",
            "labels": {
                "busbar.dev/job": "stdlib",
                "busbar.dev/kind": "trainingjob",
                "busbar.dev/attempt": "1",
                "busbar.dev/rank": "0",
            },
        },
        "status": {"phase": "Pending"},
    }
    following = asyncio.create_task(site.busbar("logs", "-f", "stdlib"))
    site.world.kube.put(PODS, pod)
    site.world.kube.logs["ada-lab", "stdlib-1-0"] = [b"at last\n"]
    site.world.kube.put(PODS, {**pod, "status": {"phase": "Running"}})
    done = await following
    assert (done.code, done.lines) == (0, ["at last"])


async def test_following_a_log_that_will_never_begin_ends(site: Site) -> None:
    await site.busbar("apply", "-f", site.manifest())
    site.world.kube.status(TRAINING_JOBS, "ada-lab", "stdlib", phase="Suspended")
    await site.world.settle()
    done = await site.busbar("logs", "-f", "stdlib")
    assert done.code == 3
    assert "no pods" in done.err


async def test_cancel_and_resume(site: Site) -> None:
    assert (await site.busbar("cancel", "ada-run")).out == "trainingjob/ada-run cancelled\n"
    assert site.world.kube.objects["trainingjobs", "ada-lab", "ada-run"]["spec"]["suspend"] is True
    assert (await site.busbar("resume", "ada-run")).code == 0
    assert site.world.kube.objects["trainingjobs", "ada-lab", "ada-run"]["spec"]["suspend"] is False


async def test_preview_says_why_and_makes_nothing(site: Site) -> None:
    done = await site.busbar("preview", "-f", site.manifest(), "-o", "json")
    found = json.loads(done.out)
    assert isinstance(found["startsNow"], bool)
    assert found["reason"]
    assert done.code == (0 if found["possible"] else 1)
    table = await site.busbar("preview", "-f", site.manifest())
    assert "Why:" in table.out
    assert "stdlib" not in names(site)


async def test_preview_ends_with_1_for_a_job_that_can_never_start(site: Site) -> None:
    draft = {**JOB, "spec": {**JOB["spec"], "accelerators": ["H100"], "shape": {"acceleratorsPerPod": 64}}}
    done = await site.busbar("preview", "-f", "-", stdin=yaml.safe_dump(draft))
    assert done.code == 1
    assert "Never, unless something is changed" in done.out


async def test_preview_takes_the_one_job_of_a_file_and_no_more(site: Site) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "stdlib"}}
    assert (await site.busbar("preview", "-f", "-", stdin=yaml.safe_dump_all([claim, JOB]))).code in (0, 1)
    both = await site.busbar("preview", "-f", "-", stdin=yaml.safe_dump_all([JOB, SERVICE]))
    assert both.code == 2
    assert (await site.busbar("preview", "-f", "-", stdin=yaml.safe_dump(claim))).code == 2


async def test_service_plan_shows_the_mix_its_cost_and_what_is_not_known(site: Site) -> None:
    pool = PlannedPool(pool="l4", accelerator="L4", replicas=3, requests_per_second=2.5, cost_per_hour=0.7)
    spare = PlannedPool(
        pool="h100", accelerator="H100", replicas=0, requests_per_second=9.0, cost_per_hour=7.5, alone=1
    )
    site.world.operator.plan = ServicePlanAnswer(
        possible=True, reason="3 replicas carry 7 requests/s within the target.", rate=1.0,
        ttft_milliseconds=1000, tpot_milliseconds=50, percentile=99, pools=(spare, pool), cost_per_hour=2.1,
        prompt_tokens=400, output_tokens=200, notes=("No replica has measured its speed on A100 yet.",),
    )  # fmt: skip
    done = await site.busbar(
        "service", "plan", "ada-chat", "--rate", "7", "--slo-ttft", "1", "--slo-tpot", "0.05"
    )
    assert done.code == 0
    for words in (
        "7 requests/s", "1000 ms to the first token, 50 ms per later one", "2.10 per hour", "does not carry it",
        "1, 7.50 per hour", "No replica has measured its speed on A100 yet.", "400 tokens of prompt",
    ):  # fmt: skip
        assert words in done.out, done.out
    (sent,) = site.world.operator.planned
    assert (sent.rate, sent.ttft_milliseconds, sent.tpot_milliseconds, sent.percentile) == (7, 1000, 50, None)
    named = await site.busbar("service", "plan", "service/ada-chat", "--rate", "7", "-o", "name")
    assert named.lines == ["l4"]


async def test_service_plan_that_finds_nothing_says_why_and_fails(site: Site) -> None:
    done = await site.busbar("service", "plan", "ada-chat", "--rate", "7")
    assert (done.code, "Nothing is known." in done.out) == (1, True)
    for wrong in ("0", "-1", "nan", "inf", "many"):
        assert (await site.busbar("service", "plan", "ada-chat", "--rate", wrong)).code == 2
    assert (await site.busbar("service", "plan", "nothing", "--rate", "7")).code == 3


async def test_scale_sets_a_count_or_gives_it_back(site: Site) -> None:
    assert (await site.busbar("scale", "ada-chat", "--replicas", "2")).code == 0
    assert site.world.kube.objects["modelservices", "ada-lab", "ada-chat"]["spec"]["replicas"] == 2
    assert (await site.busbar("scale", "ada-chat", "--replicas", "auto")).code == 0
    assert "replicas" not in site.world.kube.objects["modelservices", "ada-lab", "ada-chat"]["spec"]
    assert (await site.busbar("scale", "ada-chat", "--replicas", "many")).code == 2


async def test_delete_by_name_by_file_and_of_what_is_gone(site: Site) -> None:
    await site.busbar("apply", "-f", site.manifest())
    assert (await site.busbar("delete", "-f", site.manifest())).out == "trainingjob/stdlib deleted\n"
    assert (await site.busbar("delete", "job/ada-run")).out == "trainingjob/ada-run deleted\n"
    assert names(site) == set()
    assert (await site.busbar("delete", "ada-run")).code == 3
    assert (await site.busbar("delete", "ada-run", "--ignore-not-found")).code == 0
    assert (await site.busbar("delete")).code == 2


async def test_a_viewer_may_read_but_not_write(site: Site) -> None:
    await site.be("vera")
    assert (await site.busbar("list")).code == 0
    done = await site.busbar("delete", "ada-run")
    assert done.code == 4
    assert "ada-run" in names(site)


async def test_a_token_is_printed_alone_and_works_and_can_be_ended(site: Site) -> None:
    made = await site.busbar("token", "create", "--scopes", "rest", "--description", "for the test")
    assert made.code == 0
    (text,) = made.lines
    site.monkeypatch.setenv("BUSBAR_TOKEN", text)
    listed = await site.busbar("token", "list", "-o", "json")
    (mine,) = [item for item in json.loads(listed.out)["items"] if item["description"] == "for the test"]
    assert text not in listed.out
    assert mine["scopes"] == ["rest"]
    assert mine["id"] in made.err
    table = await site.busbar("token", "list")
    assert "for the test" in table.out
    assert (await site.busbar("token", "revoke", mine["id"])).code == 0
    site.world.clock.forward(seconds=120)
    assert (await site.busbar("list")).code == 4


async def test_a_token_has_limits_that_the_list_shows(site: Site) -> None:
    made = await site.busbar(
        "token", "create", "--scopes", "inference", "--tenant", "ada",
        "--tokens-per-minute", "500", "--budget", "0.5/day", "--budget", "20/month",
    )  # fmt: skip
    assert made.code == 0, made.err
    assert "500 tokens/min, 0.5/day, 20/month" in (await site.busbar("token", "list")).out
    for wrong in ("20", "x/day", "-1/day", "nan/day", "5/hour"):
        assert "COST/PERIOD" in (await site.busbar("token", "create", "--budget", wrong)).err


async def test_all_tokens_but_the_one_in_use_are_ended_together(site: Site) -> None:
    await site.world.token("alice")
    assert (await site.busbar("token", "revoke")).code == 2
    assert (await site.busbar("token", "revoke", "x", "--everyone")).code == 2
    refused = await site.busbar("token", "revoke", "--everyone")
    assert refused.code == 4
    done = await site.busbar("token", "revoke", "--subject", "alice")
    assert (done.code, done.out) == (0, "1 tokens of alice revoked\n")
    live = await site.busbar("token", "list", "--state", "live", "-o", "name")
    assert len(live.out.split()) == 1


async def test_login_checks_the_token_and_keeps_it_readable_by_the_owner_only(site: Site) -> None:
    site.monkeypatch.delenv("BUSBAR_TOKEN")
    site.monkeypatch.delenv("BUSBAR_SERVER")
    wrong = await site.busbar("login", site.url, stdin="bb_" + "x" * 43 + "\n")
    assert wrong.code == 4
    file = site.folder / "busbar" / "config.yaml"
    assert not file.exists()
    done = await site.busbar("login", site.url, stdin=site.token + "\n")
    assert done.code == 0
    assert "alice" in done.out
    assert site.token not in done.out + done.err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (await site.busbar("list", "jobs", "-o", "name")).lines == ["trainingjob/ada-run"]


async def test_a_stored_token_is_not_shown_to_another_server(site: Site) -> None:
    site.monkeypatch.delenv("BUSBAR_TOKEN")
    site.monkeypatch.delenv("BUSBAR_SERVER")
    await site.busbar("login", site.url, stdin=site.token + "\n")
    done = await site.busbar("list", "--server", "http://127.0.0.1:1")
    assert done.code == 4
    assert "No token" in done.err


async def test_usage_is_shown_and_understands_how_long_ago(site: Site) -> None:
    site.world.clock.now = datetime.now(UTC)
    done = await site.busbar("usage", "--since", "7d")
    assert done.code == 0
    found = json.loads((await site.busbar("usage", "--by", "model", "-o", "json")).out)
    assert found["by"] == "model"
    assert (await site.busbar("usage", "--since", "yesterday")).code == 2


async def test_usage_is_exported_as_a_file_and_by_user_and_job(site: Site) -> None:
    usage = {"acceleratorSeconds": 7200.0, "energyJoules": 7.2e6, "cost": 5.0}
    for namespace, name in (("ada-lab", "ada-run"), ("bob-lab", "bob-run")):
        site.world.kube.status(TRAINING_JOBS, namespace, name, usage=usage)
    await site.world.settle()
    await site.world.services.history.flush()
    span = ("--since", (site.world.clock.now - timedelta(days=2)).isoformat(), "--until", (site.world.clock.now + timedelta(days=1)).isoformat())  # fmt: skip
    assert "Energy:" in (await site.busbar("describe", "job/ada-run")).out
    rows = [line.split() for line in (await site.busbar("usage", "--by", "job", *span)).lines]
    assert rows[2] == [
        "TENANT",
        "NAMESPACE",
        "NAME",
        "OBJECTS",
        "ACCELERATOR",
        "HOURS",
        "KWH",
        "COST",
        "LOST",
        "HOURS",
    ]
    assert rows[3:] == [["ada", "ada-lab", "ada-run", "1", "2.00", "2.000", "5.00", "0.00"]]
    found = json.loads((await site.busbar("usage", "--by", "user", "-o", "json", *span)).out)
    assert {item["tenant"] for item in found["items"]} <= {"ada"}
    told = (await site.busbar("usage", "--by", "job", "-o", "csv", *span)).lines
    assert told[0].startswith("tenant,namespace,name,objects,accelerator_hours")
    assert told[1].startswith("ada,ada-lab,ada-run,1,2,")
    focus = (await site.busbar("usage", "-o", "focus", "--currency", "EUR", *span)).lines
    assert focus[0].startswith("BilledCost,BillingAccountId")
    assert len(focus) == 2
    assert (await site.busbar("usage", "-o", "focus")).code == 2
    assert (await site.busbar("usage", "--by", "day", "-o", "csv")).code == 2
    assert "2.000" in (await site.busbar("usage", *span)).out


BUDGETS = [
    {
        "period": "month",
        "started": "2026-11-01T00:00:00Z",
        "ends": "2026-12-01T00:00:00Z",
        "acceleratorHours": 75.0,
        "acceleratorHoursLeft": 25.0,
        "cost": 3.0,
        "kilowattHours": 48.2,
        "kilowattHoursLeft": 1.8,
        "usedPercent": 96.4,
        "state": "Warning",
        "exhausted": "2026-11-27T14:30:00Z",
        "exhaustedP50": "2026-11-27T16:00:00Z",
        "exhaustedP90": "2026-11-28T08:15:00Z",
    }
]
SPENT = ["2026-11-27", "14:30", "2026-11-27", "16:00", "2026-11-28", "08:15"]


async def test_budgets_are_shown_by_limit_and_only_those_of_own_tenants(site: Site) -> None:
    assert (await site.busbar("budget")).out == "No tenant that you may see has a budget.\n"
    for tenant in ("ada", "bob-corp"):
        site.world.kube.status(TENANTS, "", tenant, budgets=BUDGETS)
    await site.world.settle()
    lines = [line.split() for line in (await site.busbar("budget")).lines]
    assert lines[1:] == [
        ["ada", "month", "accelerator-hours", "75", "25", "75%", "Warning", *SPENT, "2026-12-01", "00:00"],
        ["ada", "month", "kWh", "48.2", "1.8", "96%", "Warning", *SPENT, "2026-12-01", "00:00"],
    ]  # fmt: skip
    spent: dict[str, object] = {
        "period": "day",
        "started": "2026-11-24T00:00:00Z",
        "ends": "2026-11-25T00:00:00Z",
    }
    spent |= {"cost": 4.0, "costLeft": 0.0, "state": "Spent"}
    site.world.kube.status(TENANTS, "", "ada", inference={"budgets": [spent]})
    await site.world.settle()
    (line,) = [line.split() for line in (await site.busbar("budget")).lines if "inference" in line]
    assert line[:6] == ["ada", "day", "inference", "cost", "4", "0"]
    found = json.loads((await site.busbar("budget", "ada", "-o", "json")).out)
    assert found["items"][0]["inference"] == [spent]
    assert [item["tenant"] for item in found["items"]] == ["ada"]
    assert found["items"][0]["budgets"][0]["kilowattHoursLeft"] == 1.8
    refused = await site.busbar("budget", "bob-corp")
    assert (refused.code, "no tenant 'bob-corp' that you may see" in refused.err) == (3, True)


async def test_names_of_objects_are_completed(site: Site) -> None:
    site.monkeypatch.setattr("busbar.cli.completions.PATIENCE_S", 30.0)
    site.monkeypatch.setenv("COMP_WORDS", "busbar describe ada")
    site.monkeypatch.setenv("COMP_CWORD", "2")
    site.monkeypatch.setenv("_BUSBAR_COMPLETE", "bash_complete")
    done = await site.busbar()
    assert done.lines == ["plain,ada-run", "plain,ada-chat"]


async def test_watching_ends_when_the_job_ends_and_says_when_it_failed(site: Site) -> None:
    site.world.kube.status(TRAINING_JOBS, "ada-lab", "ada-run", phase="Succeeded")
    await site.world.settle()
    assert (await site.busbar("describe", "ada-run", "--watch")).code == 0
    site.world.kube.status(
        TRAINING_JOBS, "ada-lab", "ada-run", phase="Failed", reason="RetriesExhausted", message="It broke."
    )
    await site.world.settle()
    done = await site.busbar("describe", "ada-run", "--watch")
    assert done.code == 6
    assert "RetriesExhausted" in done.err
    assert "It broke." in done.err


def test_describe_says_how_much_is_trained_beside_frozen_parts() -> None:
    assert _trained({"parameters": 5000, "trainableParameters": 1250}) == (
        "weights that are not frozen: 1,250 of 5,000 parameters"
    )
    assert _trained({"parameters": 5000, "trainableParameters": 5000}) is None
    assert _trained({}) is None
