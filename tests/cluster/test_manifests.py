"""Bad manifests against a real API server: each is refused with its field and a sentence, and nothing is stored.

Each row has an accepted neighbour, so a row cannot pass because everything is refused. Cross-field rules are in
`rule_rows.py`, bounds in `bounds.txt`. Two tests keep the tables complete: every rule and bound of the generated CRDs
has a row, and when one rule is removed from a copy of the CRD, that rule's bad manifest is accepted.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

import pytest
from tests.cluster import bounds
from tests.cluster.apiserver import Answer, ApiServer, Client, address
from tests.cluster.manifests import BASES, JSON
from tests.cluster.rule_row import Change, Row, edited
from tests.cluster.rule_rows import ROWS, STAYS_MUTABLE
from tools.generate_crds import crd

from busbar.kube.types import KINDS

MUTANT_GROUP = "without.busbar.dev"
EFFECT_TIMEOUT_S = 20.0


@pytest.fixture
def client(apiserver: ApiServer) -> Iterator[Client]:
    """The administrator; objects that a test leaves under a name of the tables are removed."""
    yield apiserver.admin
    for makers in BASES.values():
        for make in makers:
            apiserver.admin.delete(make())


def causes(answer: Answer) -> list[tuple[str, str]]:
    """(field, message) of each cause of a refusal."""
    given = (answer.body.get("details") or {}).get("causes") or ()
    return [(cause.get("field", ""), cause.get("message", "")) for cause in given]


def assert_refused(answer: Answer, field: str, words: str) -> None:
    """A 422 with a cause that names this field and contains these words."""
    assert answer.status == 422, f"expected a refusal of {field}, got {answer.status}: {answer.message}"
    assert any(where == field and words in message for where, message in causes(answer)), causes(answer)
    assert field in answer.message


@pytest.mark.parametrize(
    "make", [make for makers in BASES.values() for make in makers], ids=lambda m: m.__name__
)
def test_accepted_manifest_reads_back_with_the_defaults_that_python_knows(
    client: Client, make: Callable[[], JSON]
) -> None:
    stored = client.create(make()).expect()
    assert KINDS[stored["kind"]].model_validate(make()).to_wire()["spec"] == stored["spec"]


def test_minimal_manifests_get_the_same_defaults_from_the_server_and_from_python(client: Client) -> None:
    minimal: dict[str, JSON] = {
        "TrainingJob": {"template": {"image": "x"}},
        "ModelService": {"model": {"uri": "pvc://a/b"}},
        "AcceleratorPool": {
            "accelerator": "L4",
            "resourceName": "nvidia.com/gpu",
            "nodeSelector": {"a": "b"},
        },
        "Tenant": {},
        "PerformanceProfile": {
            "workloadClass": "llama-7B-3f9a0c11",
            "cells": [{"accelerator": "L4", "accelerators": 1, "tokensPerSecond": 100}],
        },
        "PowerDomain": {"budgetWatts": 1},
    }
    for kind, spec in minimal.items():
        document = BASES[kind][0]() | {"spec": spec}
        stored = client.create(document, dryRun="All").expect()
        assert KINDS[kind].model_validate(document).to_wire()["spec"] == stored["spec"]


@pytest.mark.parametrize("row", [row for row in ROWS if row.before is None], ids=lambda row: row.id)
def test_rule_refuses_a_new_object_and_accepts_its_neighbour(client: Client, row: Row) -> None:
    bad, good = row.bad(), row.good()
    assert_refused(client.create(bad), row.blames or row.at, row.says)
    assert client.get(address(bad)).status == 404
    client.create(good).expect()
    client.delete(good).expect()


@pytest.mark.parametrize("row", [row for row in ROWS if row.before is not None], ids=lambda row: row.id)
def test_rule_refuses_a_change_and_accepts_its_neighbour(client: Client, row: Row) -> None:
    created = client.create(row.stored()).expect()
    assert_refused(client.replace(_over(created, row.bad())), row.blames or row.at, row.says)
    assert client.get(address(created)).expect()["metadata"]["generation"] == 1
    client.replace(_over(created, row.good())).expect()


@pytest.mark.parametrize(
    ("make", "before", "change"), [row[1:] for row in STAYS_MUTABLE], ids=[r[0] for r in STAYS_MUTABLE]
)
def test_what_people_may_change_later(
    client: Client, make: Callable[[], JSON], before: Change, change: Change
) -> None:
    created = client.create(edited(make(), before)).expect()
    client.replace(_over(created, edited(created, change))).expect()


@pytest.mark.parametrize("bound", bounds.frozen(), ids=str)
def test_bound_refuses_beyond_and_accepts_within(client: Client, bound: bounds.Bound) -> None:
    pair = bounds.pair_for(bound)
    assert_refused(client.create(pair.bad), pair.field, pair.words)
    assert client.get(address(pair.bad)).status == 404
    client.create(pair.good).expect()


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (bounds.locate(make(), path), f"{make.__name__}: {path}")
        for make in (makers[0] for makers in BASES.values())
        for path in ("spec",)
    ]
    + [
        (["spec", "template"], "template_job: spec.template"),
        (["spec", "shape"], "template_job: spec.shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_field_is_refused_by_name_and_never_stored(
    client: Client, place: bounds.Place, name: str
) -> None:
    makers = {make.__name__: make for group in BASES.values() for make in group}
    document = makers[name.partition(":")[0]]()
    bounds.value_at(document, place)["nonsense"] = 1
    answer = client.create(document)
    assert answer.status == 400
    assert f'unknown field "{bounds.field_of(place)}.nonsense"' in answer.message
    assert client.get(address(document)).status == 404
    # A client that does not ask for strictness gets a warning, and the field is dropped.
    lenient = client.create(document, fieldValidation="Warn")
    assert any("nonsense" in warning for warning in lenient.warnings)
    assert "nonsense" not in bounds.value_at(lenient.expect(), place)


def test_every_rule_of_the_schemas_has_a_row() -> None:
    rules = {(kind, path, message) for kind in KINDS for path, message in rules_of(kind)}
    matched = {rule for rule in rules for row in ROWS if _is_about(row, rule)}
    assert rules - matched == set()
    assert [row.id for row in ROWS if not any(_is_about(row, rule) for rule in rules)] == []


def test_every_bound_of_the_schemas_has_a_line_and_no_line_is_stale() -> None:
    now = {bound for kind in KINDS for bound in bounds.bounds_of(kind)}
    listed = set(bounds.frozen())
    assert {str(bound) for bound in now - listed} == set(), "add these to bounds.txt"
    assert {str(bound) for bound in listed - now} == set(), "a bound is gone; did you mean it?"


@pytest.fixture(scope="module")
def mutants(apiserver: ApiServer) -> Iterator[dict[str, JSON]]:
    """A copy of each CRD in another group, from which rules are removed; gives the copy's kinds, by our kind."""
    copies = {kind: _mutant(kind) for kind in KINDS}
    for document in copies.values():
        apiserver.admin.create(document).expect()
    for document in copies.values():
        apiserver.wait_established(document["metadata"]["name"])
    yield copies
    for document in copies.values():
        apiserver.admin.delete(document)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_without_its_rule_the_bad_manifest_is_accepted(
    apiserver: ApiServer, mutants: dict[str, JSON], row: Row
) -> None:
    whole = mutants[row.kind]
    weak = copy.deepcopy(whole)
    removed = _remove_rule(weak["spec"]["versions"][0]["schema"]["openAPIV3Schema"], row)
    assert removed == 1
    client = apiserver.admin
    stored = None
    if row.before is not None:
        stored = _until_ok(lambda: client.create(_as_mutant(row.stored()))).expect()
    _put(client, weak)
    bad = _as_mutant(row.bad())

    def attempt() -> Answer:
        if stored is None:
            return client.create(bad, dryRun="All")
        return client.replace(_over(stored, bad), dryRun="All")

    answer = _until_ok(attempt)
    if stored is not None:
        client.delete(stored)
    assert answer.ok, f"another rule refuses it too: {answer.message}"


