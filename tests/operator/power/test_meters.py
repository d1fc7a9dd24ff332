"""Meters of feeds, over real HTTP: what is read, what is a sentence, and that nothing else is reached or told."""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from tests.operator.builders import SETTINGS
from tests.operator.power.parts import domain

from busbar.kube.errors import Forbidden, NotFound
from busbar.kube.types import PowerDomain
from busbar.kube.types.power_domain import PowerDomainStatus
from busbar.kube.types.reasons import Reason
from busbar.operator.power import meter_calls
from busbar.operator.power.energy import FeedEnergy
from busbar.operator.power.meter_calls import Credentials, reachable
from busbar.operator.power.meters import Meters

HOUR = 1_800_000_000 // 3600 * 3600
"""A whole hour, in seconds since the epoch."""
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Instrument:
    """A server that answers as it is told, and remembers what it was asked."""

    url: str = ""
    answer: Any = None
    """JSON of the next answers, or a handler."""
    asked: list[web.Request] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        if callable(self.answer):
            told: web.StreamResponse = await self.answer(request)
            return told
        return (
            web.Response(body=self.answer)
            if isinstance(self.answer, bytes)
            else web.json_response(self.answer)
        )


async def _serve(found: Instrument, context: ssl.SSLContext | None = None) -> web.AppRunner:
    app = web.Application()
    app.router.add_get("/{tail:.*}", found.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    found.url = f"http://127.0.0.1:{port}" if context is None else f"https://localhost:{port}"
    return runner


@pytest.fixture
async def instrument() -> AsyncIterator[Instrument]:
    found = Instrument()
    runner = await _serve(found)
    yield found
    await runner.cleanup()


@dataclass
class Secure(Instrument):
    """The same over TLS, with a certificate that nobody knows."""

    ca: str = ""


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[Secure]:
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    file = tmp_path / "pair.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(private + made.public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    found = Secure(ca=made.public_bytes(Encoding.PEM).decode())
    runner = await _serve(found, context)
    yield found
    await runner.cleanup()


def vector(*values: str) -> dict[str, Any]:
    """What Prometheus answers to an instant query."""
    result = [{"metric": {"rack": str(i)}, "value": [1.8e9, value]} for i, value in enumerate(values)]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


def environment(**energy: object) -> dict[str, Any]:
    """A Redfish EnvironmentMetrics resource."""
    return {
        "@odata.type": "#EnvironmentMetrics.v1_3_0.EnvironmentMetrics",
        "@odata.id": "/redfish/v1/Chassis/1/EnvironmentMetrics",
        "Id": "EnvironmentMetrics",
        "PowerWatts": {"DataSourceUri": "/redfish/v1/Chassis/1/Sensors/Power", "Reading": 900.0},
        **energy,
    }


class Books:
    """An energy ledger with what a test says."""

    joules = 0.0

    def tick(self, *_: object) -> None:
        raise AssertionError("meters book nothing")

    def feed(self, uid: str, told: PowerDomainStatus | None) -> FeedEnergy | None:
        return FeedEnergy(self.joules, 0.0)

    def feed_sent(self, *_: object) -> None:
        raise AssertionError("meters send nothing")


@dataclass
class Bench:
    """Meters of one domain, with clocks that a test moves."""

    domain: PowerDomain
    secrets: dict[str, Mapping[str, object]] = field(default_factory=dict)
    now_s: float = float(HOUR)
    books: Books = field(default_factory=Books)
    read: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meters = Meters(
            lambda: [self.domain],
            self.secret,
            self.books,
            SETTINGS,
            lambda _: True,
            lambda: self.now_s,
            lambda: self.now_s,
        )

    async def secret(self, name: str) -> Mapping[str, object]:
        self.read.append(name)
        if name == "hidden":
            raise Forbidden(403, "Forbidden", "no right", f"GET Secret {name}")
        if name not in self.secrets:
            raise NotFound(404, "NotFound", "gone", f"GET Secret {name}")
        return self.secrets[name]

    async def look(self, passed_s: float = 0.0, ledger_j: float = 0.0) -> tuple[str, str]:
        """Reason and message after the next look."""
        self.now_s += passed_s
        self.books.joules += ledger_j
        await self.meters.once()
        told = self.meters.found[self.domain.metadata.name]
        return str(told.reason), told.message


def metered(kind: str, url: str, secret: str | None = None, **more: Any) -> PowerDomain:
    made = domain("rack", 10_000.0)
    meter: dict[str, Any] = {kind: {"url": url, **more}}
    if secret is not None:
        meter["secretName"] = secret
    wire = made.to_wire()
    wire["spec"]["meter"] = meter
    return PowerDomain.model_validate(wire)


def with_secret(of: PowerDomain) -> PowerDomain:
    """With a Secret that no rule has looked at."""
    assert of.spec.meter is not None
    meter = of.spec.meter.model_copy(update={"secret_name": "meter"})
    return of.model_copy(update={"spec": of.spec.model_copy(update={"meter": meter})})


def prometheus(url: str, unit: str = "Joules", secret: str | None = None) -> Bench:
    return Bench(metered("prometheus", url, secret, query='sum(pdu{rack="a 1"})', unit=unit))


def secret(**values: str) -> dict[str, object]:
    return {
        key.replace("ca_crt", "ca.crt"): b64encode(value.encode()).decode() for key, value in values.items()
    }


# -- what is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "values"),
    [
        ("Joules", ("1000", "1001000")),
        ("KilowattHours", ("5", str(5 + 1e6 / 3.6e6))),
        ("Watts", ("8333.333333", "8333.333333")),
    ],
)
async def test_the_growth_of_a_query_stands_beside_that_of_the_ledger(
    instrument: Instrument, unit: str, values: tuple[str, str]
) -> None:
    bench = prometheus(instrument.url + "/base/", unit)
    instrument.answer = vector(values[0])
    assert (await bench.look())[0] == "MeterRead"
    assert instrument.asked[0].path == "/base/api/v1/query"
    assert instrument.asked[0].query == {"query": 'sum(pdu{rack="a 1"})'}
    assert "Authorization" not in instrument.asked[0].headers
    instrument.answer = vector(values[1])
    assert (await bench.look(120.0, 0.9e6))[0] == "MeterRead"
    [hour] = bench.meters.found["rack"].book.hours
    assert (hour.start_s, hour.seconds, hour.ledger_j) == (HOUR, 120.0, 0.9e6)
    assert hour.meter_j == pytest.approx(1e6)
    assert hour.error == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (environment(EnergykWh={"Reading": 7.0}), environment(EnergykWh={"Reading": 7.0 + 1e6 / 3.6e6})),
        (environment(EnergyJoules={"Reading": 5}), environment(EnergyJoules={"Reading": 1_000_005})),
        (environment(PowerWatts={"Reading": 8000.0}), environment(PowerWatts={"Reading": 8666.6666667})),
        (
            {"Reading": 2.0, "ReadingUnits": "kW.h", "ReadingType": "EnergykWh"},
            {"Reading": 2.0 + 1e6 / 3.6e6, "ReadingUnits": "kW.h", "ReadingType": "EnergykWh"},
        ),
        (
            {"PowerControl": [{"PowerConsumedWatts": 8333.3}, {"PowerConsumedWatts": 0}]},
            {"PowerControl": [{"PowerConsumedWatts": 8333.366667}, {"PowerConsumedWatts": 0}]},
        ),
    ],
    ids=["EnergykWh", "EnergyJoules", "PowerWatts", "Sensor", "Power"],
)
async def test_redfish_resources_say_energy_or_else_watts(
    instrument: Instrument, first: dict[str, Any], second: dict[str, Any]
) -> None:
    bench = Bench(metered("redfish", instrument.url + "/redfish/v1/Chassis/1/EnvironmentMetrics"))
    instrument.answer = first
    assert (await bench.look())[0] == "MeterRead"
    instrument.answer = second
    assert (await bench.look(120.0, 1.1e6))[0] == "MeterRead"
    [hour] = bench.meters.found["rack"].book.hours
    assert hour.meter_j == pytest.approx(1e6, rel=1e-3)
    assert instrument.asked[0].path == "/redfish/v1/Chassis/1/EnvironmentMetrics"


