"""A throw-away PostgreSQL server from the Debian package, in a temporary folder, not as root."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.free_port import free_port

BINARIES = Path("/usr/lib/postgresql")
SPEED = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "listen_addresses=127.0.0.1")


@dataclass
class Server:
    """A running server; `with Server.start() as server: server.url`."""

    folder: Path
    port: int
    bin: Path
    user: str
    durable: bool = False
    """Whether what was committed outlives `halt`."""

    @classmethod
    def start(cls, *, durable: bool = False) -> Self:
        """Make a cluster and start it; about two seconds."""
        folder = Path(tempfile.mkdtemp(prefix="busbar-postgres-"))
        # initdb refuses to run as root: run it as the package's own user then, and as the current user otherwise.
        user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        server = cls(folder, free_port(), _binaries(), user, durable)
        if os.geteuid() == 0:
            shutil.chown(folder, user, user)
        try:
            server._run(
                "initdb", "-D", str(folder / "data"), "-A", "trust", "-U", "busbar", "-N", "-E", "UTF8"
            )
            server.resume()
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def url(self) -> str:
        return f"postgresql+asyncpg://busbar@127.0.0.1:{self.port}/postgres"

    def resume(self) -> None:
        """Starts it where it does not run."""
        data, log = self.folder / "data", self.folder / "log"
        settings = (*SPEED, *(("synchronous_commit=on",) if self.durable else ()))
        options = " ".join(f"-c {setting}" for setting in settings) + f" -p {self.port} -k {self.folder}"
        self._run("pg_ctl", "-D", str(data), "-o", options, "-w", "-l", str(log), "start")

    def halt(self) -> None:
        """As in a crash of its processes: connections are cut."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")

    def stop(self) -> None:
        if (self.folder / "data" / "postmaster.pid").exists():
            self.halt()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.bin / program), *arguments]
        if os.geteuid() == 0:
            command = ["setpriv", "--reuid", self.user, "--regid", self.user, "--init-groups", *command]
        done = subprocess.run(
            command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.strip()[-500:]}")


def _binaries() -> Path:
    found = sorted(BINARIES.glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    if not found:
        raise RuntimeError("PostgreSQL is not installed; run `apt-get install postgresql`")
    return found[-1].parent
