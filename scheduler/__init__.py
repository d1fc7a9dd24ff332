"""Pure scheduling decisions: snapshot in, plan out. No clock, no network, no Kubernetes, no torch.

snapshot = Snapshot(pools=..., nodes=..., tenants=..., jobs=..., table=...)
plan_, memo = plan(snapshot, Policy(), now, memo)
for action in plan_.actions: ...
for record in plan_.waiting: sentence(record, snapshot, viewer)
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exports import *  # noqa: F403 - mypy knows them by its __all__


def __getattr__(name: str) -> Any:
    """The names of `exports`, loaded when one is first used: who needs one room alone (the gateway `autoscale.shares`, engines
    `fit`) loads neither the planner nor numpy."""
    if name.startswith("__") or find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(name)  # of the modules, the import statement takes care
    try:
        found = globals()[name] = getattr(import_module(".exports", __name__), name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return found