async def test_credentials_of_the_secret_go_to_the_server_that_its_authority_names(secure: Secure) -> None:
    secure.answer = vector("5")
    bench = prometheus(secure.url, secret="meter")
    bench.secrets["meter"] = secret(token="t0ken\n", ca_crt=secure.ca)
    assert (await bench.look())[0] == "MeterRead"
    assert secure.asked[-1].headers["Authorization"] == "Bearer t0ken"
    bench.secrets["meter"] = secret(username="root", password="c:alvin", ca_crt=secure.ca)
    assert (await bench.look(30.0))[0] == "MeterRead"
    assert secure.asked[-1].headers["Authorization"] == "Basic " + b64encode(b"root:c:alvin").decode()
    assert bench.read == ["meter", "meter"]


async def test_a_certificate_that_nobody_vouches_for_gets_no_credentials(secure: Secure) -> None:
    bench = prometheus(secure.url, secret="meter")
    bench.secrets["meter"] = secret(token="t0ken")
    reason, message = await bench.look()
    assert reason == "MeterUnreachable"
    assert "certificate" in message.lower()
    assert secure.asked == []


# -- what is a sentence, and never a crash ------------------------------------------------------------------------


async def _refuses(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"code": "Base.1.0.NoValidSession"}}, status=401)


async def _redirects(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound(f"{request.scheme}://{request.host}/elsewhere")


async def _talks_on(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    for _ in range(64):
        await answer.write(b" " * 65536)
    return answer


async def _fails(_: web.Request) -> web.StreamResponse:
    body = {"status": "error", "errorType": "bad_data", "error": "parse error: unexpected <EOF>"}
    return web.json_response(body, status=400)


@pytest.mark.parametrize(
    ("answer", "reason", "text"),
    [
        (_refuses, "MeterRefused", "refuses the credentials (401)"),
        (_redirects, "MeterUnreadable", "answers 302, and no redirect is followed"),
        (_talks_on, "MeterUnreadable", "answers with more than 256 KiB"),
        (_fails, "MeterUnreadable", "refused the query: parse error: unexpected <EOF>"),
        (vector("NaN"), "MeterUnreadable", "says NaN, which is no amount"),
        (vector("+Inf"), "MeterUnreadable", "says +Inf, which is no amount"),
        (vector("-5"), "MeterUnreadable", "says -5, which is no amount"),
        (vector("five"), "MeterUnreadable", "says five, which is no amount"),
        (vector(), "MeterUnreadable", "gives 0 series"),
        (vector("1", "2"), "MeterUnreadable", "gives 2 series, and one number is needed"),
        (b"<html>", "MeterUnreadable", "does not answer with JSON"),
        (b"[" * 100_000, "MeterUnreadable", "does not answer with JSON"),
        ([1], "MeterUnreadable", "does not answer with an object"),
        (
            {"status": "success", "data": {"resultType": "matrix", "result": []}},
            "MeterUnreadable",
            "a matrix",
        ),
        (
            {"status": "success", "data": {"resultType": "scalar", "result": [1]}},
            "MeterUnreadable",
            "no number",
        ),
        ({"status": "success"}, "MeterUnreadable", "a result of no type"),
    ],
)
async def test_answers_that_are_no_amount_become_a_sentence(
    instrument: Instrument, answer: Any, reason: str, text: str
) -> None:
    bench = prometheus(instrument.url)
    instrument.answer = answer
    found = await bench.look()
    assert found[0] == reason
    assert text in found[1]
    instrument.answer = vector("5")
    assert (await bench.look(30.0))[0] == "MeterRead"
    assert [request.path for request in instrument.asked] == ["/api/v1/query"] * 2


@pytest.mark.parametrize(
    "answer", [{"@odata.type": "#Chassis"}, environment(PowerWatts={"Reading": None}), {"Reading": 3}]
)
async def test_a_resource_without_energy_or_power_is_named(
    instrument: Instrument, answer: dict[str, Any]
) -> None:
    bench = Bench(metered("redfish", instrument.url + "/redfish/v1/Chassis/1"))
    instrument.answer = answer
    reason, message = await bench.look()
    assert reason == "MeterUnreadable"
    assert "a resource without energy or power" in message


async def test_a_server_that_is_away_or_silent_costs_a_bounded_time(
    instrument: Instrument, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter_calls, "TIMEOUT_S", 0.05)
    forever = asyncio.Event()

    async def sleeps(_: web.Request) -> web.StreamResponse:
        await forever.wait()
        return web.Response()

    instrument.answer = sleeps
    reason, message = await prometheus(instrument.url).look()
    forever.set()
    assert reason == "MeterUnreachable"
    assert "has not answered within" in message
    reason, message = await prometheus("http://127.0.0.1:1").look()
    assert reason == "MeterUnreachable"
    assert "cannot be reached" in message
    assert (await prometheus("http://no-such-name.invalid").look())[0] == "MeterUnreachable"


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("gone", None, "There is no Secret gone in the platform's namespace"),
        (
            "hidden",
            None,
            "The operator may not read the Secret hidden: name it in the chart's value power.meterSecrets",
        ),
        ("empty", {}, "has neither token, nor username and password, nor ca.crt"),
        ("odd", {"token": "not base64!"}, "has a value that is no text"),
        ("cut", secret(token="a\nb"), "no header can carry"),
        ("bad-ca", secret(ca_crt="no certificate"), "a ca.crt that is no certificate"),
    ],
)
async def test_a_secret_that_cannot_be_used_is_a_sentence(name: str, data: Any, text: str) -> None:
    bench = prometheus("https://localhost:1", secret=name)
    if data is not None:
        bench.secrets[name] = data
    reason, message = await bench.look()
    assert reason == "MeterRefused"
    assert text in message


