"""The server's address and the caller's token: `${XDG_CONFIG_HOME:-~/.config}/busbar/config.yaml`, mode 0600.

Written by `busbar login`. `BUSBAR_SERVER`, `BUSBAR_TOKEN` and `BUSBAR_NAMESPACE` take precedence over the file, so
that a pipeline needs no file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from busbar.cli.errors import NotAuthorised, UsageProblem
from busbar.cli.whole_file import WholeFile


@dataclasses.dataclass(frozen=True)
class Config:
    """One server and one identity."""

    server: str | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    namespace: str | None = None
    ca_file: str | None = None

    def required(self) -> tuple[str, str]:
        """(server, token); raises NotAuthorised saying how to log in."""
        if not self.server or not self.token:
            missing = "server" if not self.server else "token"
            raise NotAuthorised(
                f"No {missing} is known. Log in with `busbar login URL`, or set BUSBAR_SERVER and BUSBAR_TOKEN."
            )
        return self.server, self.token


def path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file's path."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or str(Path.home()), ".config")
    return Path(base) / "busbar" / "config.yaml"


def load(environ: Mapping[str, str] = os.environ) -> Config:
    """The file's settings, overridden by the environment. Raises UsageProblem for a file of another form."""
    file = path(environ)
    config = Config()
    if file.exists():
        config = _parse(file)
    changes = {
        name: value
        for name in ("server", "token", "namespace", "ca_file")
        if (value := environ.get(f"BUSBAR_{name.upper()}"))
    }
    return dataclasses.replace(config, **changes)


def save(config: Config, environ: Mapping[str, str] = os.environ) -> Path:
    """Replace the file; only its owner may read it."""
    import yaml

    file = path(environ)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    with WholeFile(file, 0o600) as out:
        yaml.safe_dump(known, out.file, sort_keys=False, encoding="utf-8")
        out.keep()
    return file


def _parse(file: Path) -> Config:
    import yaml

    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        return Config(**document)
    except (yaml.YAMLError, TypeError, OSError, UnicodeDecodeError) as error:
        raise UsageProblem(
            f"{file} is not a busbar configuration ({error}); remove it and log in again"
        ) from error
