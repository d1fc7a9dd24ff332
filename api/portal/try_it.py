"""The try-it box of a service's page: a prompt completed, or the next turn of a conversation, streamed."""

from typing import Annotated

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import Response, StreamingResponse

from busbar.api.access.identity import Caller
from busbar.api.access.tenancy import Tenancy
from busbar.api.dependencies import InNamespace, services_of
from busbar.api.objects.conversation import Question, Target, ToolChoice, chatted, prompted
from busbar.kube.resources import MODEL_SERVICES
from busbar.kube.types import ModelService

Reader = Annotated[Caller, Depends(InNamespace("get", MODEL_SERVICES))]
Adapter = Annotated[str, Form(max_length=63)]


def router() -> APIRouter:
    """The routes that the box calls."""
    routes = APIRouter()
    page = "/services/{namespace}/{name}"

    @routes.post(f"{page}/complete")
    async def complete(
        request: Request,
        namespace: str,
        name: str,
        caller: Reader,
        prompt: Annotated[str, Form()],
        adapter: Adapter = "",
        max_tokens: Annotated[int, Form()] = Target.max_tokens,
        temperature: Annotated[float, Form()] = Target.temperature,
    ) -> Response:
        target = Target(namespace, name, adapter, max_tokens, temperature)
        return await _streamed(request, caller, target, prompted(target, prompt))

    @routes.post(f"{page}/chat")
    async def chat(
        request: Request,
        namespace: str,
        name: str,
        caller: Reader,
        messages: Annotated[str, Form()],
        tools: Annotated[str, Form()] = "",
        tool_choice: Annotated[ToolChoice, Form()] = ToolChoice.AUTO,
        answer_schema: Annotated[str, Form()] = "",
        adapter: Adapter = "",
        max_tokens: Annotated[int, Form()] = Target.max_tokens,
        temperature: Annotated[float, Form()] = Target.temperature,
    ) -> Response:
        target = Target(namespace, name, adapter, max_tokens, temperature)
        return await _streamed(
            request, caller, target, chatted(target, messages, tools, tool_choice, answer_schema)
        )

    return routes


async def _streamed(request: Request, caller: Caller, target: Target, question: Question) -> Response:
    """The answer's events; a service that the caller may not see is one that does not exist."""
    services = services_of(request)
    await services.objects.get(caller, ModelService, target.namespace, target.service)
    stream = await services.completions.stream(caller, target.namespace, question)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


def usable_adapters(service: ModelService, tenancy: Tenancy) -> list[str]:
    """The adapters that the box's key may ask for: it is one of the tenant of the service's namespace."""
    tenant = tenancy.tenant_of(service.metadata.namespace or "")
    rows = service.spec.adapters or ()
    return [row.name for row in rows if row.tenants is None or tenant in row.tenants]
