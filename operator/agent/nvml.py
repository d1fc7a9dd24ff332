"""Boards of NVIDIA through NVML (the package nvidia-ml-py, if it is installed). Setting a limit needs root.

The limit that was set and the limit in force are two numbers: the lowest of what is set in the board, in band and out
of band holds. Units of NVML: milliwatts, and millijoules since the driver was loaded (Volta and newer).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from busbar.kube.contracts.power import Backend

from .limits import BoardLimit, LimitFailed
from .meters import BackendAbsent, Sample


class Nvml:
    """All boards of the node."""

    backend = Backend.NVML

    def __init__(self, library: Any = None) -> None:
        """Raises BackendAbsent where there is no driver, no board, or a board that does not say what it can draw.

        Args:
            library: the module pynvml, or a stand-in.
        """
        try:
            self._nvml = library or importlib.import_module("pynvml")
        except ImportError as error:
            raise BackendAbsent("the package nvidia-ml-py is not installed") from error
        self._error: type[Exception] = self._nvml.NVMLError
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._boards = [self._board(i) for i in range(count)]
        except self._error as error:
            raise BackendAbsent(str(error)) from error
        if not self._boards:
            raise BackendAbsent("there is no board")

    def sample(self, clock_s: float) -> Sequence[Sample]:
        return [self._sample(*board) for board in self._boards]

    def limits(self) -> Sequence[BoardLimit]:
        """Of the boards that take limits."""
        return [self._limit(*board) for board in self._boards if board[2] < board[3]]

    def set_limit(self, uuid: str, watts: float) -> None:
        handle = next(handle for handle, name, _, _ in self._boards if name == uuid)
        try:
            self._nvml.nvmlDeviceSetPowerManagementLimit(handle, int(watts * 1000))
        except self._error as error:
            raise LimitFailed(f"{uuid}: {error}") from error

    def board_of(self, uuid: str) -> str | None:
        """The uuid of the board that a slice (MIG) is on; None: there is no such slice."""
        try:
            part = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            return self._uuid(self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part))
        except self._error:
            return None

    def _uuid(self, handle: Any) -> str:
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        return uuid.decode() if isinstance(uuid, bytes) else str(uuid)

    def _limit(self, handle: Any, uuid: str, floor_w: float, nameplate_w: float) -> BoardLimit:
        try:
            default = self._nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
            is_set = self._nvml.nvmlDeviceGetPowerManagementLimit(handle)
            enforced = self._nvml.nvmlDeviceGetEnforcedPowerLimit(handle)
        except self._error as error:
            raise BackendAbsent(f"{uuid}: {error}") from error
        return BoardLimit(uuid, floor_w, nameplate_w, default / 1000, is_set / 1000, enforced / 1000)

    def _board(self, index: int) -> tuple[Any, str, float, float]:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        return handle, self._uuid(handle), *self._limits(handle)

    def _limits(self, handle: Any) -> tuple[float, float]:
        """(lowest limit, most that it can draw) in watts. A board that takes no limit has its nameplate for both."""
        try:
            low, high = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
            return low / 1000, high / 1000
        except self._error:
            limit = self._nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
            return limit, limit

    def _sample(self, handle: Any, uuid: str, floor_w: float, nameplate_w: float) -> Sample:
        try:
            watts = self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        except self._error as error:
            raise BackendAbsent(f"{uuid}: {error}") from error
        try:
            joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
        except self._error:
            joules = None
        return Sample(uuid, floor_w, nameplate_w, watts, joules)
