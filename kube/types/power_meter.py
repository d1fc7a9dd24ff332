"""The meter of a feed: an instrument that is not ours, for comparison with the energy ledger."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from busbar.kube.types.meta import ObjectName, SpecModel, StatusModel

URL_PATTERN = r"^https?://[A-Za-z0-9\[\]:._-]+(/[^\s?#@]*)?$"
"""No user, query or fragment."""
MOST_HOURS = 24

MeterUrl = Annotated[str, Field(pattern=URL_PATTERN, max_length=1024)]
Joules = Annotated[float, Field(ge=0)]


class MeterUnit(StrEnum):
    """What the number is that a query gives."""

    JOULES = "Joules"
    """Energy since any moment."""
    KILOWATT_HOURS = "KilowattHours"
    """The same."""
    WATTS = "Watts"
    """The draw now; the energy is its integral over the looks, every half minute."""


class PrometheusMeter(SpecModel):
    """A query of a Prometheus server."""

    url: MeterUrl = Field(description="Base address of the server: /api/v1/query is appended.")
    query: Annotated[str, Field(min_length=1, max_length=2048)] = Field(
        description="PromQL that gives one number: a scalar, or a vector of one series."
    )
    unit: MeterUnit = Field(description="What the number is.")


class RedfishMeter(SpecModel):
    """A resource of a Redfish service."""

    url: MeterUrl = Field(
        description="Address of the resource: EnvironmentMetrics of a chassis, PowerDistributionMetrics of a rack's "
        "distribution unit, a Sensor of energy or power, or Power of a chassis. Energy is read where it has any, else the draw."
    )


class PowerMeter(SpecModel):
    """Where the feed's own meter is read. What it says limits nothing and nobody."""

    prometheus: PrometheusMeter | None = Field(default=None, description="A query of a Prometheus server.")
    redfish: RedfishMeter | None = Field(default=None, description="A resource of a Redfish service.")
    secret_name: ObjectName | None = Field(
        default=None,
        description="A Secret in the platform's own namespace that the chart's value power.meterSecrets names, with token, or "
        "username and password, and ca.crt if the server's certificate needs it. Only with https.",
    )

    @property
    def url(self) -> str:
        """The address, of whichever kind it is."""
        found = self.prometheus or self.redfish
        return found.url if found is not None else ""


class MeteredHour(StatusModel):
    """Ledger and meter over the same part of one hour."""

    start_time: datetime = Field(description="When the hour began (UTC).")
    seconds: Annotated[float, Field(ge=0)] = Field(description="How much of it both have seen.")
    ledger_joules: Joules = Field(description="By the energy ledger.")
    meter_joules: Joules = Field(description="By the meter.")


class PowerMeterStatus(StatusModel):
    """What the meter has said."""

    read_time: datetime | None = Field(default=None, description="When it was last read with success.")
    hours: Annotated[list[MeteredHour], Field(max_length=MOST_HOURS)] | None = Field(
        default=None, description="The last hours, oldest first; the last one is still going on."
    )