async def test_no_credentials_go_over_plain_http(instrument: Instrument) -> None:
    """The API server refuses such an object; a rule there can be changed by who installs the CRDs."""
    bench = Bench(with_secret(metered("prometheus", instrument.url, query="q", unit="Joules")))
    bench.secrets["meter"] = secret(token="t0ken")
    reason, message = await bench.look()
    assert (reason, instrument.asked) == ("MeterRefused", [])
    assert "no https" in message
    assert "t0ken" not in repr(Credentials.of(bench.secrets["meter"]))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "169.254.169.254",
        "0.0.0.0",
        "[::ffff:127.0.0.1]",
        "[fe80::1]",
        "0x7f000001",
    ],
)
async def test_addresses_that_only_the_operator_reaches_are_called_for_nobody(
    host: str, instrument: Instrument
) -> None:
    port = instrument.url.rpartition(":")[2]
    bench = prometheus(f"http://{host}:{port}")
    bench.meters.judge = reachable
    reason, message = await bench.look()
    assert (reason, instrument.asked) == ("MeterAddressRefused", [])
    assert "No meter can have the address" in message


def test_private_addresses_are_where_meters_are() -> None:
    assert all(
        reachable(ip_address(one)) for one in ("10.1.2.3", "192.168.0.9", "172.16.0.1", "fd00::7", "8.8.8.8")
    )


