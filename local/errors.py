"""The errors of the one-machine cluster.

::

    LocalError                 the base; its message says what, where and what to do
    ├── PreflightError         this machine lacks something; nothing has been changed yet
    ├── BuildError             a program or an image could not be built; names its log
    ├── StartError             a part of the cluster did not come up; names its log
    └── InstanceError          the named instance is in the wrong state for the request

Each carries a stable ``code`` that scripts may match.
"""

from __future__ import annotations


class LocalError(Exception):
    """Base of all errors that ``busbar up``, ``down`` and ``status`` raise on purpose."""

    code = "local_error"


class PreflightError(LocalError):
    """The machine cannot run the cluster; raised before anything is changed."""

    code = "preflight"


class BuildError(LocalError):
    """Compiling a program or building an image failed."""

    code = "build"


class StartError(LocalError):
    """A part did not become ready in its time."""

    code = "start"


class InstanceError(LocalError):
    """The instance's name or state does not allow the request."""

    code = "instance"
