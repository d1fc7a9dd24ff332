"""Counters from samples, and the back ends that take them: NVML with a stand-in, RAPL from files, and the simulator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.kube.contracts.power import Backend, Probe
from busbar.operator.agent.limits import BoardLimit, LimitFailed
from busbar.operator.agent.meters import (
    HOST,
    BackendAbsent,
    Counters,
    Node,
    Sample,
    counted,
    report,
    sampled,
)
from busbar.operator.agent.nvml import Nvml
from busbar.operator.agent.rapl import Rapl
from busbar.operator.agent.simulated import UUID_PREFIX, SimulatedBoards, SimulatedHost


def watts(value: float | None, joules: float | None = None) -> list[Sample]:
    return [Sample("a", 100.0, 400.0, value, joules)]


def test_joules_are_the_integral_of_watts_where_there_is_no_counter() -> None:
    counters: Counters = {}
    for second, value in ((0.0, 100.0), (1.0, 100.0), (3.0, 200.0)):
        counters = counted(counters, watts(value), second)
    assert (counters["a"].watts, counters["a"].joules) == (200.0, 400.0)


def test_watts_are_the_slope_of_joules_where_there_are_none() -> None:
    counters = counted(counted({}, watts(None, 1000.0), 5.0), watts(None, 1300.0), 7.0)
    assert (counters["a"].watts, counters["a"].joules) == (150.0, 1300.0)
    fell = counted(counters, watts(None, 10.0), 8.0)
    assert (fell["a"].watts, fell["a"].joules) == (150.0, 10.0), "the last slope, until there is another"


def test_a_meter_that_is_gone_is_not_reported() -> None:
    assert set(counted(counted({}, watts(1.0), 0.0), [], 1.0)) == set()


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 400), st.floats(-1, 5)), max_size=20))
def test_counted_joules_never_fall(steps: list[tuple[float, float]]) -> None:
    counters: Counters = {}
    clock_s = joules = 0.0
    for value, passed_s in steps:
        clock_s += passed_s
        counters = counted(counters, watts(value), clock_s)
        assert counters["a"].joules >= joules
        joules = counters["a"].joules


class FakeNvml:
    """As much of pynvml as is used. A value that is an exception is raised."""

    class NVMLError(Exception):
        pass

    def __init__(self, **answers: Any) -> None:
        self._answers = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUUID": b"GPU-1",
            "nvmlDeviceGetPowerManagementLimitConstraints": (200_000, 700_000),
            "nvmlDeviceGetEnforcedPowerLimit": 350_000,
            "nvmlDeviceGetPowerUsage": 123_456,
            "nvmlDeviceGetTotalEnergyConsumption": 5_000,
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            answer = self._answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


NO = FakeNvml.NVMLError("Not Supported")


def test_nvml_is_read_in_watts_and_joules() -> None:
    assert Nvml(FakeNvml()).sample(0.0) == [Sample("GPU-1", 200.0, 700.0, 123.456, 5.0)]


def test_a_board_without_limits_or_counter_is_still_read() -> None:
    limits = "nvmlDeviceGetPowerManagementLimitConstraints"
    fake = FakeNvml(**{limits: NO, "nvmlDeviceGetTotalEnergyConsumption": NO})
    assert Nvml(fake).sample(0.0) == [Sample("GPU-1", 350.0, 350.0, 123.456, None)]


def test_nvml_limits_are_read_back_and_set_in_watts() -> None:
    answers = {
        "nvmlDeviceGetPowerManagementDefaultLimit": 650_000,
        "nvmlDeviceGetPowerManagementLimit": 500_000,
    }
    boards = Nvml(FakeNvml(**answers, nvmlDeviceSetPowerManagementLimit=None))
    assert boards.limits() == [BoardLimit("GPU-1", 200.0, 700.0, 650.0, 500.0, 350.0)]
    boards.set_limit("GPU-1", 300.0)
    with pytest.raises(LimitFailed, match="Not Supported"):
        Nvml(FakeNvml(**answers, nvmlDeviceSetPowerManagementLimit=NO)).set_limit("GPU-1", 300.0)
    unlimited = Nvml(FakeNvml(nvmlDeviceGetPowerManagementLimitConstraints=NO))
    assert unlimited.limits() == [], "it takes none"
    with pytest.raises(BackendAbsent, match="GPU-1"):
        Nvml(FakeNvml(nvmlDeviceGetPowerManagementDefaultLimit=NO)).limits()


def test_nvml_names_the_board_of_a_slice() -> None:
    answers = {"nvmlDeviceGetHandleByUUID": "part", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": "handle"}
    assert Nvml(FakeNvml(**answers)).board_of("MIG-1") == "GPU-1"
    assert Nvml(FakeNvml(**{**answers, "nvmlDeviceGetHandleByUUID": NO})).board_of("MIG-1") is None


@pytest.mark.parametrize(
    "answers",
    [
        {"nvmlInit": NO},
        {"nvmlDeviceGetCount": 0},
        {"nvmlDeviceGetPowerManagementLimitConstraints": NO, "nvmlDeviceGetEnforcedPowerLimit": NO},
    ],
)
def test_what_nvml_cannot_read_is_no_back_end(answers: dict[str, Any]) -> None:
    with pytest.raises(BackendAbsent):
        Nvml(FakeNvml(**answers))


def test_a_board_that_is_lost_is_an_error_and_no_zero() -> None:
    with pytest.raises(BackendAbsent, match="GPU-1"):
        Nvml(FakeNvml(nvmlDeviceGetPowerUsage=NO)).sample(0.0)


def package(root: Path, name: str, joules: float, limit: str = "165000000") -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "energy_uj").write_text(f"{round(joules * 1e6)}\n")
    (folder / "max_energy_range_uj").write_text("100000000\n")
    (folder / "constraint_0_max_power_uw").write_text(f"{limit}\n")
    return folder


def test_packages_are_one_meter_and_a_wrapped_counter_goes_on(tmp_path: Path) -> None:
    for name, joules in (("intel-rapl:0", 90.0), ("intel-rapl:1", 5.0), ("intel-rapl:0:0", 1.0)):
        package(tmp_path, name, joules)
    rapl = Rapl(tmp_path)
    package(tmp_path, "intel-rapl:0", 15.0)
    package(tmp_path, "intel-rapl:1", 7.0)
    assert rapl.sample(1.0) == [Sample(HOST, 330.0, 330.0, joules=27.0)]


def test_rapl_that_is_absent_unreadable_or_without_a_limit_is_no_back_end(tmp_path: Path) -> None:
    with pytest.raises(BackendAbsent, match="no processor package"):
        Rapl(tmp_path)
    folder = package(tmp_path, "intel-rapl:0", 1.0, limit="0")
    with pytest.raises(BackendAbsent, match="do not say"):
        Rapl(tmp_path)
    (folder / "energy_uj").unlink()
    with pytest.raises(BackendAbsent, match="cannot be read"):
        Rapl(tmp_path)


def test_the_simulator_says_that_it_invents_and_is_the_same_for_the_same_seed() -> None:
    invented = (Probe(backend=Backend.SIMULATED, used=True),)
    node = Node("n", "e", SimulatedBoards("n"), SimulatedHost(), invented, {}, 0.0)
    drawn = set()
    for second in range(0, 1200, 7):
        node = sampled(node, float(second))
        told = report(node)
        assert (told.boards_from, told.host_from) == (Backend.SIMULATED, Backend.SIMULATED)
        assert all(board.uuid.startswith(UUID_PREFIX) for board in told.boards)
        assert all(0 < board.watts <= board.nameplate_watts == 400.0 for board in told.boards)
        drawn.add(round(told.boards[0].watts, -1))
    assert drawn >= {60.0, 400.0}, "idle and at its limit"
    assert math.isfinite(told.boards[0].joules)
    again = SimulatedBoards("n").sample(77.0)
    assert SimulatedBoards("n").sample(77.0) == again
    assert SimulatedBoards("n", seed=1).sample(77.0) != again
