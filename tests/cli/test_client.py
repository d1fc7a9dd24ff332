"""The client: answers become typed results, and every failure an error that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import httpx2
import pytest
from pydantic import BaseModel

from busbar.api.routes import schemas
from busbar.cli import completions, errors, results
from busbar.cli.client import Client, kind_of
from busbar.cli.main import busbar
from busbar.cli.results import MODEL_SERVICE, TRAINING_JOB, Object
from busbar.kube.types import TrainingJob

JOB: dict[str, Any] = {
    "apiVersion": "busbar.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "j", "namespace": "n"},
    "spec": {"template": {"image": "x"}},
    "status": {"phase": "Running", "progress": {"step": 3, "totalSteps": 10, "somethingNew": 1}},
}


def client(handle: Callable[[httpx2.Request], httpx2.Response]) -> Client:
    return Client("http://busbar.test", "bb_secret", transport=httpx2.MockTransport(handle))


def answering(status: int, document: object = None, **more: Any) -> Client:
    return client(lambda request: httpx2.Response(status, json=document, **more))


def told(code: str, message: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, **({"field": field} if field else {})}}


@pytest.mark.parametrize(
    ("status", "kind", "exit_code"),
    [
        (400, errors.Invalid, 1),
        (401, errors.NotAuthorised, 4),
        (403, errors.NotAuthorised, 4),
        (404, errors.NotFound, 3),
        (409, errors.BusbarError, 1),
        (422, errors.Invalid, 1),
        (429, errors.BusbarError, 1),
        (503, errors.Unreachable, 5),
    ],
)
def test_an_error_of_the_server_keeps_its_words(
    status: int, kind: type[errors.BusbarError], exit_code: int
) -> None:
    with pytest.raises(kind, match="what happened") as caught:
        answering(status, told("Code", "what happened", "spec.steps")).me()
    assert type(caught.value) is kind
    assert (caught.value.exit_code, caught.value.code, caught.value.field) == (
        exit_code,
        "Code",
        "spec.steps",
    )


def test_a_server_that_is_down_is_unreachable() -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("Connection refused", request=request)

    with pytest.raises(errors.Unreachable, match=r"http://busbar\.test does not answer"):
        client(refuse).me()


def test_a_server_that_is_not_busbar_is_told_so() -> None:
    with pytest.raises(errors.BusbarError, match="not as Busbar does"):
        client(lambda request: httpx2.Response(404, text="<html>")).me()
    with pytest.raises(errors.BusbarError, match="not as Busbar does"):
        client(lambda request: httpx2.Response(200, text="<html>")).me()
    with pytest.raises(errors.Unreachable):
        client(lambda request: httpx2.Response(502, text="Bad Gateway")).me()


def test_a_redirect_is_not_followed() -> None:
    seen: list[str] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        seen.append(str(request.url))
        return httpx2.Response(302, headers={"Location": "http://elsewhere/"})

    with pytest.raises(errors.BusbarError):
        client(handle).me()
    assert seen == ["http://busbar.test/api/v1alpha1/me"]


def test_an_address_that_is_none_is_wrong_use() -> None:
    for server in ("busbar.example", "ftp://x", "http://", ""):
        with pytest.raises(errors.UsageProblem):
            Client(server, "t")


def test_objects_are_typed_and_stay_whole() -> None:
    found = answering(200, JOB).get(TRAINING_JOB, "n", "j")
    assert (found.reference, found.phase, found.progress.step, found.progress.total_steps) == (
        "trainingjob/j",
        "Running",
        3,
        10,
    )
    assert found.document == JOB
    typed = found.typed()
    assert isinstance(typed, TrainingJob)
    assert typed.spec.template is not None


def test_names_are_quoted_in_paths() -> None:
    paths: list[bytes] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        paths.append(request.url.raw_path)
        return httpx2.Response(204)

    client(handle).delete(TRAINING_JOB, "n/../x", "a?b")
    assert paths == [b"/api/v1alpha1/namespaces/n%2F..%2Fx/trainingjobs/a%3Fb"]


def test_the_token_is_sent_and_never_shown() -> None:
    headers: list[str] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        headers.append(request.headers["Authorization"])
        return httpx2.Response(200, json={"subject": "ann"})

    here = client(handle)
    assert here.me().subject == "ann"
    assert headers == ["Bearer bb_secret"]
    assert "bb_secret" not in repr(here)


def test_a_new_token_is_not_in_its_own_repr() -> None:
    made = answering(201, {"token": "bb_text", "info": {"id": "1"}}).create_token(scopes=["rest"])
    assert made.token == "bb_text"
    assert "bb_text" not in repr(made)


def test_tokens_come_from_page_after_page_and_no_further_than_asked() -> None:
    asked: list[dict[str, str]] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        asked.append(dict(request.url.params))
        at = int(asked[-1].get("before", 5))
        items = [{"id": str(at - 1)}, {"id": str(at - 2)}][: at - 1]
        return httpx2.Response(200, json={"items": items, "next": items[-1]["id"] if at > 2 else None})

    here = client(handle)
    assert [t.id for t in here.tokens(subject="ann", state="live")] == ["4", "3", "2", "1"]
    assert [(a["subject"], a["state"], a.get("before")) for a in asked] == [
        ("ann", "live", None),
        ("ann", "live", "3"),
        ("ann", "live", "1"),
    ]
    asked.clear()
    assert next(here.tokens()).id == "4"
    assert len(asked) == 1


def test_scaling_and_giving_back() -> None:
    bodies: list[Any] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        bodies.append(json.loads(request.content))
        return httpx2.Response(200, json={"metadata": {"name": "s"}})

    here = client(handle)
    here.scale("n", "s", 2)
    assert here.scale("n", "s", None).kind is MODEL_SERVICE
    assert bodies == [{"replicas": 2}, {"replicas": None}]


def test_logs_come_line_by_line_and_errors_of_them_are_errors() -> None:
    found = Object(TRAINING_JOB, JOB)
    here = client(lambda request: httpx2.Response(200, text="a\nb\n"))
    assert list(here.logs(found)) == ["a", "b"]
    with pytest.raises(errors.NotFound, match="no pods"):
        list(answering(404, told("NotFound", "it has no pods")).logs(found))


def test_a_manifest_of_another_kind_is_refused() -> None:
    with pytest.raises(errors.UsageProblem, match="kubectl apply"):
        kind_of({"kind": "Tenant"})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (results.Me, schemas.Me),
        (results.Membership, schemas.MembershipInfo),
        (results.Preview, schemas.PreviewInfo),
        (results.Change, schemas.ChangeInfo),
        (results.Event, schemas.EventInfo),
        (results.Token, schemas.TokenInfo),
        (results.NewToken, schemas.TokenCreated),
        (results.Usage, schemas.UsageTotals),
        (results.InferenceUsage, schemas.InferenceUsage),
        (results.ComputeUsage, schemas.ComputeUsage),
        (results.Node, schemas.NodeInfo),
        (results.Model, schemas.ModelInfo),
    ],
)
def test_a_result_has_no_field_that_the_server_does_not_send(
    ours: type[BaseModel], theirs: type[BaseModel]
) -> None:
    assert set(ours.model_fields) <= set(theirs.model_fields)


@pytest.mark.parametrize(
    "server",
    ["busbar.example", "ftp://busbar.example", "http://", "http://[::1", "http://h:port", "http://h:0"],
)
def test_an_address_that_is_none_is_a_sentence(server: str) -> None:
    with pytest.raises(errors.UsageProblem, match="is not a server's address"):
        Client(server, "t")


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_certificates_that_cannot_be_read_are_named(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(errors.UsageProblem, match=r"ca\.pem cannot be used as certificates.*--ca-file"):
        Client("https://busbar.test", "t", ca_file=str(file))


def test_completion_gives_up_after_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[httpx2.Timeout] = []

    def slow(self: object, request: httpx2.Request) -> httpx2.Response:
        asked.append(httpx2.Timeout(**request.extensions["timeout"]))
        raise httpx2.ReadTimeout("nothing came", request=request)

    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", slow)
    monkeypatch.setenv("BUSBAR_SERVER", "http://127.0.0.1:1")
    monkeypatch.setenv("BUSBAR_TOKEN", "t")
    command = busbar.get_command(click.Context(busbar), "describe")
    assert command is not None
    context = click.Context(command, info_name="describe")
    assert completions.objects(context, command.params[0], "my-") == []
    assert [(each.connect, each.read) for each in asked] == [(2.0, 2.0)]
