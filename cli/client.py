"""The Python client: Busbar's REST API as methods with typed results.

    from busbar.cli.client import Client

    with Client("https://busbar.example", token) as client:
        job = client.create(manifest)
        for line in client.logs(job, follow=True):
            print(line)

Synchronous, one connection pool, no retries of its own. Every failure is an exception of
`busbar.cli.errors` whose message says what went wrong and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

import httpx2

from busbar.cli import results
from busbar.cli.answers import error_of, foreign, is_of, parsed, unexpected, unreachable
from busbar.cli.errors import BusbarError, UsageProblem
from busbar.cli.lines import Lines
from busbar.cli.results import KINDS, TRAINING_JOB, Kind, Object
from busbar.kube.contracts.power_view import FeedPower, NodePower
from busbar.kube.contracts.service_plan import ServicePlanAnswer

if TYPE_CHECKING:
    import ssl

BASE = "/api/v1alpha1"
TIMEOUT = httpx2.Timeout(30.0, connect=5.0)
LONG = httpx2.Timeout(600.0, connect=5.0)
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
P = TypeVar("P")


class Client:
    """A connection to one Busbar server as one caller."""

    def __init__(
        self,
        server: str,
        token: str,
        *,
        ca_file: str | None = None,
        timeout_s: float | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """`timeout_s` limits each request; None: 5 s to connect, 30 s for the rest."""
        verify, trust_env = trust_of(server, ca_file)
        self.server = server.rstrip("/")
        self._http = httpx2.Client(
            base_url=self.server + BASE,
            headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
            timeout=TIMEOUT if timeout_s is None else httpx2.Timeout(timeout_s),
            verify=verify,
            transport=transport,
            trust_env=trust_env,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # -- objects of our kinds ---------------------------------------------------------------------------

    def listing(self, kind: Kind, namespace: str | None = None) -> list[Object]:
        """Objects of a kind, newest first; without a namespace, all objects that the caller may see."""
        path = f"/{kind.plural}" if namespace is None else _collection(kind, namespace)
        return [self._object(kind, document) for document in self._items(path)]

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return self._object(kind, self._json("GET", _one(kind, namespace, name)))

    def create(self, document: Mapping[str, Any], namespace: str | None = None) -> Object:
        """Create the object; its namespace is the argument's or its metadata's."""
        kind = kind_of(document)
        namespace = namespace or _namespace_of(document)
        return self._object(kind, self._json("POST", _collection(kind, namespace), document))

    def change(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Object:
        """Apply a JSON merge patch to spec, labels or annotations."""
        return self._object(kind, self._json("PATCH", _one(kind, namespace, name), patch))

    def delete(self, kind: Kind, namespace: str, name: str) -> None:
        self._gone(_one(kind, namespace, name))

    def cancel(self, kind: Kind, namespace: str, name: str) -> Object:
        """Suspend: save the state, release all resources, keep the object and its output."""
        return self._object(kind, self._json("POST", _one(kind, namespace, name) + "/cancel"))

    def resume(self, kind: Kind, namespace: str, name: str) -> Object:
        """Undo a cancel."""
        return self._object(kind, self._json("POST", _one(kind, namespace, name) + "/resume"))

    def scale(self, namespace: str, name: str, replicas: int | None) -> Object:
        """Set a service's replica count; None returns control to the autoscaler."""
        path = _one(results.MODEL_SERVICE, namespace, name) + "/scale"
        return self._object(results.MODEL_SERVICE, self._json("PUT", path, {"replicas": replicas}))

    def preview(self, document: Mapping[str, Any], namespace: str | None = None) -> results.Preview:
        """Where a draft would run, when, at what cost, or exactly why not. No object is created."""
        kind_of(document)
        namespace = namespace or _namespace_of(document)
        path = f"/namespaces/{quote(namespace, safe='')}/preview"
        return parsed(results.Preview, self._json("POST", path, document))

    def service_plan(
        self,
        namespace: str,
        name: str,
        rate: float,
        *,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        percentile: float | None = None,
    ) -> ServicePlanAnswer:
        """The cheapest replicas of a service for so many requests per second; targets that are not given are its own."""
        asked = {"rate": str(rate)}
        for key, value in (
            ("ttftMilliseconds", ttft_s and 1000 * ttft_s),
            ("tpotMilliseconds", tpot_s and 1000 * tpot_s),
            ("percentile", percentile),
        ):
            if value is not None:
                asked[key] = str(value)
        path = _one(results.MODEL_SERVICE, namespace, name) + "/plan"
        return parsed(ServicePlanAnswer, self._json("GET", path, params=asked))

    def events(self, target: Object) -> list[results.Event]:
        """Events of the object and its pods, newest first."""
        found = self._items(_one(target.kind, target.namespace, target.name) + "/events")
        return [parsed(results.Event, item) for item in found]

    def logs(
        self,
        target: Object,
        *,
        follow: bool = False,
        rank: int = 0,
        tail: int | None = None,
        attempt: int | None = None,
    ) -> Iterator[str]:
        """Lines of the log of one rank, as they arrive."""
        asked: dict[str, str | int] = {"rank": rank, "follow": "true" if follow else "false"}
        if tail is not None:
            asked["tail"] = tail
        if attempt is not None:
            asked["attempt"] = attempt
        path = _one(target.kind, target.namespace, target.name) + "/logs"
        timeout = httpx2.Timeout(30.0, connect=5.0, read=None if follow else 30.0)
        try:
            with self._http.stream("GET", path, params=asked, timeout=timeout) as response:
                if response.status_code != 200:
                    response.read()
                    raise error_of(self.server, response)
                if not is_of(response, "text/plain"):
                    raise foreign(self.server, response)
                lines = Lines()
                for piece in response.iter_bytes():
                    yield from lines.of(piece)
                yield from lines.rest()
        except httpx2.RequestError as error:
            raise unreachable(self.server, error) from error

    # -- the rest ---------------------------------------------------------------------------------------

    def me(self) -> results.Me:
        return parsed(results.Me, self._json("GET", "/me"))

    def pools(self) -> list[dict[str, Any]]:
        """AcceleratorPools as JSON objects."""
        return [self._resource(item) for item in self._items("/pools")]

    def profiles(self) -> list[dict[str, Any]]:
        """PerformanceProfiles as JSON objects: speeds of workload classes."""
        return [self._resource(item) for item in self._items("/profiles")]

    def tenants(self) -> list[dict[str, Any]]:
        """Tenants as JSON objects."""
        return [self._resource(item) for item in self._items("/tenants")]

    def nodes(self) -> list[results.Node]:
        return [parsed(results.Node, item) for item in self._items("/nodes")]

    def power_domains(self) -> list[FeedPower]:
        """Power domains that the caller may see, by name."""
        return [parsed(FeedPower, item) for item in self._items("/power/domains")]

    def power_nodes(self) -> list[NodePower]:
        """What the nodes draw that the caller may see, by name."""
        return [parsed(NodePower, item) for item in self._items("/power/nodes")]

    def models(self) -> list[results.Model]:
        return [parsed(results.Model, item) for item in self._items("/models")]

    def gateway(self) -> str:
        """Base URL of the OpenAI API, as the server's administrators state it."""
        return str(self._part(self._json("GET", "/models"), "baseUrl", str))

    def usage(
        self, by: str = "tenant", since: datetime | None = None, until: datetime | None = None
    ) -> results.Usage:
        """Sums by tenant, namespace, service, model, key or day."""
        return parsed(results.Usage, self._json("GET", "/usage", params=_range(by, since, until)))

    def usage_lines(
        self, by: str = "tenant", since: datetime | None = None, until: datetime | None = None
    ) -> results.UsageLines:
        """The lines of an export by tenant, namespace, user, job or service."""
        return parsed(results.UsageLines, self._json("GET", "/usage/export", params=_range(by, since, until)))

    def usage_file(
        self,
        form: str,
        by: str = "tenant",
        since: datetime | None = None,
        until: datetime | None = None,
        currency: str | None = None,
    ) -> str:
        """The same as a file: csv, or focus, which has a row for each object and day and needs a currency."""
        asked = {**_range(by, since, until), "format": form}
        if currency is not None:
            asked["currency"] = currency
        response = self._send("GET", "/usage/export", params=asked)
        if not is_of(response, "text/csv"):
            raise foreign(self.server, response)
        return response.text

    def tokens(self, *, subject: str | None = None, state: str | None = None) -> Iterator[results.Token]:
        """Tokens without their texts, newest first; asks for page after page.

        Args:
            subject: for admins: only this person's.
            state: `live` or `ended` (revoked or expired); None: both.
        """
        asked = {name: value for name, value in (("subject", subject), ("state", state)) if value is not None}
        while True:
            page = self._json("GET", "/tokens", params={**asked, "limit": "500"})
            yield from (parsed(results.Token, item) for item in self._part(page, "items", list))
            if page.get("next") is None:
                return
            asked["before"] = page["next"]

    def create_token(
        self,
        *,
        scopes: Sequence[str] = ("rest", "inference"),
        description: str = "",
        role: str = "user",
        subject: str | None = None,
        tenant: str | None = None,
        expires_in_days: float | None = None,
        limits: results.TokenLimits | None = None,
    ) -> results.NewToken:
        """A new token; only this answer contains its text."""
        asked: dict[str, Any] = {"scopes": list(scopes), "description": description, "role": role}
        for name, value in (("subject", subject), ("tenant", tenant), ("expiresInDays", expires_in_days)):
            if value is not None:
                asked[name] = value
        if limits is not None:
            asked["limits"] = limits.to_wire()
        return parsed(results.NewToken, self._json("POST", "/tokens", asked))

    def rotate_token(self, token_id: str, overlap_hours: float) -> results.RotatedToken:
        """A token like this one, which ends after the overlap; only this answer contains the new text."""
        asked = {"overlapHours": overlap_hours}
        return parsed(
            results.RotatedToken, self._json("POST", f"/tokens/{quote(token_id, safe='')}/rotate", asked)
        )

    def revoke_token(self, token_id: str) -> None:
        self._gone(f"/tokens/{quote(token_id, safe='')}")

    def revoke_tokens(self, subject: str | None) -> int:
        """Revoke all live tokens of a person, or (None, for admins) of everybody, and end their browser sessions;
        the token of this client stays. Returns how many were live."""
        asked = {"everyone": True} if subject is None else {"subject": subject}
        return int(self._part(self._json("POST", "/tokens/revoke", asked), "revoked", int))

    # -- the database, for admins ------------------------------------------------------------------------

    def database(self) -> Iterator[bytes]:
        """All tables as lines of JSON, in pieces; the last line has the digest of the others."""
        try:
            with self._http.stream("GET", "/database", timeout=LONG) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(self.server, response)
                yield from response.iter_bytes()
        except httpx2.RequestError as error:
            raise unreachable(self.server, error) from error

    def database_state(self) -> results.DatabaseState:
        """Whether a backup of the database can be restored."""
        return parsed(results.DatabaseState, self._json("GET", "/database/state"))

    def restore_database(self, uids: Mapping[str, str], pieces: Iterable[bytes]) -> results.DatabaseRestored:
        """Restore what `database` gave into an unused database; `uids`: from old uids of objects to new ones."""

        def body() -> Iterator[bytes]:
            yield json.dumps({"uids": dict(uids)}).encode() + b"\n"
            yield from pieces

        try:
            response = self._http.put("/database", content=body(), timeout=LONG)
        except httpx2.RequestError as error:
            raise unreachable(self.server, error) from error
        if not response.is_success:
            raise error_of(self.server, response)
        return parsed(results.DatabaseRestored, self._read(response))

    # -- transport --------------------------------------------------------------------------------------

    def _json(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        return self._read(self._send(method, path, document, params))

    def _read(self, response: httpx2.Response) -> dict[str, Any]:
        """The JSON object that was answered."""
        try:
            found = response.json()
        except (ValueError, RecursionError) as error:
            raise foreign(self.server, response) from error
        if not isinstance(found, dict):
            raise foreign(self.server, response)
        return found

    def _items(self, path: str) -> list[dict[str, Any]]:
        """The objects of a list."""
        items = self._part(self._json("GET", path), "items", list)
        if not all(isinstance(item, dict) for item in items):
            raise self._unexpected("items that are no objects")
        return items

    def _part(self, document: Mapping[str, Any], name: str, kind: type[P]) -> P:
        """A field that every server answers with."""
        value = document.get(name)
        if not isinstance(value, kind):
            raise self._unexpected(f"no {name!r} of the right type")
        return value

    def _object(self, kind: Kind, document: dict[str, Any]) -> Object:
        return Object(kind, self._resource(document))

    def _resource(self, document: dict[str, Any]) -> dict[str, Any]:
        """A Kubernetes object."""
        parsed(results.Resource, document)
        return document

    def _gone(self, path: str) -> None:
        """Delete."""
        response = self._send("DELETE", path)
        if response.status_code != httpx2.codes.NO_CONTENT:
            raise foreign(self.server, response)

    def _unexpected(self, what: str) -> BusbarError:
        return unexpected(f"{self.server} answered with {what}")

    def _send(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        try:
            response = self._http.request(method, path, json=document, params=params)
        except httpx2.RequestError as error:
            raise unreachable(self.server, error) from error
        if not response.is_success:
            raise error_of(self.server, response)
        return response


def _range(by: str, since: datetime | None, until: datetime | None) -> dict[str, str]:
    asked = {"by": by}
    for name, moment in (("since", since), ("until", until)):
        if moment is not None:
            asked[name] = moment.isoformat()
    return asked


def _address(server: str) -> SplitResult:
    try:
        parts = urlsplit(server)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # an invalid port or IPv6 address
        pass
    raise UsageProblem(f"{server!r} is not a server's address; write it as https://busbar.example")


def trust_of(server: str, ca_file: str | None) -> tuple[ssl.SSLContext | bool, bool]:
    """httpx's `verify` and `trust_env` for a server. Raises UsageProblem for an address or certificates that are none."""
    # A proxy from the environment cannot reach a server on this machine.
    return _trusted(ca_file), _address(server).hostname not in _LOOPBACK


def _trusted(ca_file: str | None) -> ssl.SSLContext | bool:
    if not ca_file:
        return True
    import ssl

    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # also ssl.SSLError
        raise UsageProblem(
            f"{ca_file} cannot be used as certificates to trust: {error.strerror or error}. It must hold PEM; "
            "log in again with another --ca-file, or correct BUSBAR_CA_FILE"
        ) from error


def kind_of(document: Mapping[str, Any]) -> Kind:
    """The kind of a manifest; raises UsageProblem for one that REST does not manage."""
    name = document.get("kind")
    for kind in KINDS:
        if kind.name == name:
            return kind
    raise UsageProblem(
        f"kind {name!r}: busbar manages TrainingJob and ModelService; apply others with kubectl apply -f"
    )


def _namespace_of(document: Mapping[str, Any]) -> str:
    namespace = (document.get("metadata") or {}).get("namespace")
    if not namespace:
        raise UsageProblem("the object has no metadata.namespace; add it, or say which with --namespace")
    return str(namespace)


def _collection(kind: Kind, namespace: str) -> str:
    return f"/namespaces/{quote(namespace, safe='')}/{kind.plural}"


def _one(kind: Kind, namespace: str, name: str) -> str:
    return f"{_collection(kind, namespace)}/{quote(name, safe='')}"


__all__ = ["TRAINING_JOB", "Client", "kind_of"]
