"""Both sides of a replica in one process, and one event loop: the front, the engine, and the socket between them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from busbar.workloads.serving.engine_host import EngineHost
from busbar.workloads.serving.engine_link import EngineLink
from busbar.workloads.serving.engine_process import hosted
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.passing import EnginePassage
from busbar.workloads.serving.process import new_way
from busbar.workloads.serving.server import Server
from busbar.workloads.serving.settings import ServerSettings
from busbar.workloads.serving.text_model import TextFiles, TextModel


@dataclass
class Pair:
    """A front and its engine."""

    server: Server
    link: EngineLink
    host: EngineHost


@asynccontextmanager
async def paired(
    settings: ServerSettings,
    load: Callable[[], Loaded],
    files: TextFiles | None = None,
    on_change: Callable[[], None] = lambda: None,
) -> AsyncIterator[Pair]:
    """An engine that begins to load, and its front, which knows the model's text by `files`."""
    ours, engines = socket.socketpair()
    way = new_way()
    async with hosted(settings, load, engines, way) as host:
        link = await EngineLink.connect(ours, on_change)
        await link.greeted.wait()
        server = Server(settings, link, EnginePassage(way.path, way.secret, link))
        if files is not None:
            server.model = TextModel(files, link.check_grammar)
        try:
            yield Pair(server, link, host)
        finally:
            link.close()


def text_files_of(loaded: Loaded) -> TextFiles:
    arch = loaded.arch
    return TextFiles(loaded.core.tokenizer, loaded.template, arch.vocab_size, arch.hidden, arch.eos)


def text_model_of(loaded: Loaded) -> TextModel:
    """Of an engine without a front."""

    async def check_grammar(spec: object) -> None:
        await loaded.core.grammars.get(spec)  # type: ignore[arg-type]

    made = TextModel(text_files_of(loaded), check_grammar)
    made.limits, made.identity = loaded.core.context_limits, loaded.identity
    return made
