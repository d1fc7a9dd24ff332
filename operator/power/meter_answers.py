"""What meters answer, as energy or watts: Prometheus' instant queries and Redfish's resources. Pure.

Sources: Prometheus, "HTTP API", instant queries and the format of their answers; DMTF DSP2046, "Redfish Resource and Schema
Guide": EnvironmentMetrics, PowerDistributionMetrics, Sensor and Power.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from busbar.kube.types.power_meter import MeterUnit
from busbar.operator.power.meter_book import Value

J_PER_KWH = 3.6e6
_SCALE = {"J": 1.0, "kJ": 1e3, "W.h": 3600.0, "kW.h": J_PER_KWH, "MW.h": 1e3 * J_PER_KWH}
"""Units of energy that a Sensor may have (UCUM, as Redfish writes them)."""
_WATTS = {"W": 1.0, "kW": 1e3, "MW": 1e6}
MOST_TEXT = 200


class Unreadable(Exception):
    """The answer has no such number; the text completes "its meter …"."""


def prometheus(body: bytes, unit: MeterUnit) -> Value:
    """The one number of an instant query.

    Raises:
        Unreadable: an error, no number or several, or none that a meter could say.
    """
    told = _object(body)
    if told.get("status") != "success":
        raise Unreadable(f"refused the query: {_text(told.get('error')) or 'it does not say why'}")
    data = told.get("data")
    kind, result = (data.get("resultType"), data.get("result")) if isinstance(data, dict) else (None, None)
    if kind == "vector" and isinstance(result, list):
        if len(result) != 1:
            raise Unreadable(
                f"gives {len(result)} series, and one number is needed: sum them, or correct the query"
            )
        pair = result[0].get("value") if isinstance(result[0], dict) else None
    elif kind == "scalar":
        pair = result
    else:
        raise Unreadable(f"gives a {_text(kind) or 'result of no type'}, and a scalar or vector is needed")
    if not isinstance(pair, list) or len(pair) != 2:
        raise Unreadable("gives no number")
    number = _number(pair[1])
    if unit is MeterUnit.WATTS:
        return Value(watts=number)
    return Value(joules=number * (J_PER_KWH if unit is MeterUnit.KILOWATT_HOURS else 1.0))


def redfish(body: bytes) -> Value:
    """Energy of the resource where it has any, else its draw.

    Raises:
        Unreadable: it has neither.
    """
    told = _object(body)
    ways: tuple[Callable[[dict[str, object]], Value | None], ...] = (_metrics, _sensor, _power)
    for way in ways:
        found = way(told)
        if found is not None:
            return found
    raise Unreadable(
        f"is a resource without energy or power ({_text(told.get('@odata.type')) or 'of no type'})"
    )


def _metrics(told: dict[str, object]) -> Value | None:
    """EnvironmentMetrics and PowerDistributionMetrics."""
    for name, scale in (("EnergykWh", J_PER_KWH), ("EnergyJoules", 1.0)):
        reading = _reading(told.get(name))
        if reading is not None:
            return Value(joules=_number(reading) * scale)
    reading = _reading(told.get("PowerWatts"))
    return None if reading is None else Value(watts=_number(reading))


def _sensor(told: dict[str, object]) -> Value | None:
    reading, unit = told.get("Reading"), told.get("ReadingUnits")
    if reading is None or not isinstance(unit, str):
        return None
    if unit in _SCALE:
        return Value(joules=_number(reading) * _SCALE[unit])
    return Value(watts=_number(reading) * _WATTS[unit]) if unit in _WATTS else None


def _power(told: dict[str, object]) -> Value | None:
    """The older Power resource."""
    controls = told.get("PowerControl")
    if not isinstance(controls, list):
        return None
    drawn = [
        one["PowerConsumedWatts"] for one in controls if isinstance(one, dict) and "PowerConsumedWatts" in one
    ]
    return Value(watts=sum(map(_number, drawn))) if drawn else None


def _reading(told: object) -> object:
    return told.get("Reading") if isinstance(told, dict) else None


def _object(body: bytes) -> dict[str, object]:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unreadable("does not answer with JSON") from error
    if not isinstance(told, dict):
        raise Unreadable("does not answer with an object")
    return told


def _number(told: object) -> float:
    try:
        number = (
            float(told) if isinstance(told, (str, int, float)) and not isinstance(told, bool) else math.nan
        )
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise Unreadable(f"says {_text(told) or 'nothing'}, which is no amount")
    return number


def _text(told: object) -> str:
    text = " ".join(str("" if told is None else told).split())
    return "".join(c for c in text if c.isprintable())[:MOST_TEXT]
