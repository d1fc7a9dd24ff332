"""The supervisor of an instance: PID 1 of its own process, mount and network namespaces.

``launch`` starts it detached.  It makes the namespaces, a veth pair to the machine and a few private mounts,
then keeps the parts named in ``supervisor.json`` running: each starts when the parts in its ``after`` are ready, is
restarted with a growing back-off when it dies, and writes its own log.  SIGHUP reads the file again (new parts start,
changed ones restart, missing ones stop); SIGTERM stops everything in order.

Why namespaces: when this process ends, in whatever way, the kernel ends every process in the PID namespace, and then
removes the mounts, network devices, nft tables and network settings of the namespaces. Two instances do not affect
each other, and only cgroups are left for ``down`` to remove.

It imports nothing outside the standard library and this folder, and has one thread.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from busbar.local import cgroups, namespaces
from busbar.local.errors import StartError
from busbar.local.instance import start_ticks, write_json
from busbar.local.mounts import private_mounts

TICK_S = 0.25
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
STEADY_AFTER_S = 30.0  # a part that ran this long is restarted without a back-off
STOP_S = 8.0  # time between SIGTERM and SIGKILL, for a part or for all pods together
LOG_LIMIT = 32 * 1024 * 1024
WAY_OUT_DEVICE = "out0"
MASQUERADE = f"""
table ip busbar {{
  chain out {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{WAY_OUT_DEVICE}" masquerade
  }}
}}
"""


@dataclass(frozen=True)
class Part:
    """A program to keep running."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    ready: str = ""  # "tcp:host:port" or "unix:/path"; empty: ready once started
    digest: str = ""  # digest of its configuration files: when it changes, the part is restarted
    host_network: bool = False  # runs in the machine's network namespace, to listen on 127.0.0.1


@dataclass(frozen=True)
class Spec:
    """The parts that one supervisor runs; the content of ``supervisor.json``."""

    name: str
    folder: str
    cgroup: str
    host_device: str
    host_address: str
    node_address: str
    network: str
    binds: dict[str, str]  # folder on the machine → name under /run/busbar
    parts: list[Part]

    @classmethod
    def read(cls, file: Path) -> Spec:
        """Load from ``supervisor.json``."""
        raw: dict[str, Any] = json.loads(file.read_text())
        return cls(**{**raw, "parts": [Part(**part) for part in raw["parts"]]})

    def write(self, file: Path) -> None:
        """Store as ``supervisor.json``."""
        write_json(file, asdict(self))


@dataclass
class Child:
    """A part and its current process."""

    part: Part
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    not_before: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    ready: bool = False
    restarts: int = 0


