"""The commands against the real API: what they do, what they print, what they exit with."""

from __future__ import annotations

import asyncio
import json
import re
import time

import yaml
from tests.api.conftest import JOB, SERVICE
from tests.cli.conftest import Site

from busbar.kube.contracts.service_plan import PlannedPool, ServicePlanAnswer
from busbar.kube.resources import PERFORMANCE_PROFILES, PODS, TRAINING_JOBS
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
    done = await site.busbar("apply", "-f", "-", stdin="kind: TrainingJob\nspec: {a: 1}\nspec: {b: 2}\n")
    assert done.code == 2
    assert "'spec' is there twice in one object; name it once" in done.err


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
                    },
                    {
                        "accelerator": "cpu",
                        "accelerators": 2,
                        "powerCapPercent": 70,
                        "tokensPerSecond": 80.0,
                        "watts": 262.4,
                        "phaseWatts": {"prefill": 280.0, "decode": 199.6},
                        "source": "Ratio",
                    },
                ],
            },
        },
    )
    site.world.kube.status(TRAINING_JOBS, "ada-lab", "ada-run", workloadClass="llama-7M-3f9a0c11")
    await site.world.settle()
    shown = await site.busbar("list", "profiles")
    assert shown.lines[1].split() == [
        "llama-7M-3f9a0c11", "cpu/ddr5", "2", "1", "resident", "-", "100", "90-110", "140", "12.3", "12.0", "-", "Measured",
        "7", "-",
    ]  # fmt: skip
    assert "70 %" in shown.lines[2]
    assert "262 (prefill 280, decode 200)" in shown.lines[2]
    assert (await site.busbar("list", "profiles", "-o", "name")).lines == ["small"]


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
