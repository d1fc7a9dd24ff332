"""The wire contracts: forms on the wire, bearers, tokens, and cached answers of the API server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from busbar.kube.contracts import bearers, keys, workload
from busbar.kube.contracts.auth import (
    AUDIENCE_OPERATOR,
    NEGATIVE_S,
    POSITIVE_S,
    Access,
    Caller,
    ExpiringCache,
    Reviewer,
    ReviewError,
)
from busbar.kube.contracts.bearers import Role
from busbar.kube.contracts.demand import Demand, ServiceDemand
from busbar.kube.contracts.report import TrainingReport
from busbar.kube.contracts.routes import Endpoint, Routes, ServiceRoute
from busbar.kube.contracts.usage import MAX_BATCH, UsageBatch, UsageRecord
from busbar.kube.contracts.workload import (
    CheckpointReport,
    Env,
    MemoryReport,
    ServingStatus,
    TrainingState,
    TrainingStatus,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Server:
    """Answers reviews and counts them."""

    answer: dict[str, Any]
    asked: list[Mapping[str, Any]] = field(default_factory=list)
    fails: bool = False

    async def __call__(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.fails:
            raise ReviewError("away")
        self.asked.append(body)
        return {"status": self.answer}


def yes(audience: str | None = AUDIENCE_OPERATOR) -> dict[str, Any]:
    return {
        "authenticated": True,
        "user": {"username": "system:serviceaccount:busbar-system:busbar-api", "groups": ["g"]},
        **({"audiences": [audience]} if audience else {}),
    }


async def test_a_valid_token_is_asked_for_once_a_minute() -> None:
    clock, server = Clock(), Server(yes())
    reviewer = Reviewer(server, clock)
    for _ in range(3):
        caller = await reviewer.authenticate("t", AUDIENCE_OPERATOR)
        assert caller is not None
        assert caller.is_service_account("busbar-system", "busbar-api")
    assert len(server.asked) == 1
    clock.now = POSITIVE_S
    await reviewer.authenticate("t", AUDIENCE_OPERATOR)
    assert len(server.asked) == 2


async def test_an_invalid_token_is_asked_for_again_after_five_seconds() -> None:
    clock, server = Clock(), Server({"authenticated": False})
    reviewer = Reviewer(server, clock)
    assert await reviewer.authenticate("t", AUDIENCE_OPERATOR) is None
    assert await reviewer.authenticate("t", AUDIENCE_OPERATOR) is None
    assert len(server.asked) == 1
    clock.now = NEGATIVE_S
    server.answer = yes()
    assert await reviewer.authenticate("t", AUDIENCE_OPERATOR) is not None


@pytest.mark.parametrize("audience", [None, "another"])
async def test_a_token_of_another_audience_is_nobodys(audience: str | None) -> None:
    assert await Reviewer(Server(yes(audience))).authenticate("t", AUDIENCE_OPERATOR) is None


async def test_answers_for_one_audience_do_not_count_for_another() -> None:
    server = Server(yes())
    reviewer = Reviewer(server)
    assert await reviewer.authenticate("t", AUDIENCE_OPERATOR) is not None
    assert await reviewer.authenticate("t", "busbar-api") is None


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "abc"])
async def test_without_a_bearer_the_server_is_not_asked(header: str | None) -> None:
    server = Server(yes())
    assert await Reviewer(server).authenticate_header(header, AUDIENCE_OPERATOR) is None
    assert server.asked == []


async def test_an_unreachable_server_is_neither_yes_nor_no() -> None:
    server = Server(yes(), fails=True)
    reviewer = Reviewer(server)
    with pytest.raises(ReviewError):
        await reviewer.authenticate("t", AUDIENCE_OPERATOR)
    server.fails = False
    assert await reviewer.authenticate("t", AUDIENCE_OPERATOR) is not None


async def test_access_carries_the_caller_and_only_the_given_attributes() -> None:
    server = Server({"allowed": True})
    caller = Caller("alice", groups=("a", "b"), extra=(("scopes", ("x",)),))
    reviewer = Reviewer(server)
    assert await reviewer.is_allowed(caller, Access("get", "busbar.dev", "trainingjobs", namespace="n"))
    assert server.asked[0]["spec"] == {
        "user": "alice",
        "uid": "",
        "groups": ["a", "b"],
        "extra": {"scopes": ["x"]},
        "resourceAttributes": {
            "verb": "get",
            "group": "busbar.dev",
            "resource": "trainingjobs",
            "namespace": "n",
        },
    }


async def test_access_of_one_caller_is_not_anothers() -> None:
    server = Server({"allowed": True})
    reviewer = Reviewer(server)
    access = Access("get", "busbar.dev", "trainingjobs")
    assert await reviewer.is_allowed(Caller("alice"), access)
    server.answer = {"allowed": True, "denied": True}
    assert not await reviewer.is_allowed(Caller("bob"), access)
    assert len(server.asked) == 2


def test_cache_forgets_the_oldest_first() -> None:
    cache: ExpiringCache[int] = ExpiringCache(Clock(), limit=2)
    for key in "abc":
        cache.put(key, 1, 10)
    assert [cache.get(key)[0] for key in "abc"] == [False, True, True]


def test_bearer_differs_by_uid_and_key_and_is_checked_whole() -> None:
    keys, uids = (b"k" * 16, b"l" * 16), ("a", "b")
    derived = {bearers.bearer_for(key, uid, role) for key in keys for uid in uids for role in Role}
    former = {bearers.former_bearer_for(key, uid) for key in keys for uid in uids}
    assert len(derived | former) == 12 + 4
    token = bearers.bearer_for(b"k" * 16, "a", Role.READ)
    own = {Role.READ: token}
    assert bearers.is_allowed("/status", f"Bearer {token}", own)
    for wrong in (
        None,
        token,
        f"Bearer {token[:-1]}",
        f"Bearer {token}x",
        f"Basic {token}",
        "Bearer ",
        "Bearer \udcff",
    ):
        assert not bearers.is_allowed("/status", wrong, own)


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("/health", None),
        ("/ready", None),
        ("/status", Role.READ),
        ("/metrics", Role.READ),
        ("/anything", Role.READ),
        ("/v1/models", Role.INFER),
        ("/v1/chat/completions", Role.INFER),
        ("/checkpoint", Role.COMMAND),
        ("/drain", Role.COMMAND),
        ("/sleep", Role.COMMAND),
        ("/wake_up", Role.COMMAND),
        ("/migrate", Role.COMMAND),
        ("/migrate/begin", Role.INFER),
        ("/is_sleeping", Role.READ),
    ],
)
def test_each_path_is_opened_by_one_bearer_and_no_other(path: str, role: Role | None) -> None:
    known = {role: f"the {role}" for role in Role}
    opened = {r for r in Role if bearers.is_allowed(path, f"Bearer the {r}", known)}
    assert opened == (set(Role) if role is None else {role})
    assert bearers.is_allowed(path, "Bearer ", {}) == (role is None)


def test_bearers_are_files_of_their_roles_and_an_empty_one_opens_nothing(tmp_path: Path) -> None:
    assert bearers.bearers_in(tmp_path / "absent") == {}
    (tmp_path / "read").write_text("r\n")
    (tmp_path / "command").write_text(" \n")
    assert bearers.bearers_in(tmp_path) == {Role.READ: "r"}


def test_the_secret_of_an_object_has_a_bounded_name_that_changes_with_the_key() -> None:
    uid = "0b7d3d1e-2d5c-4c57-9a8e-0123456789ab"
    names = {bearers.secret_name(key, uid) for key in (b"k" * 16, b"l" * 16)}
    assert len(names) == 2
    assert all(len(name) <= 63 and uid in name for name in names)


def test_a_damaged_key_is_refused() -> None:
    with pytest.raises(ValueError, match="busbar-workload-key is damaged"):
        bearers.bearer_for(b"short", "a", Role.READ)


def test_termination_message_fits_and_keeps_the_numbers() -> None:
    status = TrainingStatus(
        phase=TrainingState.DONE,
        message="m" * 1024,
        step=265,
        total_steps=265,
        loss=2.5,
        checkpoint=CheckpointReport(step=250, saved_at=NOW, bytes=1),
        losses=[(i, 1.0) for i in range(200)],
        report=TrainingReport(
            workload_class="\U0001f680" * 253, accelerator="\U0001f680" * 253, mode="\U0001f680" * 253
        ),
        memory=MemoryReport(device_owners={"optimizer": 7}),
    )
    text = status.termination_message()
    assert len(text.encode()) <= workload.TERMINATION_LIMIT_BYTES
    back = TrainingStatus.model_validate_json(text)
    assert (back.step, back.loss, back.losses, back.report) == (265, 2.5, [], None)
    assert back.memory == MemoryReport()
    said = TrainingReport(workload_class="x", accelerator="cpu", tokens_per_second=1.5)
    small = TrainingStatus(step=1, report=said, message="é" * 1024)
    assert TrainingStatus.model_validate_json(small.termination_message()).report == said


@pytest.mark.parametrize(
    "report", [{}, {"class": 7}, "x", {"class": "c", "accelerator": "L4", "mode": 3}], ids=str
)
def test_a_report_that_cannot_be_read_hides_nothing_else(report: object) -> None:
    status = TrainingStatus.model_validate({"phase": "Training", "step": 3, "report": report})
    assert (status.step, status.report) == (3, None)
    serving = ServingStatus.model_validate({"ready": True, "report": report})
    assert (serving.ready, serving.report) == (True, None)


def test_status_of_a_newer_engine_is_understood() -> None:
    status = TrainingStatus.model_validate({"phase": "Training", "step": 3, "somethingNew": {"a": 1}})
    assert status.step == 3


def test_wire_forms_are_camel_case() -> None:
    route = ServiceRoute(
        tenant="t", namespace="n", name="s", uid="u", model_id="m", bearer="secret",
        endpoints=[Endpoint(pod="s-0", url="http://10.0.0.1:9400", ready=True)],
    )  # fmt: skip
    document = Routes(revision=7, services=[route]).to_wire()
    assert document["services"][0]["modelId"] == "m"
    assert document["services"][0]["endpoints"][0]["draining"] is False
    assert Routes.model_validate(document).services[0].key == "n/s"
    assert "secret" not in repr(route)
    demand = Demand(services=[ServiceDemand(namespace="n", name="s", in_flight=2)], as_of=NOW).to_wire()
    assert demand["services"][0]["inFlight"] == 2
    assert demand["asOf"] == "2026-01-02T03:04:05Z"


def test_usage_is_bounded_and_counts_from_one() -> None:
    record = {
        "seq": 1, "keyId": "k", "tenant": "t", "namespace": "n", "service": "s", "model": "m",
        "promptTokens": 1, "completionTokens": 2, "requestId": "r", "finishedAt": NOW.isoformat(),
    }  # fmt: skip
    assert UsageRecord.model_validate(record).completion_tokens == 2
    with pytest.raises(ValidationError):
        UsageRecord.model_validate(record | {"seq": 0})
    with pytest.raises(ValidationError):
        UsageRecord.model_validate(record | {"promptTokens": -1})
    with pytest.raises(ValidationError):
        UsageBatch.model_validate({"gateway": "g", "records": [record] * (MAX_BATCH + 1)})


def test_tokens_are_recognised_and_only_their_digest_is_kept() -> None:
    token = keys.new_token()
    assert keys.is_token(token)
    assert len(token) == 46
    assert keys.new_token() != token
    assert keys.KeyLookup(sha256=keys.digest_of(token))
    assert keys.shown_prefix_of(token) == token[:10]
    for wrong in ("", "bb_", token + "a", token[:-1] + "!", "sk-" + token[3:], token + "\n"):
        assert not keys.is_token(wrong)


def test_environment_names_are_unique() -> None:
    assert len({str(name) for name in Env}) == len(Env)


def test_contracts_and_types_load_no_server_and_no_torch() -> None:
    program = (
        "import sys, json\n"
        "import busbar.kube.types, busbar.kube.contracts.auth, busbar.kube.contracts.workload\n"
        "import busbar.kube.contracts.routes, busbar.kube.contracts.usage\n"
        "print(json.dumps([m for m in ('torch', 'aiohttp', 'kopf', 'fastapi', 'numpy') if m in sys.modules]))"
    )
    path = str(Path(__file__).resolve().parents[2] / ".src")
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONPATH": path}
    )
    assert json.loads(out.stdout) == []
