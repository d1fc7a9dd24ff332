"""Authentication of callers: audience-bound projected tokens, TokenReview and SubjectAccessReview.

Our processes authenticate with service-account tokens that the kubelet projects for one audience each, so a token
stolen from the gateway's call to the operator is valid nowhere else. The receiver verifies it with a TokenReview, and
for a person's call checks the right with a SubjectAccessReview: the API server is the one authority for kubectl, REST
and portal. Positive answers are cached for 60 s, negative ones for 5 s. The cache holds digests, no tokens.
"""

import hashlib
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from busbar.kube.token_file import TokenFile

AUDIENCE_OPERATOR = "busbar-operator"
AUDIENCE_API = "busbar-api"
AUDIENCE_GATEWAY = "busbar-gateway"
TOKEN_ROOT = Path("/var/run/secrets/busbar")
SERVICE_ACCOUNT_ROOT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
POSITIVE_S = 60.0
NEGATIVE_S = 5.0
CACHE_ENTRIES = 4096
TIMEOUT_S = 5.0

V = TypeVar("V")


class ReviewError(Exception):
    """The review failed, so the right is unknown. Answer 503 and let the caller retry."""

    code = "ReviewUnavailable"


@dataclass(frozen=True)
class Caller:
    """An authenticated identity, with the API server's user name and groups."""

    username: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def is_service_account(self, namespace: str, name: str) -> bool:
        """Whether this is that service account."""
        return self.username == f"system:serviceaccount:{namespace}:{name}"


@dataclass(frozen=True)
class Access:
    """One question to SubjectAccessReview: may this caller do this verb to this resource?"""

    verb: str
    group: str
    resource: str
    namespace: str | None = None
    name: str | None = None
    subresource: str | None = None

    def to_attributes(self) -> dict[str, str]:
        """The `resourceAttributes` of the review."""
        given = {
            "verb": self.verb,
            "group": self.group,
            "resource": self.resource,
            "namespace": self.namespace,
            "name": self.name,
            "subresource": self.subresource,
        }
        return {key: value for key, value in given.items() if value is not None}


class Poster(Protocol):
    """Posts one JSON object to the API server and returns the answer; raises ReviewError when it cannot."""

    async def __call__(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]: ...


@dataclass
class ExpiringCache(Generic[V]):
    """Cached answers with a time to live; the oldest are evicted first."""

    clock: Callable[[], float] = time.monotonic
    limit: int = CACHE_ENTRIES
    _entries: OrderedDict[str, tuple[float, V]] = field(default_factory=OrderedDict)

    def get(self, key: str) -> tuple[bool, V | None]:
        """(found, value)."""
        entry = self._entries.get(key)
        if entry is None or entry[0] <= self.clock():
            self._entries.pop(key, None)
            return False, None
        return True, entry[1]

    def put(self, key: str, value: V, ttl_s: float) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (self.clock() + ttl_s, value)
        while len(self._entries) > self.limit:
            self._entries.popitem(last=False)


class Reviewer:
    """Cached TokenReview and SubjectAccessReview."""

    def __init__(self, post: Poster, clock: Callable[[], float] = time.monotonic) -> None:
        self._post = post
        self._tokens: ExpiringCache[Caller | None] = ExpiringCache(clock)
        self._access: ExpiringCache[bool] = ExpiringCache(clock)

    async def authenticate(self, token: str, audience: str | None = None) -> Caller | None:
        """The owner of the token, or None when it is not valid for the audience. Raises ReviewError."""
        key = hashlib.sha256(f"{audience}\0{token}".encode()).hexdigest()
        found, caller = self._tokens.get(key)
        if found:
            return caller
        spec: dict[str, Any] = {"token": token}
        if audience is not None:
            spec["audiences"] = [audience]
        answer = await self._post(
            "/apis/authentication.k8s.io/v1/tokenreviews",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec},
        )
        caller = _caller_of(answer.get("status") or {}, audience)
        self._tokens.put(key, caller, POSITIVE_S if caller else NEGATIVE_S)
        return caller

    async def authenticate_header(self, header: str | None, audience: str | None = None) -> Caller | None:
        """The same for the value of an Authorization header."""
        scheme, _, token = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return None
        return await self.authenticate(token.strip(), audience)

    async def is_allowed(self, caller: Caller, access: Access) -> bool:
        """Whether the caller may do this, by the cluster's own authoriser. Raises ReviewError."""
        key = repr((caller, access))
        found, allowed = self._access.get(key)
        if found:
            return bool(allowed)
        answer = await self._post(
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": caller.username,
                    "uid": caller.uid,
                    "groups": list(caller.groups),
                    "extra": {key: list(values) for key, values in caller.extra},
                    "resourceAttributes": access.to_attributes(),
                },
            },
        )
        status = answer.get("status") or {}
        allowed = bool(status.get("allowed")) and not status.get("denied")
        self._access.put(key, allowed, POSITIVE_S if allowed else NEGATIVE_S)
        return allowed


def _caller_of(status: Mapping[str, Any], audience: str | None) -> Caller | None:
    if not status.get("authenticated"):
        return None
    # An authenticator without audience support answers without audiences; then the token is not bound to ours.
    if audience is not None and audience not in (status.get("audiences") or ()):
        return None
    user = status.get("user") or {}
    return Caller(
        username=user.get("username", ""),
        uid=user.get("uid", ""),
        groups=tuple(user.get("groups") or ()),
        extra=tuple(sorted((key, tuple(values)) for key, values in (user.get("extra") or {}).items())),
    )


class ApiServerPoster:
    """Posts to the API server with this pod's own service account, which needs only `create` on the two reviews."""

    def __init__(self, url: str, tls: ssl.SSLContext, token: TokenFile) -> None:
        self._url = url.rstrip("/")
        self._tls = tls
        self._token = token
        self._session: Any = None

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str], root: Path = SERVICE_ACCOUNT_ROOT) -> Self:
        """The API server by a pod's standard environment. Raises KeyError or OSError outside a cluster."""
        host, port = environment["KUBERNETES_SERVICE_HOST"], environment["KUBERNETES_SERVICE_PORT"]
        host = f"[{host}]" if ":" in host else host
        tls = ssl.create_default_context(cafile=str(root / "ca.crt"))
        return cls(f"https://{host}:{port}", tls, TokenFile(root / "token"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __call__(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        import aiohttp  # only servers need it; importers of the constants do not load it

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=self._tls, limit=16),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            )
        try:
            async with self._session.post(
                self._url + path, json=body, headers=self._token.header(), allow_redirects=False
            ) as response:
                if response.status not in (200, 201):
                    text = (await response.text())[:300]
                    raise ReviewError(f"the API server answered {response.status} to POST {path}: {text}")
                answer: dict[str, Any] = await response.json()
                return answer
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ReviewError(f"the API server could not be asked (POST {path}): {error!r}") from error
