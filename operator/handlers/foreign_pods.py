"""The handlers of pods and Jobs of other controllers that opted in, and of pods that lost their owners."""

from __future__ import annotations

from busbar.kube.informer import Key
from busbar.kube.types.reasons import Reason
from busbar.operator.decisions import Admit, Decision, Wait
from busbar.operator.handlers.shared import Shared
from busbar.operator.pods.foreign_pods import admit_pod, is_claim, lacking, release_job
from busbar.operator.pods.orphans import Reaper
from busbar.operator.queue.controller import Item
from busbar.operator.steady_clock import utc_now
from busbar.operator.write.events import Notice


class ForeignPods:
    """Reconciles one pod or batch/v1 Job at a time; remembers nothing."""

    def __init__(self, shared: Shared, reaper: Reaper) -> None:
        self._shared, self._reaper = shared, reaper

    async def reconcile(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        """A pod of another controller that opted in, or one of ours that may have lost its owner."""
        found = self._shared.caches.pods.items.get(key)
        if found is None:
            return None
        if found.kind:
            return await self._reaper.handle(found, utc_now())
        if found.gated and is_claim(found):
            held_back = self._shared.rounds.held_back.get(Item("Pod", key), "")
            waits = {
                Reason.BUDGET_SPENT: self._shared.holds.of_namespace(key.namespace).why,
                Reason.GUARANTEES_OF_OTHERS: held_back,
            }
            for reason, text in waits.items():
                if text:
                    notice = Notice("v1", "Pod", key.namespace, key.name, found.uid, reason, text)
                    self._shared.writer.put_notice(notice)
                    return None
        for decision in decisions:
            if isinstance(decision, Admit):
                node = self._shared.caches.nodes.items.get(Key("", decision.placement.nodes[0]))
                action = admit_pod(found, decision, node)
                if action is not None:
                    await self._shared.writer.carry_out((action,))
            elif isinstance(decision, Wait):
                tenant = self._shared.caches.tenant_of.get(key.namespace, "")
                text = lacking(found, tenant, self._shared.caches.pools.items.values()) or decision.message
                self._shared.writer.put_notice(
                    Notice("v1", "Pod", key.namespace, key.name, found.uid, decision.reason, text)
                )
        return None

    async def reconcile_job(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        found = self._shared.caches.batch_jobs.items.get(key)
        if found is None:
            return None
        owners = self._shared.caches.tenant_of
        action = release_job(found, key.namespace in owners)
        if action is not None:
            await self._shared.writer.carry_out((action,))
        return None
