"""Numbers in requests are numbers: neither true nor texts count as them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError
from tests.api.conftest import BASE, World

from busbar.api.routes import schemas


def numbers_of(model: type[BaseModel]) -> Iterator[tuple[type[BaseModel], str]]:
    """The fields of a request, and of what is inside it, that are numbers."""
    for name, field in model.model_fields.items():
        inner = [part for part in parts_of(field.annotation) if isinstance(part, type)]
        if any(part in (int, float) for part in inner):
            yield model, field.alias or name
        for part in inner:
            if issubclass(part, BaseModel):
                yield from numbers_of(part)


def parts_of(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from parts_of(part)


NUMBERS = [pair for model in schemas.Ask.__subclasses__() for pair in numbers_of(model)]


def test_the_numbers_of_requests_are_found() -> None:
    names = {name for _, name in NUMBERS}
    assert {
        "replicas",
        "overlapHours",
        "expiresInDays",
        "requestsPerMinute",
        "tokensPerMinute",
        "cost",
    } <= names


@pytest.mark.parametrize(("model", "name"), NUMBERS, ids=[f"{m.__name__}.{n}" for m, n in NUMBERS])
@pytest.mark.parametrize("value", [True, False, "2", "2.5"])
def test_a_number_in_a_request_is_a_number(model: type[BaseModel], name: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({name: value})
    assert name in {error["loc"][0] for error in caught.value.errors()}


@pytest.mark.parametrize("replicas", [True, "2", 2.5, 257, -1])
async def test_a_service_is_not_scaled_to_what_is_no_number_of_replicas(
    world: World, replicas: object
) -> None:
    alice = await world.as_("alice")
    at = f"{BASE}/namespaces/ada-lab/modelservices/ada-chat/scale"
    refused = await alice.put(at, json={"replicas": replicas})
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "replicas")
    assert (await alice.put(at, json={"replicas": 2})).status_code == 200
