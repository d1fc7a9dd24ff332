"""Settings: every variable, and every value that is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.conftest import SECRET

from busbar.api.main import main
from busbar.api.settings import load
from busbar.kube.errors import SettingsError


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    return str(path)


def test_defaults_need_only_the_session_secret(secret_file: str) -> None:
    settings = load({"BUSBAR_API_SESSION_SECRET_FILE": secret_file, "HOME": "/tmp"})
    assert (settings.session_secret, settings.port, settings.internal_port) == (SECRET, 8080, 8081)
    assert SECRET not in repr(settings)
    assert settings.oidc is None


def test_each_variable_is_read_in_its_own_type(secret_file: str, tmp_path: Path) -> None:
    (tmp_path / "client").write_text("of-the-client")
    settings = load(
        {
            "BUSBAR_API_SESSION_SECRET_FILE": secret_file,
            "BUSBAR_API_PORT": "9000",
            "BUSBAR_API_SECURE_COOKIES": "true",
            "BUSBAR_API_SESSION_HOURS": "1.5",
            "BUSBAR_API_OIDC_ISSUER": "https://issuer",
            "BUSBAR_API_OIDC_CLIENT_ID": "busbar",
            "BUSBAR_API_OIDC_CLIENT_SECRET_FILE": str(tmp_path / "client"),
        }
    )
    assert (settings.port, settings.secure_cookies, settings.session_hours) == (9000, True, 1.5)
    assert settings.oidc is not None
    assert settings.oidc.client_secret == "of-the-client"
    assert "of-the-client" not in repr(settings)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"BUSBAR_API_PROT": "1"}, "BUSBAR_API_PROT"),
        ({"BUSBAR_API_SESSION_SECRET": SECRET}, "BUSBAR_API_SESSION_SECRET"),
        ({"BUSBAR_API_PORT": "tcp://10.0.0.1:8080"}, "a whole number"),
        ({"BUSBAR_API_SECURE_COOKIES": "maybe"}, "true or false"),
        ({"BUSBAR_API_SESSION_SECRET_FILE": "/no/such/file"}, "cannot be read"),
        ({"BUSBAR_API_OIDC_ISSUER": "https://issuer"}, "OIDC_CLIENT_ID is not set"),
    ],
)
def test_unknown_and_malformed_variables_are_refused(
    secret_file: str, variables: dict[str, str], sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load({"BUSBAR_API_SESSION_SECRET_FILE": secret_file, **variables})


@pytest.mark.parametrize(
    "secret", ["", "short", "x" * 64, "changeme" * 8, "secret-0123456789-abcdefghijklmnop"]
)
def test_weak_and_default_secrets_are_refused(tmp_path: Path, secret: str) -> None:
    path = tmp_path / "weak"
    path.write_text(secret)
    with pytest.raises(SettingsError, match="secret"):
        load({"BUSBAR_API_SESSION_SECRET_FILE": str(path)})


def test_serving_without_a_secret_is_refused_and_tokens_need_none() -> None:
    with pytest.raises(SettingsError, match="SESSION_SECRET_FILE is not set"):
        load({})
    assert load({}, needs_secret=False).session_secret == ""


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Restores the process's logging, which the command configures, for the tests that follow."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.mark.usefixtures("own_logging")
def test_the_command_makes_a_token_and_prints_it_alone_on_standard_output(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BUSBAR_API_DATABASE_URL", sqlite_url)
    assert (
        main(["token", "create", "--subject", "root", "--role", "admin", "--scopes", "rest,inference"]) == 0
    )
    printed = capsys.readouterr()
    assert printed.out.startswith("bb_")
    assert len(printed.out) == 47
    assert "of root (admin)" in printed.err
    assert main(["token", "create", "--subject", "system:masters"]) == 1
    assert main(["token", "create", "--subject", "x", "--scopes", "everything"]) == 1


def test_a_wrong_setting_ends_the_command_with_a_sentence_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BUSBAR_API_NO_SUCH", "1")
    assert main(["migrate"]) == 2
    assert "BUSBAR_API_NO_SUCH is not a setting" in capsys.readouterr().err