@pytest.mark.parametrize("row", [row for row in ROWS if row.is_not_built], ids=lambda row: row.id)
def test_an_object_from_before_the_refusal_stays_changeable(
    apiserver: ApiServer, mutants: dict[str, JSON], row: Row
) -> None:
    client, whole = apiserver.admin, mutants[row.kind]
    weak = copy.deepcopy(whole)
    assert _remove_rule(weak["spec"]["versions"][0]["schema"]["openAPIV3Schema"], row) == 1
    _put(client, weak)
    old = _until_ok(lambda: client.create(_as_mutant(row.bad()))).expect()
    _put(client, whole)
    fresh = edited(_as_mutant(row.bad()), {"metadata/name": "fresh"})
    end = time.monotonic() + EFFECT_TIMEOUT_S
    while client.create(fresh, dryRun="All").ok and time.monotonic() < end:
        time.sleep(0.02)
    assert_refused(client.create(fresh, dryRun="All"), row.blames or row.at, row.says)
    client.merge(old, {"status": {"observedGeneration": 1}}, subresource="/status").expect()
    client.merge(old, {"spec": _HARMLESS[row.kind]}).expect()
    client.delete(old).expect()


_HARMLESS: dict[str, JSON] = {
    "TrainingJob": {"suspend": True},
    "ModelService": {"suspend": True},
    "AcceleratorPool": {"pricePerHour": 7},
    "Tenant": {"weight": 3},
}
"""A change of another field, by kind."""


