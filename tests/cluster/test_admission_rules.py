"""Every rule of the policies is needed: each is seen to refuse, and with it taken out the attempt succeeds."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster import admission_rows as rows
from tests.cluster.admission_rows import ESCAPES, JUMPS, PodRow
from tests.cluster.apiserver import ApiServer, Client, collection, render_chart
from tests.cluster.attempts import SETTLE_S, refused
from tests.cluster.manifests import JSON


@pytest.mark.apiserver
def test_every_sentence_of_every_policy_is_seen_in_a_test() -> None:
    """Each test asserts the words of one validation, so with that validation taken out it fails."""
    modules = Path(__file__).parent.glob("*admission*.py")
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
    """How many words in a row a refusal shares with what this validation says."""
    words = re.findall(r"[A-Za-z./-]+", says)
    said = " ".join(re.findall(r"[A-Za-z./-]+", validation.get("message") or validation["messageExpression"]))
    runs = ((i, j) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return max(j - i for i, j in runs if j - i == 1 or " ".join(words[i:j]) in said)


OWN_RULES = {row.says: row for row in (*JUMPS, *ESCAPES) if row.says != rows.RESTRICTED}


@pytest.fixture(scope="module")
def policies(tenancy: ApiServer) -> Iterator[Policies]:
    """Whole again after the last test."""
    made = Policies(tenancy.admin)
    yield made
    made.keep_all_but(None)


class Policies:
    """The policies on pods. A change takes about a second to count, so one write puts back and takes out."""

    def __init__(self, admin: Client) -> None:
        path = collection("ValidatingAdmissionPolicy")
        self._admin = admin
        self._missing: JSON | None = None
        self._whole = [admin.get(f"{path}/{name}").expect() for name in ("busbar-queue", "busbar-pods")]

    def rule_of(self, row: PodRow) -> JSON:
        """The validation that refuses this row."""
        rules = [rule for policy in self._whole for rule in policy["spec"]["validations"]]
        return max(rules, key=lambda rule: overlap(row.says, rule))

    def put_back(self, rule: JSON) -> None:
        """Make sure that this rule is not the one taken out by the last test."""
        if self._missing is rule:
            self.keep_all_but(None)

    def keep_all_but(self, rule: JSON | None) -> None:
        """Write every policy with all its rules but this one."""
        self._missing = rule
        for policy in self._whole:
            kept = [other for other in policy["spec"]["validations"] if other is not rule]
            self._admin.merge(policy, {"spec": {"validations": kept}}).expect()


@pytest.mark.parametrize("row", OWN_RULES.values(), ids=lambda row: row.name)
def test_without_its_rule_the_attempt_succeeds(admin: Client, policies: Policies, row: PodRow) -> None:
    rule = policies.rule_of(row)
    policies.put_back(rule)
    refused(lambda **p: admin.create(row.bad(), **p), row.says)
    policies.keep_all_but(rule)
    end = time.monotonic() + SETTLE_S
    while not (answer := admin.create(row.bad(), dryRun="All")).ok and time.monotonic() < end:
        time.sleep(0.05)
    assert answer.ok, f"another rule refuses it too: {answer.message}"
