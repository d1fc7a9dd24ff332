"""Where prompts are computed, and where their streams go on, among replicas with roles. Pure.

A replica of the role prefill hands a stream over at its first token, to one of the destinations that the gateway sends along.
The seconds that streams wait decide where the prompt of a request is computed:

    at a replica of the role prefill   its first token, and how long the stream stands still when it is handed over
    at one of the role both            its first token
    at one of the role decode          its first token, and as long as all that decode there wait for its prompt

So a prompt of which most is cached at a replica that decodes goes there at once, and so does any prompt while all others
would make it wait longer than it would delay those that decode. The gateway decides this, not the engine, because it alone
knows the load and the prefixes of both sides. Replicas that decode compute no prompts of others, and so may not know what a
prompt token costs there: then it costs what it does at those that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from busbar.gateway.picking import ALIKE, STEP_TOKENS, Ask, Candidate, own_tokens, predicted_s, step_s
from busbar.kube.contracts.routes import Endpoint, ReplicaSpeed
from busbar.kube.contracts.streams import MOST_DESTINATIONS
from busbar.kube.contracts.workload import ReplicaRole


def hands_over(endpoints: Iterable[Endpoint]) -> bool:
    """Whether streams of the service go from replica to replica by their roles."""
    return any(endpoint.role is ReplicaRole.PREFILL for endpoint in endpoints)


def for_prompts(candidates: Sequence[Candidate], ask: Ask, stall_s: float) -> Sequence[Candidate]:
    """Those of the candidates that may compute the request's prompt.

    Args:
        stall_s: for which a stream stands still when it is handed over.
    """
    decode = [c for c in candidates if c.endpoint.role is ReplicaRole.DECODE]
    others = [c for c in candidates if c.endpoint.role is not ReplicaRole.DECODE]
    if not decode or not others:
        return candidates
    timed = _timed(others)
    if len(timed) < len(others):
        return others
    elsewhere = min(
        predicted_s(c, speed, ask)
        + (stall_s if ask.moves and c.endpoint.role is ReplicaRole.PREFILL else 0.0)
        for c, speed in timed
    )
    token_s = min(speed.per_prompt_token_s for _, speed in timed)
    cheaper = [c for c, speed in _timed(decode) if _waited_s(c, speed, ask, token_s) <= elsewhere]
    return cheaper or others


def destinations(candidates: Sequence[Candidate], ask: Ask) -> tuple[str, ...]:
    """Addresses of the candidates, the shortest predicted time per token first; of those that are alike the one with the most
    free blocks.

    Args:
        candidates: replicas that have room for the stream, with what is on its way to them.
    """
    able = [c for c in candidates if c.endpoint.role is not ReplicaRole.PREFILL]
    timed = _timed(able)
    if len(timed) < len(able):
        able.sort(key=lambda c: (c.running, -_free_tokens(c)))
        return tuple(c.endpoint.url for c in able[:MOST_DESTINATIONS])
    times = [(_token_s(c, speed, ask), c) for c, speed in timed]
    best = min((time for time, _ in times), default=0.0)
    times.sort(key=lambda each: (0.0 if each[0] <= ALIKE * best else each[0], -_free_tokens(each[1])))
    return tuple(c.endpoint.url for _, c in times[:MOST_DESTINATIONS])


def _timed(candidates: Iterable[Candidate]) -> list[tuple[Candidate, ReplicaSpeed]]:
    return [(c, c.endpoint.speed) for c in candidates if c.endpoint.speed is not None]


def _waited_s(candidate: Candidate, speed: ReplicaSpeed, ask: Ask, token_s: float) -> float:
    """Of the request and all that decode there, at least one: the next stream that comes."""
    if speed.per_prompt_token_s < token_s:
        speed = speed.model_copy(update={"per_prompt_token_s": token_s})
    delay = own_tokens(candidate, ask) * speed.per_prompt_token_s
    return predicted_s(candidate, speed, ask) + max(1, candidate.running) * delay


def _token_s(candidate: Candidate, speed: ReplicaSpeed, ask: Ask) -> float:
    prompts = min(STEP_TOKENS, candidate.prompt_tokens_ahead) * speed.per_prompt_token_s
    return step_s(candidate, speed, ask) + prompts


def _free_tokens(candidate: Candidate) -> int:
    return (candidate.endpoint.kv_tokens or 0) - candidate.context_tokens