def _put(client: Client, document: JSON) -> None:
    """Replace the stored object of the document's name."""
    version = client.get(address(document)).expect()["metadata"]["resourceVersion"]
    client.replace(edited(document, {"metadata/resourceVersion": version})).expect()


def rules_of(kind: str) -> Iterator[tuple[str, str]]:
    """(path, message) of each rule of a kind."""

    def walk(node: JSON, path: str) -> Iterator[tuple[str, str]]:
        for rule in node.get("x-kubernetes-validations", ()):
            yield path, rule["message"]
        for name, child in node.get("properties", {}).items():
            yield from walk(child, f"{path}.{name}".lstrip("."))
        if "items" in node:
            yield from walk(node["items"], f"{path}[]")

    yield from walk(bounds.schema_of(kind), "")


def _is_about(row: Row, rule: tuple[str, str, str]) -> bool:
    kind, path, message = rule
    return row.kind == kind and row.at == path and row.says in message


def _over(stored: JSON, changed: JSON) -> JSON:
    """The changed object as an update of the stored one."""
    return {**changed, "metadata": stored["metadata"]}


def _mutant(kind: str) -> JSON:
    document = copy.deepcopy(crd(KINDS[kind]))
    names = document["spec"]["names"]
    document["metadata"] = {"name": f"{names['plural']}.{MUTANT_GROUP}"}
    document["spec"]["group"] = MUTANT_GROUP
    document["spec"]["names"] = {key: names[key] for key in ("kind", "listKind", "plural", "singular")}
    return document


def _as_mutant(document: JSON) -> JSON:
    return {**document, "apiVersion": f"{MUTANT_GROUP}/v1alpha1"}


def _remove_rule(schema: JSON, row: Row) -> int:
    node = schema
    for step in row.at.replace("[]", ".[]").split(".") if row.at else ():
        node = node["items"] if step == "[]" else node["properties"][step]
    rules = node["x-kubernetes-validations"]
    kept = [rule for rule in rules if row.says not in rule["message"]]
    node["x-kubernetes-validations"] = kept
    return len(rules) - len(kept)


def _until_ok(attempt: Callable[[], Answer]) -> Answer:
    """Try until it is accepted: a changed CRD takes effect shortly after the write."""
    end = time.monotonic() + EFFECT_TIMEOUT_S
    while True:
        answer = attempt()
        if answer.ok or time.monotonic() > end:
            return answer
        time.sleep(0.02)
