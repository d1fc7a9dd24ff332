"""The settings loader of the three processes: types, units, files, and one message with every mistake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from busbar.kube.errors import SettingsError
from busbar.kube.settings import Count, Port, Rule, load, setting, variables


@dataclass(frozen=True)
class Inner:
    issuer: str
    secret: str = setting(own=False, file="X_INNER_SECRET_FILE", secret=True)
    claim: str = "groups"


@dataclass(frozen=True)
class Example:
    key: bytes = setting(b"", own=False, file="KEY_FILE", required=True, secret=True)
    url: str = setting("sqlite", file="X_URL_FILE", secret=True)
    gateway: str = setting("", shared="GATEWAY_URL")
    name: str = "me"
    port: Port = 80
    count: Count = 1
    wait_s: float = 1.5
    size_mib: int = 4
    on: bool = False
    folder: Path = Path("/var")
    people: tuple[str, ...] = ()
    mode: Literal["fast", "slow"] = "fast"
    even: Annotated[int, Rule("an even number", lambda n: n % 2 == 0)] = 0
    inner: Inner | None = None


@pytest.fixture
def key(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "key").write_text(" k3y\n")
    return {"KEY_FILE": str(tmp_path / "key")}


def test_each_type_is_read_from_its_variable(key: dict[str, str]) -> None:
    given = {"X_NAME": "you", "X_PORT": "8080", "X_COUNT": "2", "X_WAIT_S": "0.5", "X_SIZE_MIB": "8"}
    given |= {"X_ON": "yes", "X_FOLDER": "/tmp", "X_PEOPLE": "a, b,", "X_MODE": "slow", "X_EVEN": "2"}
    assert load(Example, "X_", {**key, **given, "PATH": "/bin"}) == Example(
        key=b"k3y",
        name="you",
        port=8080,
        count=2,
        wait_s=0.5,
        size_mib=8,
        on=True,
        folder=Path("/tmp"),
        people=("a", "b"),
        mode="slow",
        even=2,
    )
    assert load(Example, "X_", key) == Example(key=b"k3y")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("X_COUNT", "many", "X_COUNT='many' is wrong; expected: a whole number, 0 or more"),
        ("X_COUNT", "0", "X_COUNT='0' is wrong; expected: 1 or more"),
        ("X_COUNT", "1.5", "a whole number"),
        ("X_WAIT_S", "soon", "expected: a number of seconds, 0 or more"),
        ("X_WAIT_S", "-1", "expected: a number of seconds, 0 or more"),
        ("X_WAIT_S", "inf", "expected: a number of seconds, 0 or more"),
        ("X_SIZE_MIB", "4MiB", "expected: a whole number of MiB, 0 or more"),
        ("X_PORT", "tcp://10.0.0.1:80", "X_PORT='tcp://10.0.0.1:80'"),
        ("X_PORT", "70000", "expected: a port, 0 to 65535"),
        ("X_ON", "maybe", "expected: true or false"),
        ("X_MODE", "medium", "expected: one of fast, slow"),
        ("X_EVEN", "3", "expected: an even number"),
        ("X_NAEM", "x", "X_NAEM is not a setting; did you mean X_NAME?"),
        ("X_ZZZZZZZZ", "x", "X_ZZZZZZZZ is not a setting; known settings are GATEWAY_URL, KEY_FILE, "),
        ("X_KEY", "x", "X_KEY is not a setting"),
        ("X_URL_FILE", "/no/such/file", "X_URL_FILE='/no/such/file' cannot be read: No such file"),
        ("X_INNER_CLAIM", "x", "X_INNER_ISSUER is not set: it has no default"),
        ("X_INNER_CLAIM", "x", "X_INNER_SECRET_FILE is not set: name the file that holds the secret"),
        ("X_INNER_WRONG", "x", "X_INNER_WRONG is not a setting"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(
    key: dict[str, str], name: str, value: str, expected: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        load(Example, "X_", {**key, name: value})
    assert expected in str(refused.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as refused:
        load(Example, "X_", {"X_COUNT": "0", "X_ON": "maybe", "X_NOTHING": "1", "X_URL_FILE": "/no/such"})
    for name in ("KEY_FILE is not set", "X_COUNT='0'", "X_ON='maybe'", "X_NOTHING", "X_URL_FILE='/no/such'"):
        assert name in str(refused.value)


def test_what_a_secret_holds_is_in_no_message_and_no_text(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Strict:
        key: Annotated[str, Rule("long", lambda text: len(text) > 99)] = setting(
            "", file="K_FILE", secret=True
        )

    (tmp_path / "key").write_text("hunter2")
    for given in ({"K_FILE": str(tmp_path / "key")}, {"S_KEY": "hunter2"}):
        with pytest.raises(SettingsError, match="expected: long") as refused:
            load(Strict, "S_", given)
        assert "hunter2" not in str(refused.value)
    assert "hunter2" not in repr(Strict("hunter2"))


def test_a_file_goes_before_the_own_variable_and_that_before_a_shared_one(
    tmp_path: Path, key: dict[str, str]
) -> None:
    (tmp_path / "url").write_text("from-file\n")
    read = load(Example, "X_", {**key, "X_URL": "own", "X_URL_FILE": str(tmp_path / "url")})
    assert read.url == "from-file"
    assert load(Example, "X_", {**key, "GATEWAY_URL": "shared"}).gateway == "shared"
    assert load(Example, "X_", {**key, "GATEWAY_URL": "shared", "X_GATEWAY": "own"}).gateway == "own"
    assert load(Example, "X_", {**key, "GATEWAY_URL": ""}, {"gateway": "fallback"}).gateway == "fallback"


def test_a_group_of_settings_is_there_when_one_of_them_has_a_value(key: dict[str, str]) -> None:
    assert load(Example, "X_", {**key, "X_INNER_ISSUER": ""}).inner is None
    given = {**key, "X_INNER_ISSUER": "https://i", "X_INNER_SECRET_FILE": key["KEY_FILE"]}
    assert load(Example, "X_", given).inner == Inner("https://i", "k3y")


def test_what_kubernetes_sets_for_a_service_of_that_name_is_passed_over(key: dict[str, str]) -> None:
    links = {"X_SERVICE_HOST": "10.0.0.1", "X_SERVICE_PORT_HTTP": "80", "X_PORT_80_TCP": "tcp://10.0.0.1:80"}
    assert load(Example, "X_", {**key, **links}) == Example(key=b"k3y")


def test_the_variables_of_a_process_can_be_listed() -> None:
    named = [name for name, _ in variables(Example, "X_")]
    assert named[:4] == ["KEY_FILE", "X_URL", "X_URL_FILE", "X_GATEWAY"]
    assert "X_KEY" not in named
