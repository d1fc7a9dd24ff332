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
from pydantic import ValidationError

from busbar.cli import results
from busbar.cli.errors import BusbarError, Invalid, NotAuthorised, NotFound, Unreachable, UsageProblem
from busbar.cli.results import KINDS, TRAINING_JOB, Kind, Object
from busbar.kube.contracts.power_view import FeedPower, NodePower
from busbar.kube.contracts.service_plan import ServicePlanAnswer
from busbar.kube.contracts.wire import WireModel

if TYPE_CHECKING:
    import ssl

BASE = "/api/v1alpha1"
TIMEOUT = httpx2.Timeout(30.0, connect=5.0)
LONG = httpx2.Timeout(600.0, connect=5.0)
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
W = TypeVar("W", bound=WireModel)


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
        return [Object(kind, document) for document in self._json("GET", path)["items"]]

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return Object(kind, self._json("GET", _one(kind, namespace, name)))

    def create(self, document: Mapping[str, Any], namespace: str | None = None) -> Object:
        """Create the object; its namespace is the argument's or its metadata's."""
        kind = kind_of(document)
        namespace = namespace or _namespace_of(document)
        return Object(kind, self._json("POST", _collection(kind, namespace), document))

    def change(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Object:
        """Apply a JSON merge patch to spec, labels or annotations."""
        return Object(kind, self._json("PATCH", _one(kind, namespace, name), patch))

    def delete(self, kind: Kind, namespace: str, name: str) -> None:
        self._send("DELETE", _one(kind, namespace, name))

    def cancel(self, kind: Kind, namespace: str, name: str) -> Object:
        """Suspend: save the state, release all resources, keep the object and its output."""
        return Object(kind, self._json("POST", _one(kind, namespace, name) + "/cancel"))

    def resume(self, kind: Kind, namespace: str, name: str) -> Object:
        """Undo a cancel."""
        return Object(kind, self._json("POST", _one(kind, namespace, name) + "/resume"))

    def scale(self, namespace: str, name: str, replicas: int | None) -> Object:
        """Set a service's replica count; None returns control to the autoscaler."""
        path = _one(results.MODEL_SERVICE, namespace, name) + "/scale"
        return Object(results.MODEL_SERVICE, self._json("PUT", path, {"replicas": replicas}))

    def preview(self, document: Mapping[str, Any], namespace: str | None = None) -> results.Preview:
        """Where a draft would run, when, at what cost, or exactly why not. No object is created."""
        kind_of(document)
        namespace = namespace or _namespace_of(document)
        path = f"/namespaces/{quote(namespace, safe='')}/preview"
        return _parse(results.Preview, self._json("POST", path, document))

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
        return _parse(ServicePlanAnswer, self._json("GET", path, params=asked))

    def events(self, target: Object) -> list[results.Event]:
        """Events of the object and its pods, newest first."""
        found = self._json("GET", _one(target.kind, target.namespace, target.name) + "/events")
        return [_parse(results.Event, item) for item in found["items"]]

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
                    raise _error(self.server, response)
                yield from response.iter_lines()
        except httpx2.TransportError as error:
            raise _unreachable(self.server, error) from error

    # -- the rest ---------------------------------------------------------------------------------------

    def me(self) -> results.Me:
        return _parse(results.Me, self._json("GET", "/me"))

    def pools(self) -> list[dict[str, Any]]:
        """AcceleratorPools as JSON objects."""
        return list(self._json("GET", "/pools")["items"])

    def profiles(self) -> list[dict[str, Any]]:
        """PerformanceProfiles as JSON objects: speeds of workload classes."""
        return list(self._json("GET", "/profiles")["items"])

    def tenants(self) -> list[dict[str, Any]]:
        """Tenants as JSON objects."""
        return list(self._json("GET", "/tenants")["items"])

    def nodes(self) -> list[results.Node]:
        return [_parse(results.Node, item) for item in self._json("GET", "/nodes")["items"]]

    def power_domains(self) -> list[FeedPower]:
        """Power domains that the caller may see, by name."""
        return [_parse(FeedPower, item) for item in self._json("GET", "/power/domains")["items"]]

    def power_nodes(self) -> list[NodePower]:
        """What the nodes draw that the caller may see, by name."""
        return [_parse(NodePower, item) for item in self._json("GET", "/power/nodes")["items"]]

    def models(self) -> list[results.Model]:
        return [_parse(results.Model, item) for item in self._json("GET", "/models")["items"]]

    def gateway(self) -> str:
        """Base URL of the OpenAI API, as the server's administrators state it."""
        return str(self._json("GET", "/models")["baseUrl"])

    def usage(
        self, by: str = "tenant", since: datetime | None = None, until: datetime | None = None
    ) -> results.Usage:
        """Sums by tenant, namespace, service, model, key or day."""
        return _parse(results.Usage, self._json("GET", "/usage", params=_range(by, since, until)))

    def usage_lines(
        self, by: str = "tenant", since: datetime | None = None, until: datetime | None = None
    ) -> results.UsageLines:
        """The lines of an export by tenant, namespace, user, job or service."""
        return _parse(results.UsageLines, self._json("GET", "/usage/export", params=_range(by, since, until)))

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
        return self._send("GET", "/usage/export", params=asked).text

    def tokens(self, *, subject: str | None = None, state: str | None = None) -> Iterator[results.Token]:
        """Tokens without their texts, newest first; asks for page after page.

        Args:
            subject: for admins: only this person's.
            state: `live` or `ended` (revoked or expired); None: both.
        """
        asked = {name: value for name, value in (("subject", subject), ("state", state)) if value is not None}
        while True:
            page = self._json("GET", "/tokens", params={**asked, "limit": "500"})
            yield from (_parse(results.Token, item) for item in page["items"])
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
        return _parse(results.NewToken, self._json("POST", "/tokens", asked))

    def rotate_token(self, token_id: str, overlap_hours: float) -> results.RotatedToken:
        """A token like this one, which ends after the overlap; only this answer contains the new text."""
        asked = {"overlapHours": overlap_hours}
        return _parse(
            results.RotatedToken, self._json("POST", f"/tokens/{quote(token_id, safe='')}/rotate", asked)
        )

    def revoke_token(self, token_id: str) -> None:
        self._send("DELETE", f"/tokens/{quote(token_id, safe='')}")

    def revoke_tokens(self, subject: str | None) -> int:
        """Revoke all live tokens of a person, or (None, for admins) of everybody, and end their browser sessions;
        the token of this client stays. Returns how many were live."""
        asked = {"everyone": True} if subject is None else {"subject": subject}
        return int(self._json("POST", "/tokens/revoke", asked)["revoked"])

    # -- the database, for admins ------------------------------------------------------------------------

    def database(self) -> Iterator[bytes]:
        """All tables as lines of JSON, in pieces; the last line has the digest of the others."""
        try:
            with self._http.stream("GET", "/database", timeout=LONG) as response:
                if not response.is_success:
                    response.read()
                    raise _error(self.server, response)
                yield from response.iter_bytes()
        except httpx2.TransportError as error:
            raise _unreachable(self.server, error) from error

    def database_state(self) -> results.DatabaseState:
        """Whether a backup of the database can be restored."""
        return _parse(results.DatabaseState, self._json("GET", "/database/state"))

    def restore_database(self, uids: Mapping[str, str], pieces: Iterable[bytes]) -> results.DatabaseRestored:
        """Restore what `database` gave into an unused database; `uids`: from old uids of objects to new ones."""

        def body() -> Iterator[bytes]:
            yield json.dumps({"uids": dict(uids)}).encode() + b"\n"
            yield from pieces

        try:
            response = self._http.put("/database", content=body(), timeout=LONG)
        except httpx2.TransportError as error:
            raise _unreachable(self.server, error) from error
        if not response.is_success:
            raise _error(self.server, response)
        return _parse(results.DatabaseRestored, response.json())

    # -- transport --------------------------------------------------------------------------------------

    def _json(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> Any:
        response = self._send(method, path, document, params)
        try:
            return response.json()
        except ValueError as error:
            raise _foreign(self.server, response) from error

    def _send(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        try:
            response = self._http.request(method, path, json=document, params=params)
        except httpx2.TransportError as error:
            raise _unreachable(self.server, error) from error
        if not response.is_success:
            raise _error(self.server, response)
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


def _parse(model: type[W], document: object) -> W:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise BusbarError(
            f"the server's answer is not as expected (is it a newer version?): {error}"
        ) from error


def _unreachable(server: str, error: Exception) -> Unreachable:
    return Unreachable(
        f"{server} does not answer ({error or type(error).__name__}). Is the address right, and is it up?"
    )


def _foreign(server: str, response: httpx2.Response) -> BusbarError:
    return BusbarError(
        f"{server} answered {response.status_code} to {response.request.url.path}, but not as Busbar does. "
        "Is this the address of the API and portal?"
    )


def _error(server: str, response: httpx2.Response) -> BusbarError:
    status = response.status_code
    try:
        told = json.loads(response.content)["error"]
        message, code, field = str(told["message"]), str(told["code"]), told.get("field")
    except (ValueError, KeyError, TypeError):
        if status in (502, 503, 504):
            return Unreachable(f"{server} answered {status}; try again in a moment")
        return _foreign(server, response)
    if status == 401:
        return NotAuthorised(f"{message}. Log in again with `busbar login {server}`.", code=code, field=field)
    kinds: dict[int, type[BusbarError]] = {
        400: Invalid,
        403: NotAuthorised,
        404: NotFound,
        422: Invalid,
        503: Unreachable,
    }
    return kinds.get(status, BusbarError)(message, code=code, field=field)


__all__ = ["TRAINING_JOB", "Client", "kind_of"]
