"""The port `busbar`: authorization, its answers, and a checkpoint on request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from busbar.kube.contracts.bearers import Bearers, Role
from busbar.kube.contracts.workload import TERMINATION_LIMIT_BYTES, TrainingStatus
from busbar.workloads.training.control import Control
from busbar.workloads.training.status import Status
from busbar.workloads.training.status_server import Port

TOKEN, COMMAND = "t0ken", "c0mmand"
BEARERS = {Role.READ: TOKEN, Role.COMMAND: COMMAND}


class Served:
    def __init__(self, bearers: Bearers = BEARERS) -> None:
        self.status, self.control = Status(clock=lambda: 1000.0), Control()
        self.port = Port(self.status, self.control, bearers, "127.0.0.1", 0)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port.number}", timeout=60)

    def get(self, path: str, token: str | None = TOKEN) -> httpx.Response:
        return self.client.get(path, headers={} if token is None else {"Authorization": f"Bearer {token}"})

    def close(self) -> None:
        self.client.close()
        self.port.close()


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.close()


def train_some(status: Status) -> None:
    status.update(phase="Training", totalSteps=10, mode="optimizer-offload")
    for step in range(1, 7):
        status.finished_step(step, 5.0 - step / 10, seconds=2.0 if step <= 3 else 0.5, tokens=100)
    status.durable_checkpoint(4, 940.0, 12345)


@pytest.mark.parametrize("path", ["/status", "/metrics", "/nothing"])
@pytest.mark.parametrize("token", [None, "wrong", "t0kenx", "tökén"])
def test_without_the_bearer_there_is_no_answer(served: Served, path: str, token: str | None) -> None:
    headers = {} if token is None else {b"Authorization": f"Bearer {token}".encode()}
    response = served.client.get(path, headers=headers)
    assert response.status_code == 401
    assert "step" not in response.text


def test_saving_needs_the_bearer(served: Served) -> None:
    served.control.open()
    assert served.client.post("/checkpoint").status_code == 401
    headers = {"Authorization": f"Bearer {TOKEN}"}  # the bearer for reading gives no right to command
    assert served.client.post("/checkpoint", headers=headers).status_code == 401
    assert served.get("/status", COMMAND).status_code == 401
    assert served.control.take_requests() == []


def test_a_pod_without_a_token_refuses_everything_but_probes() -> None:
    server = Served({})
    for given in (None, "x"):
        assert server.get("/status", given).status_code == 401
    assert server.get("/health", token=None).status_code == 200
    server.close()


def test_ready_follows_the_phase(served: Served) -> None:
    assert served.get("/ready", None).status_code == 503
    served.status.update(phase="Training")
    assert served.get("/ready", None).status_code == 200
    served.status.update(phase="Failed")
    assert served.get("/ready", None).status_code == 503


def test_the_status_is_the_contracts(served: Served) -> None:
    train_some(served.status)
    document = served.get("/status").json()
    status = TrainingStatus.model_validate(document)
    assert (status.phase, status.step, status.total_steps) == ("Training", 6, 10)
    assert status.tokens_per_second == 200.0  # the median after three steps of warm-up
    assert status.eta_seconds == 2.0
    assert status.checkpoint is not None
    assert status.checkpoint.step == 4
    assert status.losses[-1] == (6, 4.4)
    unknown = set(document) - {field.alias for field in TrainingStatus.model_fields.values()}
    assert unknown == set()


def test_metrics_carry_the_same_numbers(served: Served) -> None:
    train_some(served.status)
    served.status.count_traffic({"load": 64, "store": 32}, 0.25, {"load": 0.5, "store": 0.125})
    served.status.update(memory={"deviceOwners": {"parameters": 8}, "hostOwners": {"optimizer": 16}})
    served.status.update(phaseSeconds={"forward": 1.5, "backward": 3.0})
    served.status.update(workers=[{"rank": 1, "ownSeconds": 1.5}, {"rank": 0, "ownSeconds": 0.5}])
    found = {
        (sample.name.removeprefix("busbar_training_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(served.get("/metrics").text)
        for sample in family.samples
    }
    assert found == {
        ("step",): 6,
        ("steps",): 10,
        ("loss",): 4.4,
        ("tokens_total",): 600,
        ("tokens_per_second",): 200,
        ("lost_steps",): 0,
        ("skipped_steps",): 0,
        ("replay_mismatches",): 0,
        ("checkpoint_step",): 4,
        ("checkpoint_bytes",): 12345,
        ("checkpoint_age_seconds",): 60,
        ("checkpoint_stall_seconds_total",): 0.25,
        ("phase_seconds_total", "forward"): 1.5,
        ("phase_seconds_total", "backward"): 3.0,
        ("phase_seconds_total", "exchange"): 0,
        ("phase_seconds_total", "load"): 0,
        ("phase_seconds_total", "wait"): 0,
        ("phase_seconds_total", "update"): 0,
        ("phase_seconds_total", "other"): 0,
        ("rank_own_seconds", "1"): 1.5,
        ("rank_own_seconds", "0"): 0.5,
        ("link_bytes_total", "load"): 64,
        ("link_bytes_total", "store"): 32,
        ("link_seconds_total", "load"): 0.5,
        ("link_seconds_total", "store"): 0.125,
        ("arena_bytes", "device", "parameters"): 8,
        ("arena_bytes", "host", "optimizer"): 16,
    }


def test_only_the_last_two_hundred_losses_are_shown(served: Served) -> None:
    for step in range(1, 302):
        served.status.finished_step(step, 1.0, 0.1, 1)
    losses = served.get("/status").json()["losses"]
    assert (len(losses), losses[0][0], losses[-1][0]) == (200, 102, 301)


def post_in_background(served: Served) -> tuple[threading.Thread, dict[str, Any]]:
    answer: dict[str, Any] = {}

    def post() -> None:
        response = served.client.post("/checkpoint", headers={"Authorization": f"Bearer {COMMAND}"})
        answer.update(code=response.status_code, body=response.json())

    thread = threading.Thread(target=post)
    thread.start()
    return thread, answer


def take_one(control: Control) -> Any:
    """A checkpoint request that an HTTP thread is about to make."""
    while not (requests := control.take_requests()):
        threading.Event().wait(0.001)
    return requests[0]


def test_a_save_is_answered_when_it_is_durable(served: Served) -> None:
    served.control.open()
    thread, answer = post_in_background(served)
    request = take_one(served.control)
    assert answer == {}
    request.step = 17
    request.answered.set()
    thread.join(60)
    assert answer == {"code": 200, "body": {"step": 17, "durable": True}}


def test_a_save_that_fails_says_why(served: Served) -> None:
    served.control.open()
    thread, answer = post_in_background(served)
    request = take_one(served.control)
    request.problem = "no space left"
    request.answered.set()
    thread.join(60)
    assert answer["code"] == 409
    assert answer["body"]["error"]["message"] == "no space left"


def test_a_save_before_and_after_training_is_refused_at_once(served: Served) -> None:
    for closed in ("preparing", "over"):
        thread, answer = post_in_background(served)
        thread.join(60)
        assert answer["code"] == 409
        assert closed in answer["body"]["error"]["message"]
        served.control.open()
        served.control.close("the run is over")


def test_the_termination_message_is_the_status_without_losses(tmp_path: Path) -> None:
    status = Status()
    train_some(status)
    status.update(message="x" * 5000, report={"class": "y" * 253, "accelerator": "cpu"})
    log = tmp_path / "termination-log"
    status.write_termination_message(log)
    assert not log.exists()
    log.touch()
    status.write_termination_message(log)
    assert len(log.read_bytes()) <= TERMINATION_LIMIT_BYTES
    message = TrainingStatus.model_validate(json.loads(log.read_text()))
    assert (message.step, message.losses) == (6, [])


def test_a_loss_that_is_no_number_leaves_the_status_valid_json(served: Served) -> None:
    train_some(served.status)
    served.status.finished_step(7, float("nan"), seconds=0.5, tokens=100)
    text = served.get("/status").text

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    document = json.loads(text, parse_constant=refuse)
    assert (document["step"], document["loss"]) == (7, None)
    assert document["losses"][-1][0] == 6
