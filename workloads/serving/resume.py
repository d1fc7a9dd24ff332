"""Goes on with a stream that another replica began (`busbar.kube.contracts.streams`).

The state of a request is its prompt, its parameters with the seed, and the tokens sampled so far: the sampler
draws by seed and index, so whoever has these computes the same tokens from there. Keys and values are computed
anew, as after a preemption. The digest tells whether both replicas mean the same model and the same prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Sequence

from pydantic import ValidationError

from busbar.kube.contracts.streams import TERMS_HEADER, ResumeRequest, StreamTerms
from busbar.workloads.serving.engine_link import ChosenAdapter
from busbar.workloads.serving.errors import BadRequest, OtherStream
from busbar.workloads.serving.generation import Job
from busbar.workloads.serving.openai_request import PARSERS, ChatBody, CompletionBody
from busbar.workloads.serving.openai_response import Answer
from busbar.workloads.serving.responses_request import PATH as RESPONSES
from busbar.workloads.serving.responses_request import parse_responses
from busbar.workloads.serving.text_model import TextModel

Asked = tuple[CompletionBody | ChatBody, ResumeRequest | None]
"""A request's body, and where to go on in its answer."""


ROUTES = {**PARSERS, RESPONSES: parse_responses}


def read_terms(sent: str) -> StreamTerms:
    """The gateway's terms; raises BadRequest."""
    try:
        return StreamTerms.model_validate_json(sent)
    except ValidationError as error:
        raise BadRequest(f"{TERMS_HEADER}: {_first_problem(error)}") from error


def parse_resume(sent: object) -> Asked:
    """Raises BadRequest naming the field; one inside `request` as any request would."""
    try:
        asked = ResumeRequest.model_validate(sent)
    except ValidationError as error:
        raise BadRequest(f"the body is not a resume: {_first_problem(error)}") from error
    body = ROUTES[asked.path](asked.request)
    if not body.wanted.stream:
        raise BadRequest("only a stream can be resumed", param="request.stream")
    return body, asked


def stream_digest(identity: str, jobs: Sequence[Job], adapter: ChosenAdapter | None = None) -> str:
    """Equal for two replicas that would compute the same tokens, up to rounding."""
    digest = hashlib.blake2b(identity.encode(), digest_size=16)
    if adapter is not None:
        digest.update(f"/{adapter.digest}".encode())
    for job in jobs:
        digest.update(f"/{len(job.prompt)}/{job.params.max_tokens}/{job.params.seed}/".encode())
        digest.update(array("q", job.prompt).tobytes())
    return digest.hexdigest()


async def take_over(
    asked: ResumeRequest, jobs: Sequence[Job], model: TextModel, digest: str, answer: Answer
) -> None:
    """Puts every job where the stream was left. Raises OtherStream, or BadRequest for tokens that cannot be, of which the engine
    refuses the others."""
    if asked.digest != digest or len(asked.choices) != len(jobs):
        raise OtherStream(
            "this replica serves another model than the one that began the stream, or reads its prompt differently"
        )
    for job, choice in zip(jobs, asked.choices, strict=True):
        _check(choice.tokens, model.width)
        job.choice.completion_tokens = len(choice.tokens)
        job.choice.resumed = True
        if choice.ended:
            job.choice.finish = "ended"
            continue
        job.had = choice.tokens
        text = await asyncio.to_thread(job.text.add, choice.tokens)
        if job.text.has_stopped:
            raise BadRequest("these tokens end the answer already", param="choices")
        answer.catch_up(job.choice, text, asked.events)
        if answer.wants_logprobs and not answer.chat:
            job.choice.text_offset = sum(len(answer.token_text(token)) for token in choice.tokens)
    jobs[0].choice.cached_tokens = asked.cached_tokens


def _check(tokens: list[int], vocab_size: int) -> None:
    bad = next((token for token in tokens if token >= vocab_size), None)
    if bad is not None:
        raise BadRequest(f"token {bad} is not in the model's vocabulary", param="choices")


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    return ".".join(map(str, problem["loc"])) + f": {problem['msg']}"
