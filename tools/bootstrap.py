"""Prepare a bare Debian machine for working on Busbar: one virtual environment and a few Debian packages.

Runs on the system's Python with only its standard library, because nothing else is installed yet.  Steps, each
skipped when already done (a stamp holds the digest of what was installed):

1. Python 3.11 or newer, with ``venv`` (Debian splits it into a package of its own).
2. ``.venv`` from ``requirements.lock``: every package pinned and checked by hash; Busbar itself in
   editable form.  ``uv`` does the installing (7 GB with torch take half a minute instead of five) and is
   itself pinned by hash in ``tools/uv.lock``.
3. With ``--test``: Debian's Chromium and PostgreSQL, for the portal and database tests.

Usage: ``python3 tools/bootstrap.py [--test]``
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".busbar-installed"
DOWNLOAD_TRIES = 3  # networks fail for short times
PAUSE_S = 10.0
TEST_PACKAGES = {"chromium": "/usr/bin/chromium", "postgresql": "/usr/lib/postgresql"}


class SetupError(Exception):
    """This machine lacks a requirement; the message says what to do."""


def say(text: str) -> None:
    """Print one progress line at once, also into a pipe."""
    print(f"[set-up] {text}", flush=True)


def run(what: str, command: list[str], *, tries: int = 1, **kwargs: object) -> None:
    """Run ``command``, up to ``tries`` times, with a line before and a time after.

    Raises:
        SetupError: the command failed each time; the message names it and its exit code.
    """
    say(f"{what} …")
    started = time.monotonic()
    for left in reversed(range(tries)):
        done = subprocess.run(command, check=False, **kwargs)  # type: ignore[call-overload]
        if not done.returncode or not left:
            break
        say(f"{what}: failed with exit code {done.returncode}; again in {PAUSE_S:g} s …")
        time.sleep(PAUSE_S)
    if done.returncode:
        raise SetupError(f"{what} failed with exit code {done.returncode}: {' '.join(command)}")
    say(f"{what}: done in {time.monotonic() - started:.0f} s")


def apt_install(packages: list[str]) -> None:
    """Install Debian packages.

    Raises:
        SetupError: not root, or apt-get failed.
    """
    if os.geteuid() != 0:
        raise SetupError(
            f"these Debian packages are missing and need root: apt-get install {' '.join(packages)}"
        )
    if shutil.which("apt-get") is None:
        raise SetupError(f"this is not a Debian system; install by hand: {' '.join(packages)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(
        "apt-get update",
        ["apt-get", "update", "-qq"],
        tries=DOWNLOAD_TRIES,
        env=env,
        stdout=subprocess.DEVNULL,
    )
    run(
        f"apt-get install {' '.join(packages)}",
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages],
        tries=DOWNLOAD_TRIES,
        env=env,
        stdout=subprocess.DEVNULL,
    )


def make_venv() -> None:
    """Create ``.venv`` where it is missing."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs before anything checked the version
        raise SetupError(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}")
    if (VENV / "bin" / "python").exists():
        return
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        apt_install(["python3-venv"])
    run("virtual environment in .venv", [sys.executable, "-m", "venv", str(VENV)])


def wanted_digest() -> str:
    """Digest of everything that determines the content of the environment."""
    digest = hashlib.sha256()
    for name in ("requirements.lock", "tools/uv.lock", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def install_python_packages() -> None:
    """Install exactly the packages of ``requirements.lock`` into ``.venv``, and Busbar in editable form."""
    wanted = wanted_digest()
    if STAMP.exists() and STAMP.read_text() == wanted:
        say("Python packages: up to date")
        return
    python = str(VENV / "bin" / "python")
    run(
        "uv",
        [python, "-m", "pip", "install", "-q", "--require-hashes", "-r", str(ROOT / "tools/uv.lock")],
        tries=DOWNLOAD_TRIES,
    )
    uv = str(VENV / "bin" / "uv")
    lock = str(ROOT / "requirements.lock")
    run(
        "Python packages from requirements.lock (about 7 GB with torch)",
        [uv, "pip", "sync", "-q", "--python", python, "--require-hashes", lock],
        tries=DOWNLOAD_TRIES,
    )
    run(
        "Busbar itself, editable",
        [
            uv,
            "pip",
            "install",
            "-q",
            "--python",
            python,
            "--no-deps",
            "--no-build-isolation",
            "-e",
            str(ROOT),
        ],
    )
    STAMP.write_text(wanted)


def install_test_packages() -> None:
    """Install the Debian packages that only the tests need."""
    missing = [name for name, path in TEST_PACKAGES.items() if not Path(path).exists()]
    if missing:
        apt_install(missing)
    else:
        say("Debian packages for the tests: present")


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--test", action="store_true", help="also what the tests need (Chromium, PostgreSQL)")
    arguments = parser.parse_args()
    try:
        make_venv()
        install_python_packages()
        if arguments.test:
            install_test_packages()
    except SetupError as error:
        print(f"[set-up] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
