"""Nodes that do not answer Kubernetes, and when what is on them is given up, although it may still run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from busbar.kube.informer import Key
from busbar.operator.watch.projections import Node, Pod


def silent_nodes(pods: Iterable[Pod], nodes: Mapping[Key, Node]) -> Mapping[str, datetime]:
    """The nodes of `pods` that do not answer, and since when.

    None where most of the cluster's do not: then it is not they that are gone, but what they answer to.
    """
    places = {pod.place for pod in pods}
    found = {
        name: node.silent_since
        for name in places
        if (node := nodes.get(Key("", name))) is not None and node.silent_since is not None
    }
    return found if found and not _are_most(nodes.values()) else {}


def all_silent(nodes: Collection[Node]) -> frozenset[str]:
    """The names of all nodes that do not answer; none where most do not."""
    return frozenset() if _are_most(nodes) else frozenset(n.name for n in nodes if n.silent_since is not None)


def _are_most(nodes: Collection[Node]) -> bool:
    return 2 * sum(node.silent_since is not None for node in nodes) > len(nodes)


def with_silence(pods: Iterable[Pod], silent: Collection[str]) -> tuple[Pod, ...]:
    """The pods, those on silent nodes marked as such. A replica there is not given up yet, but another one starts beside it."""
    return tuple(replace(pod, silent=True) if pod.place in silent else pod for pod in pods)


def is_given_up(pod: Pod, silent: Mapping[str, datetime], now: datetime, after_s: float) -> bool:
    """Whether its node has been silent for `after_s`."""
    since = silent.get(pod.place)
    return since is not None and now - since >= timedelta(seconds=after_s)


def next_given_up_s(silent: Mapping[str, datetime], now: datetime, after_s: float) -> float | None:
    """In how many seconds more will be given up; None: no node is silent, or what is on those is given up already."""
    ages = [(now - since) / timedelta(seconds=1) for since in silent.values()]
    return min((after_s - age for age in ages if age < after_s), default=None)
