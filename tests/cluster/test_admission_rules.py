"""Every rule of the policies is needed: it refuses an attempt that succeeds when the rule is removed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster import admission_rows as rows
from tests.cluster import pod_writes
from tests.cluster.admission_rows import ESCAPES, JUMPS, PodRow
from tests.cluster.apiserver import ApiServer, Client, collection, render_chart
from tests.cluster.attempts import SETTLE_S, Attempt, refused
from tests.cluster.manifests import JSON
from tests.cluster.pod_writes import WRITES, PodWrite
from tests.cluster.rights import SYSTEM


@pytest.mark.apiserver
def test_every_sentence_of_every_policy_is_seen_in_a_test() -> None:
    """Each test asserts the words of one validation, so it fails when that validation is removed."""
    modules = [*Path(__file__).parent.glob("*admission*.py"), Path(pod_writes.__file__)]
    seen = "\n".join(module.read_text(encoding="utf-8") for module in modules)
    unseen = []
    for policy in (d for d in render_chart("busbar") if d["kind"] == "ValidatingAdmissionPolicy"):
        for validation in policy["spec"]["validations"]:
            said = validation.get("message") or validation["messageExpression"]
            words = re.findall(r"[A-Za-z./-]+", said)
            runs = (" ".join(words[i : i + 4]) for i in range(len(words) - 3))
            if not any(run in seen for run in runs):
                unseen.append(f"{policy['metadata']['name']}: {said}")
    assert unseen == []


def overlap(says: str, validation: JSON) -> int:
    """The number of consecutive words that a refusal shares with this validation's message."""
    words = re.findall(r"[A-Za-z./-]+", says)
    said = " ".join(re.findall(r"[A-Za-z./-]+", validation.get("message") or validation["messageExpression"]))
    runs = ((i, j) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return max(j - i for i, j in runs if j - i == 1 or " ".join(words[i:j]) in said)


RULES_OF_WRITES = {row.says: row for row in reversed(WRITES) if row.alone}
OWN_RULES = {row.says: row for row in (*JUMPS, *ESCAPES) if row.says != rows.RESTRICTED}


@pytest.fixture(scope="module")
def policies(tenancy: ApiServer) -> Iterator[Policies]:
    """Writes every policy with all its rules after the last test."""
    made = Policies(tenancy.admin)
    yield made
    made.keep_all_but(None)


GUARDING = ("busbar-queue", "busbar-pods", "busbar-pod-writes")


class Policies:
    """The policies on pods. A change takes about a second to take effect, so one write restores one rule and removes
    another."""

    def __init__(self, admin: Client) -> None:
        path = collection("ValidatingAdmissionPolicy")
        self._admin = admin
        self._missing: JSON | None = None
        self._whole = [admin.get(f"{path}/{name}").expect() for name in GUARDING]

    def rule_of(self, says: str) -> JSON:
        """The validation that refuses with these words."""
        rules = [rule for policy in self._whole for rule in policy["spec"]["validations"]]
        return max(rules, key=lambda rule: overlap(says, rule))

    def put_back(self, rule: JSON) -> None:
        """Make sure that this rule is not the one that the last test removed."""
        if self._missing is rule:
            self.keep_all_but(None)

    def keep_all_but(self, rule: JSON | None) -> None:
        """Write every policy with all its rules but this one."""
        self._missing = rule
        for policy in self._whole:
            kept = [other for other in policy["spec"]["validations"] if other is not rule]
            self._admin.merge(policy, {"spec": {"validations": kept}}).expect()


def succeeds_without(policies: Policies, says: str, attempt: Attempt) -> None:
    """The attempt is refused with these words, and accepted once the rule with this message is removed."""
    rule = policies.rule_of(says)
    policies.put_back(rule)
    refused(attempt, says)
    policies.keep_all_but(rule)
    end = time.monotonic() + SETTLE_S
    while not (answer := attempt(dryRun="All")).ok and time.monotonic() < end:
        time.sleep(0.05)
    assert answer.ok, f"another rule refuses it too: {answer.message}"


@pytest.mark.parametrize("row", OWN_RULES.values(), ids=lambda row: row.name)
def test_without_its_rule_the_attempt_succeeds(admin: Client, policies: Policies, row: PodRow) -> None:
    succeeds_without(policies, row.says, lambda **p: admin.create(row.bad(), **p))


@pytest.mark.parametrize("row", RULES_OF_WRITES.values(), ids=lambda row: row.name)
def test_without_its_rule_the_pod_is_changed(
    tenancy: ApiServer, admin: Client, policies: Policies, kept: Callable[..., JSON], row: PodWrite
) -> None:
    maker = tenancy.client(f"system:serviceaccount:{SYSTEM}:busbar-operator", ["system:masters"])
    stored = kept(row.target("changed"), maker)
    succeeds_without(
        policies,
        row.says,
        lambda **p: admin.merge(stored, row.patch(stored), subresource=row.subresource, **p),
    )
