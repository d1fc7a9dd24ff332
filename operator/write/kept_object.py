"""One ConfigMap of our own namespace in which a part of the operator keeps what its successor goes on from.

It is read once, when this process begins to lead. Each write names the version that it replaces, and is fenced as all
others.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import zlib

from busbar.kube.client import KubeClient, Object
from busbar.kube.errors import ApiError, Conflict, ConnectionFailed, Forbidden, NotFound
from busbar.kube.resources import CONFIG_MAPS

log = logging.getLogger(__name__)

DATA = "checkpoint"
AGAIN_S = 2.0
MOST_BYTES = 900_000
"""Of its data; the API server takes a ConfigMap of 1 MiB."""
MOST_PLAIN_BYTES = 64_000_000
"""More than any that is written here has before it is compressed."""


def unpacked(data: bytes) -> bytes:
    """What zlib has compressed. Raises ValueError where it is not whole, or larger than any that is written here."""
    made = zlib.decompressobj()
    try:
        plain = made.decompress(data, MOST_PLAIN_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not made.eof:
        raise ValueError("it is too large, or not whole")
    return plain


class KeptObject:
    """`load` once, then `write`, and `write_last` at the end."""

    def __init__(self, reader: KubeClient, writer: KubeClient, namespace: str, name: str, what: str) -> None:
        """`what` it is, for the log."""
        self._reader, self._writer = reader, writer
        self._namespace, self._name, self._what = namespace, name, what
        self._version: str | None = None
        """Of the object; None: it does not exist."""

    async def load(self) -> bytes | None:
        """Its data; None where there is none, or it may not be read. Tries until the API server answers."""
        while True:
            try:
                found = await self._read()
                break
            except Forbidden as error:
                log.warning("%s may not be read, and is passed over: %s", self._what, error)
                return None
            except (ApiError, ConnectionFailed) as error:
                log.warning("%s was not read, and is tried again: %s", self._what, error)
                await asyncio.sleep(AGAIN_S)
        if found is None:
            return None
        try:
            return base64.b64decode((found.get("binaryData") or {}).get(DATA) or "", validate=True)
        except ValueError as error:
            log.warning("%s cannot be read, and is passed over: %s", self._what, error)
            return None

    async def write(self, data: bytes) -> None:
        """Replaces what is there. Raises ApiError, ConnectionFailed or Fenced.

        Where the write fails, the version is read again: it may have been done, or somebody has deleted the object.
        """
        metadata: Object = {
            "name": self._name,
            "namespace": self._namespace,
            "labels": {"app.kubernetes.io/managed-by": "busbar"},
        }
        body: Object = {
            "apiVersion": CONFIG_MAPS.api_version,
            "kind": CONFIG_MAPS.kind,
            "metadata": metadata,
            "binaryData": {DATA: base64.b64encode(data).decode()},
        }
        try:
            if self._version is None:
                written = await self._writer.create(CONFIG_MAPS, body, self._namespace)
            else:
                metadata["resourceVersion"] = self._version
                written = await self._writer.replace(CONFIG_MAPS, body, self._namespace)
        except (ApiError, ConnectionFailed):
            await self._read()
            raise
        self._version = written["metadata"]["resourceVersion"]

    async def write_last(self, data: bytes) -> None:
        """As `write`, when the task that wrote has been cancelled: the write that this stopped may have been done."""
        try:
            await self.write(data)
        except Conflict:  # the version is known now
            await self.write(data)

    async def _read(self) -> Object | None:
        """The object, whose version is remembered."""
        try:
            found = await self._reader.get(CONFIG_MAPS, self._name, self._namespace)
        except NotFound:
            self._version = None
            return None
        self._version = found["metadata"]["resourceVersion"]
        return found