def launch(folder: Path) -> int:
    """Start the supervisor of the instance in ``folder`` detached; returns its process id on the machine.

    Raises:
        StartError: it ended at once; supervisor.log says why.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "supervisor.log").open("ab") as log:
        starter = subprocess.Popen(
            [sys.executable, "-m", "busbar.local.supervisor", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        told, _ = starter.communicate()
    if not told:
        raise StartError(f"the supervisor ended with {starter.returncode}; see {log.name}")
    return int(told)


def main() -> int:
    """Make the PID and mount namespaces, fork the supervisor into them and report its process id."""
    folder = Path(sys.argv[1])
    namespaces.unshare(namespaces.CLONE_NEWPID | namespaces.CLONE_NEWNS | namespaces.CLONE_NEWIPC)
    gate_read, gate_write = os.pipe()
    pid = os.fork()
    if pid:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        running = {"pid": pid, "started_ticks": start_ticks(pid), "started_at": now}
        write_json(folder / "running.json", running)
        print(pid, flush=True)
        os.write(gate_write, b"x")
        return 0
    os.close(gate_write)
    written = os.read(gate_read, 1)  # running.json is written: from now on `down` can find this process
    os.close(gate_read)
    if not written:
        return 1
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    try:
        Supervisor(folder).run()
    except BaseException as error:
        log(f"supervisor failed: {type(error).__name__}: {error}")
        raise
    return 0


def log(text: str) -> None:
    """One line into supervisor.log."""
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}", file=sys.stderr, flush=True)


class Supervisor:
    """Runs as PID 1 of the instance."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = Spec.read(folder / "supervisor.json")
        self.children: dict[str, Child] = {}
        self.host_net = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.last_state = ""
        self.logs_checked = 0.0

    def run(self) -> None:
        """Set up, then supervise until SIGTERM."""
        watched = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        private_mounts(self.spec.binds)
        self.connect()
        cgroups.create(self.spec.cgroup)
        cgroups.weigh(self.spec.cgroup, os.cpu_count() or 1)
        cgroups.enter(f"{self.spec.cgroup}/system/supervisor", os.getpid())
        self.adopt(self.spec)
        log(f"supervising {len(self.children)} parts")
        while True:
            self.tick()
            received = signal.sigtimedwait(watched, TICK_S)
            if received is None or received.si_signo == signal.SIGCHLD:
                continue
            if received.si_signo == signal.SIGHUP:
                self.adopt(Spec.read(self.folder / "supervisor.json"))
                continue
            break
        self.stop_all()

    # -- set-up ------------------------------------------------------------------------------------

    def connect(self) -> None:
        """A network namespace of our own, joined to the machine by a veth pair."""
        spec = self.spec
        namespaces.unshare(namespaces.CLONE_NEWNET)
        inside = f"{spec.host_device}i"
        on_host = [
            f"link add {spec.host_device} type veth peer name {inside}",
            f"addr add {spec.host_address}/30 dev {spec.host_device}",
            f"link set {spec.host_device} up",
            f"link set {inside} netns {os.getpid()}",
        ]
        here = [
            "link set lo up",
            f"link set {inside} name eth0",
            f"addr add {spec.node_address}/30 dev eth0",
            "link set eth0 up",
            f"route add default via {spec.host_address}",
        ]
        for command in on_host:
            self.ip(command, host=True)
        for command in here:
            self.ip(command)
        self.ip(f"route add {spec.network} via {spec.node_address} dev {spec.host_device}", host=True)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")  # a setting of this namespace only
        subprocess.run(["nft", "-f", "-"], input=MASQUERADE, text=True, check=True, stdout=sys.stderr)

    def ip(self, command: str, host: bool = False) -> None:
        """Run ``ip`` here or in the machine's network."""
        before = self.enter_host_network if host else None
        subprocess.run(["ip", *command.split()], check=True, stdout=sys.stderr, preexec_fn=before)

    def enter_host_network(self) -> None:
        """In a child process: return to the machine's network namespace."""
        namespaces.setns(self.host_net, namespaces.CLONE_NEWNET)

    # -- parts -------------------------------------------------------------------------------------

    def adopt(self, spec: Spec) -> None:
        """Start, restart and stop parts so that those of ``spec`` run."""
        self.spec = spec
        wanted = {part.name: part for part in spec.parts}
        for name, child in list(self.children.items()):
            if wanted.get(name) != child.part:
                log(f"{name}: stopping, its definition changed")
                self.stop(name)
        for name, part in wanted.items():
            self.children.setdefault(name, Child(part))

    def tick(self) -> None:
        """Reap dead children, start the parts that may start, check which became ready, and publish the state."""
        self.reap()
        now = time.monotonic()
        for child in self.children.values():
            if child.process is None:
                startable = all(a not in self.children or self.children[a].ready for a in child.part.after)
                if startable and now >= child.not_before:
                    self.start(child, now)
            elif not child.ready and answers(child.part.ready):
                child.ready = True
                log(f"{child.part.name}: ready after {now - child.started:.1f} s")
            elif child.ready and now - child.started > STEADY_AFTER_S:
                child.pause_s = FIRST_PAUSE_S
        self.publish()
        if now - self.logs_checked > 30:
            self.logs_checked = now
            trim_logs(self.folder / "logs")

    def start(self, child: Child, now: float) -> None:
        """Start a part's process in its own session, cgroup and log."""
        part = child.part
        host_network = part.host_network

        def prepare() -> None:
            if host_network:
                self.enter_host_network()
            signal.pthread_sigmask(signal.SIG_SETMASK, set())

        with (self.folder / "logs" / f"{part.name}.log").open("ab") as output:
            try:
                child.process = subprocess.Popen(
                    part.argv,
                    env={**os.environ, **part.env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=prepare,
                )
            except OSError as error:
                log(f"{part.name}: cannot be started: {error}")
                child.not_before = now + LONGEST_PAUSE_S
                return
        child.started, child.ready = now, False
        with suppress(OSError):  # it may have ended already
            cgroups.enter(f"{self.spec.cgroup}/system/{part.name}", child.process.pid)

    def reap(self) -> None:
        """Collect every dead child, ours and the orphans that PID 1 inherits."""
        by_pid = {c.process.pid: c for c in self.children.values() if c.process is not None}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = by_pid.get(pid)
            if child is not None and child.process is not None:
                self.buried(child, os.waitstatus_to_exitcode(status))

    def buried(self, child: Child, code: int) -> None:
        """Record a part's end and when it may start again."""
        assert child.process is not None
        child.process.returncode = code
        child.process, child.ready = None, False
        child.restarts += 1
        child.not_before = time.monotonic() + child.pause_s
        log(f"{child.part.name}: ended with {code}; again in {child.pause_s:g} s")
        child.pause_s = min(child.pause_s * 2, LONGEST_PAUSE_S)

    def publish(self) -> None:
        """Write ``parts.json`` when something changed."""
        state = {
            name: {
                "pid": child.process.pid if child.process else None,
                "ready": child.ready,
                "restarts": child.restarts,
                "log": str(self.folder / "logs" / f"{name}.log"),
            }
            for name, child in self.children.items()
        }
        text = json.dumps(state)
        if text != self.last_state:
            self.last_state = text
            write_json(self.folder / "parts.json", state)

    # -- the end -----------------------------------------------------------------------------------

    def stop(self, *names: str) -> None:
        """Send SIGTERM to these parts together, wait, send SIGKILL to those that still run, and drop them."""
        children = [self.children[name] for name in names if name in self.children]
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for child in children:
                if child.process is not None:
                    with suppress(ProcessLookupError):
                        os.killpg(child.process.pid, sent)
            deadline = time.monotonic() + STOP_S
            while any(child.process for child in children) and time.monotonic() < deadline:
                time.sleep(0.02)
                self.reap()
        for name in names:
            self.children.pop(name, None)

    def stop_all(self) -> None:
        """The kubelet first, so that it restarts nothing; then the pods; then the rest, etcd last."""
        log("stopping")
        self.stop("traffic", "kubelet")
        self.stop_pods()
        self.stop(*(name for name in self.children if name not in ("kube-apiserver", "etcd")))
        self.stop("kube-apiserver")
        self.stop("etcd")
        log("stopped")

    def stop_pods(self) -> None:
        """Give the pods' processes time to save their state."""
        pods = f"{self.spec.cgroup}/kubepods"
        for pid in cgroups.members(pods):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while cgroups.members(pods) and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.1)


def answers(ready: str) -> bool:
    """Whether the socket that a part's readiness names accepts a connection."""
    kind, _, where = ready.partition(":")
    if not kind:
        return True
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    host, _, port = where.rpartition(":")
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(where if kind == "unix" else (host, int(port)))
        except OSError:
            return False
    return True


def trim_logs(folder: Path) -> None:
    """Keep each log under ``LOG_LIMIT``: the old half becomes ``<part>.log.1``."""
    for file in folder.glob("*.log"):
        if file.stat().st_size > LOG_LIMIT:
            shutil.copyfile(file, file.with_suffix(".log.1"))
            os.truncate(file, 0)  # writers append, so they go on at the new end


if __name__ == "__main__":
    raise SystemExit(main())
