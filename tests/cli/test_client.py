"""The client: answers become typed results, and every failure an error that says what to do."""

from __future__ import annotations

import json
import ssl
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
from busbar.cli.lines import Lines
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


FOREIGN: dict[str, httpx2.Response] = {
    "a page": httpx2.Response(200, text="<html>Sign in</html>", headers={"content-type": "text/html"}),
    "nothing": httpx2.Response(200),
    "no content": httpx2.Response(200, json=None),
    "half of it": httpx2.Response(200, content=b'{"items": [{"metadata'),
    "bytes": httpx2.Response(200, content=b'{"items": "\xe9\xff"}'),
    "too deep": httpx2.Response(200, content=b"[" * 100_000),
    "null": httpx2.Response(200, content=b"null"),
    "a list": httpx2.Response(200, json=[]),
    "a text": httpx2.Response(200, json="x"),
    "no fields": httpx2.Response(200, json={}),
    "no list": httpx2.Response(200, json={"items": None}),
    "a list of nothing": httpx2.Response(200, json={"items": [None]}),
    "objects without a name": httpx2.Response(200, json={"items": [{"metadata": {}}], "metadata": {}}),
    "odd parts": httpx2.Response(
        200,
        json={"items": [{"metadata": {"name": "x"}, "status": 3}], "metadata": {"name": "x"}, "status": 3},
    ),
    "odd times": httpx2.Response(
        200,
        json={
            "items": [{"metadata": {"name": "x", "creationTimestamp": "yesterday"}}],
            "metadata": {"name": "x", "creationTimestamp": "yesterday"},
        },
    ),
    "an error without words": httpx2.Response(500, json={"error": [1]}),
    "an error of nothing": httpx2.Response(400, json={"error": None}),
}
OF_JOB = Object(TRAINING_JOB, JOB)
CALLS: dict[str, Callable[[Client], object]] = {
    "listing": lambda c: c.listing(TRAINING_JOB, "n"),
    "get": lambda c: c.get(TRAINING_JOB, "n", "j"),
    "create": lambda c: c.create(JOB),
    "change": lambda c: c.change(TRAINING_JOB, "n", "j", {}),
    "delete": lambda c: c.delete(TRAINING_JOB, "n", "j"),
    "cancel": lambda c: c.cancel(TRAINING_JOB, "n", "j"),
    "resume": lambda c: c.resume(TRAINING_JOB, "n", "j"),
    "scale": lambda c: c.scale("n", "s", 2),
    "preview": lambda c: c.preview(JOB),
    "service_plan": lambda c: c.service_plan("n", "s", 2.0),
    "events": lambda c: c.events(OF_JOB),
    "logs": lambda c: list(c.logs(OF_JOB)),
    "me": lambda c: c.me(),
    "pools": lambda c: c.pools(),
    "profiles": lambda c: c.profiles(),
    "tenants": lambda c: c.tenants(),
    "nodes": lambda c: c.nodes(),
    "power_domains": lambda c: c.power_domains(),
    "power_nodes": lambda c: c.power_nodes(),
    "models": lambda c: c.models(),
    "gateway": lambda c: c.gateway(),
    "usage": lambda c: c.usage(),
    "usage_lines": lambda c: c.usage_lines(),
    "usage_file": lambda c: c.usage_file("csv"),
    "tokens": lambda c: list(c.tokens()),
    "create_token": lambda c: c.create_token(),
    "rotate_token": lambda c: c.rotate_token("t", 1.0),
    "revoke_token": lambda c: c.revoke_token("t"),
    "revoke_tokens": lambda c: c.revoke_tokens("alice"),
    "database_state": lambda c: c.database_state(),
    "restore_database": lambda c: c.restore_database({}, []),
}
LENIENT = {
    ("objects without a name", "events"), ("odd parts", "events"), ("odd times", "events"),
}  # fmt: skip
"""Events have no field that must be there."""


def test_every_call_is_in_the_table_of_calls() -> None:
    public = {name for name in vars(Client) if not name.startswith("_")}
    assert public - {"close", "database"} == set(CALLS)


@pytest.mark.parametrize("answer", FOREIGN)
@pytest.mark.parametrize("call", CALLS)
def test_whatever_a_server_answers_is_a_result_or_one_sentence(call: str, answer: str) -> None:
    def handle(request: httpx2.Request) -> httpx2.Response:
        found = FOREIGN[answer]
        return httpx2.Response(found.status_code, content=found.content, headers=found.headers)

    if (answer, call) in LENIENT:
        CALLS[call](client(handle))
        return
    with pytest.raises(errors.BusbarError) as caught:
        CALLS[call](client(handle))
    message = caught.value.message
    assert "\n" not in message
    assert "busbar.test" in message or "not as expected" in message


def test_an_encoding_that_is_none_is_a_sentence() -> None:
    broken = {"content-encoding": "gzip", "content-type": "application/json"}
    with pytest.raises(errors.Unreachable, match="does not answer"):
        client(
            lambda request: httpx2.Response(200, stream=httpx2.ByteStream(b"no gzip"), headers=broken)
        ).me()


def test_a_certificate_that_is_not_trusted_is_told_with_what_helps() -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        cause = ssl.SSLCertVerificationError(1, "certificate verify failed")
        cause.verify_message = "self-signed certificate"
        raise httpx2.ConnectError("certificate verify failed", request=request) from cause

    with pytest.raises(errors.Unreachable, match=r"not trusted \(self-signed certificate\).*--ca-file"):
        client(refuse).me()


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


def test_a_log_has_the_lines_that_its_writer_made() -> None:
    here = client(
        lambda request: httpx2.Response(
            200,
            headers={"content-type": "text/plain"},
            content='{"a": "x\u2028y\x85z\x0c"}\n\nb\r\n10 %\r20 %'.encode(),
        )
    )
    assert list(here.logs(OF_JOB)) == ['{"a": "x\u2028y\x85z\x0c"}', "", "b", "10 %", "20 %"]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_the_same_in_pieces_of_any_size(size: int) -> None:
    text = "a\u2028b\n\nc\r\nd\re\r\r\nf\u00e9".encode()
    lines = Lines()
    found = [line for at in range(0, len(text), size) for line in lines.of(text[at : at + size])]
    assert found + lines.rest() == ["a\u2028b", "", "c", "d", "e", "", "f\u00e9"]
    assert lines.rest() == []


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