# -- jumps, hours, restarts ---------------------------------------------------------------------------------------


async def test_a_meter_that_goes_back_or_leaps_proves_nothing_and_begins_anew(instrument: Instrument) -> None:
    bench = prometheus(instrument.url, "KilowattHours")
    for reading, reason in (
        ("10", "MeterRead"),
        ("2", "MeterJumped"),
        ("2.1", "MeterRead"),
        ("900", "MeterJumped"),
    ):
        instrument.answer = vector(reading)
        found = await bench.look(60.0, 3.0e5)
        assert found[0] == reason, found
        if reading == "2":
            assert "went back from 10.000 kWh to 2.000 kWh" in found[1]
    [hour] = bench.meters.found["rack"].book.hours
    assert (hour.seconds, hour.ledger_j) == (60.0, 3.0e5)
    assert hour.meter_j == pytest.approx(0.1 * 3.6e6)


async def test_hours_are_kept_apart_and_the_last_whole_one_is_told(instrument: Instrument) -> None:
    bench = prometheus(instrument.url)
    meter_j = 0.0
    for _ in range(70):
        instrument.answer = vector(str(meter_j))
        reason, message = await bench.look(60.0, 60.0 * 4850.0)
        assert reason == "MeterRead"
        meter_j += 60.0 * 5000.0
    assert "In the hour from" in message
    assert message.endswith("the ledger has 4.77 kWh and the meter 4.92 kWh: -3.0%.")
    book = bench.meters.found["rack"].book
    assert [hour.start_s for hour in book.hours] == [HOUR, HOUR + 3600]
    assert book.hours[0].seconds == pytest.approx(3540.0)


async def test_another_operator_goes_on_with_the_hours_of_the_status_and_another_meter_begins_anew(
    instrument: Instrument,
) -> None:
    bench = prometheus(instrument.url)
    instrument.answer = vector("0")
    await bench.look()
    instrument.answer = vector("1000000")
    await bench.look(120.0, 9e5)
    status = PowerDomainStatus(meter=bench.meters.found["rack"].status)
    again = Bench(bench.domain.model_copy(update={"status": status}), now_s=bench.now_s + 60)
    await again.look()
    assert again.meters.found["rack"].book.hours == bench.meters.found["rack"].book.hours
    other = metered("prometheus", instrument.url, query="other", unit="Joules")
    again.domain = other.model_copy(update={"status": status})
    await again.look(30.0)
    assert again.meters.found["rack"].book.hours == ()
    again.domain = domain("rack", 10_000.0)
    await again.meters.once()
    assert again.meters.found == {}


async def test_one_meter_that_breaks_in_an_unforeseen_way_stops_no_other(
    instrument: Instrument, monkeypatch: pytest.MonkeyPatch
) -> None:
    instrument.answer = vector("5")
    good = metered("prometheus", instrument.url, query="q", unit="Joules")
    bad = with_secret(good)
    named = bad.metadata.model_copy(update={"name": "bad"})
    bench = Bench(good)
    bench.meters.domains = lambda: [bad.model_copy(update={"metadata": named}), good]

    async def breaks(name: str) -> Mapping[str, object]:
        raise RuntimeError("unforeseen")

    bench.meters.secret = breaks
    assert (await bench.look())[0] == "MeterRead"
    assert bench.meters.found["bad"].reason is Reason.METER_UNREADABLE
    assert "log" in bench.meters.found["bad"].message
