"""The kinds as Python models: the same rules as the API server's, bounds on every field, lossless serialization."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.cluster import bounds
from tests.cluster.manifests import BASES, JSON, engine_job, model_service
from tests.cluster.rule_row import Row
from tests.cluster.rule_rows import ROWS
from tools.generate_crds import crd

from busbar.kube.types import KINDS, ModelService, TrainingJob
from busbar.kube.types.meta import CLAIM_PATH_PATTERN, claim_of
from busbar.kube.types.rules import refusals

MAKERS = [make for makers in BASES.values() for make in makers]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_accepted_manifest_is_read_and_written_without_loss(make: Callable[[], JSON]) -> None:
    document = make()
    model = KINDS[document["kind"]].model_validate(document)
    again = KINDS[document["kind"]].model_validate(model.to_wire())
    assert again == model
    assert _contains(model.to_wire()["spec"], document["spec"])


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.before is None and not row.is_not_built and "every key must" not in row.says],
    ids=lambda row: row.id,
)
def test_python_refuses_what_the_api_server_refuses_in_the_same_words(row: Row) -> None:
    kind = KINDS[row.kind]
    with pytest.raises(ValidationError, match=re.escape(row.says)):
        kind.model_validate(row.bad())
    kind.model_validate(row.good())


@pytest.mark.parametrize("row", [row for row in ROWS if row.is_not_built], ids=lambda row: row.id)
def test_python_reads_what_is_not_built_and_can_say_that_it_is_refused(row: Row) -> None:
    kind = KINDS[row.kind]
    ((field, sentence),) = refusals(kind.model_validate(row.bad()))
    assert field == row.at.replace("[]", "")
    assert row.says in sentence
    assert refusals(kind.model_validate(row.good())) == []


@pytest.mark.parametrize(
    "bound", [bound for bound in bounds.frozen() if bound.keyword not in ("unique",)], ids=str
)
def test_python_keeps_the_same_bounds(bound: bounds.Bound) -> None:
    pair = bounds.pair_for(bound)
    kind = KINDS[bound.kind]
    with pytest.raises(ValidationError):
        kind.model_validate(pair.bad)
    kind.model_validate(pair.good)


@pytest.mark.parametrize("kind", KINDS)
def test_every_string_list_and_map_is_bounded(kind: str) -> None:
    schema = bounds.schema_of(kind)["properties"]
    unbounded = [
        path
        for part in ("spec", "status")
        for path, node in _nodes(schema[part], part)
        if not _is_bounded(node)
    ]
    assert unbounded == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_explained(kind: str) -> None:
    schema = bounds.schema_of(kind)["properties"]
    silent = [
        path
        for part in ("spec", "status")
        for path, node in _nodes(schema[part], part)
        if not path.endswith(("[]", "{}")) and not node.get("description")
    ]
    assert silent == []


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_found_by_kubectl_users(kind: str) -> None:
    spec = crd(KINDS[kind])["spec"]
    version = spec["versions"][0]
    assert spec["names"]["categories"] == ["busbar"]
    assert all(name.startswith("bb") for name in spec["names"]["shortNames"])
    assert version["subresources"]["status"] == {}
    assert "Reason" in [column["name"] for column in version["additionalPrinterColumns"]]


def test_service_scales_by_the_scale_subresource() -> None:
    assert crd(ModelService)["spec"]["versions"][0]["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }


def test_unknown_field_of_a_spec_is_refused_and_of_a_status_ignored() -> None:
    misspelt = engine_job()
    misspelt["spec"]["engine"]["stepps"] = 3
    with pytest.raises(ValidationError, match="stepps"):
        TrainingJob.model_validate(misspelt)
    newer = engine_job() | {"status": {"phase": "Running", "fieldOfANewerVersion": 1}}
    assert TrainingJob.model_validate(newer).status is not None


def test_defaults_of_the_schema_are_the_defaults_of_the_model() -> None:
    minimal = {
        "metadata": {"name": "a"},
        "spec": {"template": {"image": "x"}},
    }
    spec = TrainingJob.model_validate(minimal).to_wire()["spec"]
    schema = bounds.schema_of("TrainingJob")["properties"]["spec"]["properties"]
    defaults = {name: node["default"] for name, node in schema.items() if "default" in node}
    assert {name: spec[name] for name in defaults} == defaults


@pytest.mark.parametrize(
    ("smallest", "largest", "ceiling"), [(0, None, 1), (1, None, 1), (3, None, 3), (0, 5, 5)]
)
def test_replica_ceiling_fills_in_its_default(smallest: int, largest: int | None, ceiling: int) -> None:
    document = model_service()
    document["spec"] |= {"minReplicas": smallest, "maxReplicas": largest}
    assert ModelService.model_validate(document).spec.replica_ceiling == ceiling


def test_config_reads_whole_floats_as_the_api_server_stores_them() -> None:
    document = engine_job()
    document["spec"]["engine"]["model"]["config"] = {"theta": 10000.0, "eps": 1e-5, "list": [{"x": 2.0}]}
    engine = TrainingJob.model_validate(document).spec.engine
    assert engine is not None
    assert repr(engine.model.config) == "{'theta': 10000, 'eps': 1e-05, 'list': [{'x': 2}]}"


@given(st.from_regex(CLAIM_PATH_PATTERN, fullmatch=True))
def test_claim_address_never_leaves_its_claim(uri: str) -> None:
    claim, path = claim_of(uri)
    assert claim
    assert not path.startswith("/")
    assert not any(part.startswith(".") or not part for part in path.split("/") if path)


@pytest.mark.parametrize(
    "uri", ["pvc://a/../b", "pvc://a/.hidden", "pvc:///x", "s3://b/k", "pvc://A", "pvc://a//b"]
)
def test_addresses_outside_of_a_claim_are_refused(uri: str) -> None:
    document = engine_job()
    document["spec"]["output"]["uri"] = uri
    with pytest.raises(ValidationError):
        TrainingJob.model_validate(document)


def _nodes(node: JSON, path: str) -> Iterator[tuple[str, JSON]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from _nodes(child, f"{path}.{name}")
    if "items" in node:
        yield from _nodes(node["items"], f"{path}[]")
    if "additionalProperties" in node:
        yield from _nodes(node["additionalProperties"], f"{path}{{}}")


def _is_bounded(node: JSON) -> bool:
    if node.get("type") == "array":
        return "maxItems" in node
    if node.get("type") == "string" or "x-kubernetes-int-or-string" in node:
        return "maxLength" in node or "enum" in node or node.get("format") == "date-time"
    if "additionalProperties" in node or "x-kubernetes-preserve-unknown-fields" in node:
        return "maxProperties" in node
    return True


def _contains(whole: object, part: object) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            key in whole and _contains(whole[key], value) for key, value in part.items()
        )
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(_contains, whole, part))
    return whole == part or str(whole) == str(part)
