"""``python -m busbar.local.images lock`` refreshes the lock files; ``… build`` builds and pushes."""

from __future__ import annotations

import sys

from busbar.local.errors import LocalError
from busbar.local.images.buildah import find_uv
from busbar.local.images.builder import build_images
from busbar.local.images.lock import refresh


def main(arguments: list[str]) -> int:
    """Entry point."""
    try:
        if arguments == ["lock"]:
            refresh(find_uv())
        elif arguments == ["build"]:
            print(build_images())
        else:
            print("usage: python -m busbar.local.images lock|build", file=sys.stderr)
            return 2
    except LocalError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
