"""What a load was answered with: rates, and percentiles of what callers wait for; pure."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from busbar.cli.load import Load, percentile
from busbar.cli.load_run import Answered

PERCENTS = (50, 90, 99)
LATE_S = 0.01
"""A request that is sent so much too late falsifies a rate."""


@dataclass(frozen=True)
class Target:
    """What callers were promised: seconds to the first token and per further token; None: nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """`ttft=2,tpot=0.1`. Raises ValueError."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if name not in ("ttft", "tpot") or not equals or not float(value) > 0:
                raise ValueError(text)
            found[f"{name}_s"] = float(value)
        return cls(**found)

    def kept(self, ttft_s: float, tpot_s: float | None) -> bool:
        """By one request; one with a single token has no time per further token."""
        late = self.ttft_s is not None and ttft_s > self.ttft_s
        return not late and (self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s)


def report(
    load: Load, answered: Sequence[Answered], seconds: float, target: Target | None = None
) -> dict[str, Any]:
    """The row of a load, in seconds and tokens.

    `ttft` runs from sending a request to the first piece of its answer, `tpot` is the time from the first to the last
    piece over the tokens behind the first, `gap` the time between two pieces, `whole` from sending to the end. Answers that
    are not whole count as failed, and in nothing else.
    """
    good = [one for one in answered if not one.problem and one.pieces_s]
    ttft, tpot, gaps = array("d"), array("d"), array("d")
    kept = 0
    for one in good:
        first, each = one.pieces_s[0] - one.sent_s, _per_token(one)
        ttft.append(first)
        if each is not None:
            tpot.append(each)
        gaps.extend(b - a for a, b in zip(one.pieces_s, one.pieces_s[1:], strict=False))
        kept += target is not None and target.kept(first, each)
    problems = Counter(one.problem or "an answer without content" for one in answered if one not in good)
    seconds = max(seconds, 1e-9)
    row: dict[str, Any] = {
        "load": load.name,
        "seconds": seconds,
        "requests": len(answered),
        "failed": len(answered) - len(good),
        "requests_per_s": len(good) / seconds,
        "prompt_tokens_per_s": sum(one.prompt_tokens or 0 for one in good) / seconds,
        "cached_tokens_per_s": sum(one.cached_tokens for one in good) / seconds,
        "output_tokens_per_s": sum(map(_tokens, good)) / seconds,
        "prompt_tokens_mean": _mean([one.prompt_tokens for one in good if one.prompt_tokens]),
        "prompt_tokens_asked": _mean([one.request.prompt_tokens for one in good]),
        "output_tokens_mean": _mean([_tokens(one) for one in good]),
        "ttft_s": _percentiles(ttft),
        "tpot_s": _percentiles(tpot),
        "gap_s": _percentiles(gaps),
        "whole_s": _percentiles([one.ended_s - one.sent_s for one in good]),
        "sent_late_s": percentile([one.late_s for one in answered], 99),
        "tokens_counted_by_pieces": sum(one.output_tokens is None for one in good),
        "problems": dict(problems.most_common(10)),
    }
    if target is not None:
        row |= {"target_kept": kept / max(len(answered), 1), "kept_requests_per_s": kept / seconds}
    return row


def _tokens(one: Answered) -> int:
    """Tokens of an answer; pieces where the endpoint does not say."""
    return len(one.pieces_s) if one.output_tokens is None else one.output_tokens


def _per_token(one: Answered) -> float | None:
    further = _tokens(one) - 1
    return (one.pieces_s[-1] - one.pieces_s[0]) / further if further > 0 else None


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None


def _percentiles(values: Sequence[float] | array[float]) -> dict[str, float | None]:
    return {f"p{percent}": percentile(values, percent) for percent in PERCENTS}


def remarks(row: dict[str, Any]) -> list[str]:
    """What somebody should know before believing a row."""
    found = []
    late = row["sent_late_s"]
    if late is not None and late > LATE_S:
        found.append(
            f"{row['load']}: requests were sent up to {late * 1000:.0f} ms late (p99): this machine is too slow for the rate, and the "
            "times are those of a slower one"
        )
    asked, had = row["prompt_tokens_asked"], row["prompt_tokens_mean"]
    if asked and had and not 0.9 <= had / asked <= 1.1:
        found.append(
            f"{row['load']}: prompts had {had:.0f} tokens in the mean, where {asked:.0f} were asked for"
        )
    if row["tokens_counted_by_pieces"]:
        found.append(
            f"{row['load']}: the endpoint does not say how many tokens an answer has; its pieces were counted"
        )
    for problem, count in row["problems"].items():
        found.append(f"{row['load']}: {count} x {problem}")
    return found
