"""Reads the meters of the feeds, every half minute, and keeps the energy ledger beside them.

It has a loop of its own and is read by the status, the metrics and the pages only: no lease, plan or budget knows it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from busbar.kube.errors import ApiError, ConnectionFailed, Forbidden, NotFound
from busbar.kube.types import PowerDomain
from busbar.kube.types.power_meter import MeteredHour, PowerMeter, PowerMeterStatus
from busbar.kube.types.reasons import Reason
from busbar.operator.power.energy import EnergyBook
from busbar.operator.power.meter_book import Hour, Look, MeterBook, Value
from busbar.operator.power.meter_calls import Credentials, Judge, MeterError, look, reachable
from busbar.operator.settings import Settings

log = logging.getLogger(__name__)

PARALLEL = 16
ReadSecret = Callable[[str], Awaitable[Mapping[str, object]]]
"""The `data` of a Secret in the platform's namespace, by name."""


@dataclass
class Metered:
    """What is kept of one meter."""

    meter: PowerMeter
    book: MeterBook
    read: datetime | None = None
    reason: Reason | None = None
    """None: it has not been tried yet."""
    message: str = ""

    @property
    def status(self) -> PowerMeterStatus:
        """For the domain's status."""
        return PowerMeterStatus(
            read_time=self.read,
            hours=[
                MeteredHour(
                    start_time=datetime.fromtimestamp(hour.start_s, UTC),
                    seconds=round(hour.seconds, 1),
                    ledger_joules=round(hour.ledger_j, 1),
                    meter_joules=round(hour.meter_j, 1),
                )
                for hour in self.book.hours
            ]
            or None,
        )


@dataclass
class Meters:
    """The meters of all domains that name one."""

    domains: Callable[[], list[PowerDomain]]
    secret: ReadSecret
    energy: EnergyBook
    settings: Settings
    judge: Judge = reachable
    steady: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    found: dict[str, Metered] = field(default_factory=dict)
    """By domain."""

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            try:
                await self.once()
            except Exception:  # what meters say must never stop the operator
                log.exception("meters were not read")
            await asyncio.sleep(self.settings.power_meter_s)

    async def once(self) -> None:
        """Looks at every meter once."""
        domains = {d.metadata.name: d for d in self.domains() if d.spec.meter is not None}
        for name in [name for name in self.found if name not in domains]:
            del self.found[name]
        gate = asyncio.Semaphore(PARALLEL)

        async def one(domain: PowerDomain, meter: PowerMeter) -> None:
            async with gate:
                await self._look(domain, meter)

        await asyncio.gather(*(one(d, d.spec.meter) for d in domains.values() if d.spec.meter is not None))

    async def _look(self, domain: PowerDomain, meter: PowerMeter) -> None:
        name = domain.metadata.name
        kept = self.found.get(name)
        if kept is None or kept.meter != meter:
            kept = self.found[name] = Metered(meter, MeterBook(_told(domain) if kept is None else ()))
        try:
            value = await look(meter, await self._credentials(meter), self.judge)
            self._take(kept, domain, value)
        except MeterError as error:
            kept.reason, kept.message = error.reason, str(error)
        except Exception:
            log.exception("a meter was not read", extra={"of": name})
            kept.reason, kept.message = (
                Reason.METER_UNREADABLE,
                "Its meter was not read; the operator's log says why.",
            )

    def _take(self, kept: Metered, domain: PowerDomain, value: Value) -> None:
        total = self.energy.feed(domain.metadata.uid, domain.status)
        now = Look(self.wall(), self.steady(), value, total.joules if total is not None else 0.0)
        wrong = kept.book.take(now, domain.spec.budget_watts)
        kept.read = datetime.fromtimestamp(now.wall_s, UTC).replace(microsecond=0)
        if wrong:
            kept.reason = Reason.METER_JUMPED
            kept.message = (
                f"Its meter {wrong}: the time since the last look counts for neither meter nor ledger."
            )
        else:
            kept.reason, kept.message = Reason.METER_READ, _compared(kept.book)

    async def _credentials(self, meter: PowerMeter) -> Credentials | None:
        if meter.secret_name is None:
            return None
        name = meter.secret_name
        try:
            return Credentials.of(await self.secret(name))
        except NotFound as error:
            text = f"There is no Secret {name} in the platform's namespace {self.settings.namespace}."
            raise MeterError(Reason.METER_REFUSED, text) from error
        except Forbidden as error:
            text = f"The operator may not read the Secret {name}: name it in the chart's value power.meterSecrets."
            raise MeterError(Reason.METER_REFUSED, text) from error
        except (ApiError, ConnectionFailed) as error:
            text = f"The Secret {name} cannot be read: {str(error)[:200]}."
            raise MeterError(Reason.METER_UNREACHABLE, text) from error


def _told(domain: PowerDomain) -> list[Hour]:
    """The hours that an earlier operator has written."""
    told = domain.status.meter if domain.status is not None else None
    return [
        Hour(int(hour.start_time.timestamp()), hour.seconds, hour.ledger_joules, hour.meter_joules)
        for hour in (told.hours or () if told is not None else ())
    ]


def _compared(book: MeterBook) -> str:
    whole = book.last_whole()
    if whole is None or whole.error is None:
        return "The meter is read; there is no whole hour to compare yet."
    when = datetime.fromtimestamp(whole.start_s, UTC)
    return (
        f"In the hour from {when:%H:%M} UTC the ledger has {whole.ledger_j / 3.6e6:,.2f} kWh and the meter "
        f"{whole.meter_j / 3.6e6:,.2f} kWh: {whole.error:+.1%}."
    )
