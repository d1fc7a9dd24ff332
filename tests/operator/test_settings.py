"""Settings: what is read from the environment, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from busbar.kube.errors import SettingsError
from busbar.operator.scheduling.rounds import policy_of
from busbar.operator.settings import Settings, load
from busbar.scheduler import Objective, Policy


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    (tmp_path / "key").write_text("0123456789abcdef\n")
    return {
        "BUSBAR_WORKLOAD_KEY_FILE": str(tmp_path / "key"),
        "POD_NAMESPACE": "ns",
        "POD_NAME": "p",
        "POD_UID": "u",
        **more,
    }


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    made = load(
        environment(tmp_path, BUSBAR_OPERATOR_LEASE_DURATION_S="5", BUSBAR_OPERATOR_PORT_8090_TCP="x")
    )
    assert (made.namespace, made.identity, made.lease_duration_s) == ("ns", "p_u", 5.0)
    assert made.workload_key == b"0123456789abcdef"
    assert made.shielded_by == "ns"
    off = load(environment(tmp_path, BUSBAR_OPERATOR_NETWORK_POLICIES="false"))
    assert off.shielded_by == ""


@pytest.mark.parametrize("objective", list(Objective))
def test_an_admin_chooses_what_the_scheduler_wants(tmp_path: Path, objective: Objective) -> None:
    chosen = {"BUSBAR_OPERATOR_OBJECTIVE": objective.value, "BUSBAR_OPERATOR_USAGE_HALF_LIFE_S": "3600"}
    chosen["BUSBAR_OPERATOR_GUARANTEE_RECLAIM_S"] = "60"
    policy = policy_of(load(environment(tmp_path, **chosen)))
    assert policy == Policy(objective=objective, usage_half_life_s=3600.0, guarantee_reclaim_s=60.0)
    assert policy_of(load(environment(tmp_path))) == Policy()


@pytest.mark.parametrize(
    "more",
    [
        {"BUSBAR_OPERATOR_LEASE": "5"},
        {"BUSBAR_OPERATOR_WRITERS": "many"},
        {"BUSBAR_OPERATOR_NETWORK_POLICIES": "maybe"},
        {"BUSBAR_OPERATOR_OBJECTIVE": "speed"},
        {"BUSBAR_OPERATOR_USAGE_HALF_LIFE_S": "0"},
        {"BUSBAR_OPERATOR_GUARANTEE_RECLAIM_S": "-1"},
    ],
)
def test_an_unknown_or_wrong_setting_is_refused_by_name(tmp_path: Path, more: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=next(iter(more))):
        load(environment(tmp_path, **more))


def test_a_missing_or_short_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="BUSBAR_WORKLOAD_KEY_FILE"):
        load({})
    env = environment(tmp_path)
    (tmp_path / "key").write_text("short")
    with pytest.raises(SettingsError, match="16 bytes"):
        load(env)


def test_settings_keep_the_key_out_of_their_text() -> None:
    made = Settings(workload_key=b"0123456789abcdef", former_workload_key=b"0123456789abcdef")
    assert "0123456789abcdef" not in repr(made)


def test_the_former_key_is_there_only_while_the_key_is_rotated(tmp_path: Path) -> None:
    former = tmp_path / "former"
    env = environment(tmp_path, BUSBAR_FORMER_WORKLOAD_KEY_FILE=str(former))
    assert load(env).workload_keys == (b"0123456789abcdef",)
    former.write_text("")
    assert load(env).workload_keys == (b"0123456789abcdef",)
    former.write_text("fedcba9876543210\n")
    assert load(env).workload_keys == (b"0123456789abcdef", b"fedcba9876543210")
    former.write_text("0123456789abcdef")  # a restored backup brought it back
    assert load(env).workload_keys == (b"0123456789abcdef",)
    assert load(env).former_workload_key == b""
    former.write_text("short")
    with pytest.raises(SettingsError, match=r"FORMER_WORKLOAD_KEY_FILE.*16 bytes"):
        load(env)
