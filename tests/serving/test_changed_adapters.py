"""A ModelService's adapters change while its replicas serve: from the spec to the answers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from tests.operator.builders import RENDERING, SETTINGS, replica, service
from tests.serving.adapted import Family, adapted_greedy
from tests.serving.inside import serving_inside
from tests.serving.models import EOS, make_tokenizer
from tests.serving.processes import OpenStream, Service
from tests.serving.test_sleep_by_operator import BEARERS, LOOPBACK

from busbar.kube.contracts.adapters import AskedAdapter, AskedAdapters
from busbar.kube.contracts.bearers import Role
from busbar.operator.metrics import Metrics
from busbar.operator.pods.prober import Prober
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.view import ModelPlace, ServiceView
from busbar.operator.write.actions import PostToPod
from busbar.workloads.serving.adapters import AdapterStore
from busbar.workloads.serving.architecture import read_architecture
from busbar.workloads.serving.settings import EngineSettings, SpecAdapters

PROMPT = "def add(a, b):\n"
TOKENIZER = make_tokenizer()


@pytest.fixture
def store(tiny: Family) -> AdapterStore:
    return AdapterStore(read_architecture(tiny.folder), torch.device("cpu"), torch.float32, 2**30)


def claims_of(tiny: Family, root: Path) -> Path:
    """A folder as a pod has it: the claim `loras` with three good adapters and a broken one."""
    for source in tiny.sources:
        if source.name in ("all", "odd", "attention"):
            shutil.copytree(source.folder, root / "loras" / source.name)
    shutil.copytree(root / "loras" / "odd", root / "loras" / "broken")
    (root / "loras" / "broken" / "adapter_model.safetensors").unlink()
    return root


def of(**folders: str) -> list[dict[str, str]]:
    return [{"name": name, "uri": f"pvc://loras/{folder}"} for name, folder in folders.items()]


def asked(**folders: str) -> AskedAdapters:
    return AskedAdapters(adapters=[AskedAdapter(**each) for each in of(**folders)])


def expected(tiny: Family, adapter: str, count: int) -> str:
    ids = adapted_greedy(tiny.adapted[adapter], TOKENIZER.encode(PROMPT).ids, count)
    text: str = TOKENIZER.decode([each for each in ids if each != EOS], skip_special_tokens=True)
    return text


def body_for(adapter: str, count: int = 8) -> dict[str, Any]:
    return {"model": f"tiny:{adapter}", "prompt": PROMPT, "max_tokens": count, "temperature": 0}


def answer(server: Service, adapter: str) -> str | int:
    """Its text, or the status of a refusal."""
    status, _, found = server.post("/v1/completions", body_for(adapter))
    return str(found["choices"][0]["text"]) if status == 200 else status


def told(server: Service) -> dict[str, str | None]:
    """By name, why an adapter is not served; None: it is."""
    return {row["name"]: row["message"] for row in server.status()["adapters"]}


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_operator_changes_adapters_while_a_stream_runs(tiny: Family, tmp_path: Path) -> None:
    spec = SpecAdapters(asked(first="all"), claims_of(tiny, tmp_path))
    settings = EngineSettings(
        tiny.folder, block_tokens=16, threads=1, adapters=spec.sources(spec.asked), skip_bad_adapters=True
    )
    with serving_inside(settings, "tiny", bearers=BEARERS, adapters=spec) as server:
        caller, reader = Service(server.url, BEARERS[Role.INFER]), Service(server.url, BEARERS[Role.READ])
        pod = replica(0, ip="127.0.0.1", port=urlsplit(server.url).port or 0)
        prober = Prober(SETTINGS, Metrics(), lambda: [pod], lambda name: LOOPBACK, lambda pod: None)

        async def reconciled(**folders: str) -> list[str]:
            await prober.poll_once()
            view = ServiceView(
                service(replicas=1, minReplicas=0, adapters=of(**folders)), (pod,), datetime.now(UTC), SETTINGS,
                RENDERING, ModelPlace(uri="pvc://claim/model"), readings=prober.serving,
            )  # fmt: skip
            posts = [each for each in reconcile(view).actions if isinstance(each, PostToPod)]
            for post in posts:
                prober.post(post, pod)
            await asyncio.gather(*prober._tasks)
            return [post.path for post in posts]

        try:
            assert await reconciled(first="all") == [], "it has these from its start"
            stream_body = body_for("first", 300) | {"stream": True, "ignore_eos": True}
            whole = await asyncio.to_thread(caller.post, "/v1/completions", stream_body | {"stream": False})
            with OpenStream(caller, stream_body) as stream:
                begin = stream.line()
                assert await reconciled(second="odd", bad="broken") == ["/adapters"]
                assert await reconciled(second="odd", bad="broken") == [], "it is not asked again"
                await until(lambda: told(reader).keys() == {"second", "bad"})
                events = (begin + await asyncio.to_thread(stream.answer.read)).decode().split("\n\n")
            texts = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2] if event]
            assert "".join(texts) == whole[2]["choices"][0]["text"], "it ends with the adapter it began with"
            reasons = await asyncio.to_thread(told, reader)
            assert reasons["second"] is None
            assert "adapter_model.safetensors" in (reasons["bad"] or "")
            found = [await asyncio.to_thread(answer, caller, name) for name in ("first", "second", "bad")]
            assert found == [404, expected(tiny, "odd", 8), 404]

            assert await reconciled(second="attention") == ["/adapters"], "the name stands for another folder"
            wanted = expected(tiny, "attention", 8)
            await until(lambda: answer(caller, "second") == wanted)
            assert await asyncio.to_thread(told, reader) == {"second": None}
            assert await reconciled() == ["/adapters"]
            await until(lambda: told(reader) == {})
        finally:
            await prober.close()


def test_what_is_no_list_of_adapters_is_refused_and_changes_nothing(tiny: Family, tmp_path: Path) -> None:
    spec = SpecAdapters(asked(first="all"), claims_of(tiny, tmp_path))
    settings = EngineSettings(tiny.folder, block_tokens=16, threads=1, adapters=spec.sources(spec.asked))
    with serving_inside(settings, "tiny", adapters=spec) as server:
        for sent, said in (
            ([], "the body"),
            ({"adapters": of(a="all") * 2}, "two adapters have the name 'a'"),
            ({"adapters": [{"name": "a"}]}, "adapters.0.uri"),
            ({"adapters": [{"name": "a", "uri": "/etc"}]}, "adapters.0.uri"),
            ({"adapters": [{"name": "a", "uri": "pvc://loras/../x"}]}, "adapters.0.uri"),
            ({"adapters": [{"name": "a b", "uri": "pvc://loras/all"}]}, "no name for an adapter"),
        ):
            status, _, refused = server.post("/adapters", sent)
            assert (status, said in refused["error"]["message"]) == (400, True), refused
        assert server.status()["adaptersAsked"] == spec.asked.digest
        assert answer(server, "first") == expected(tiny, "all", 8)
    with serving_inside(EngineSettings(tiny.folder, block_tokens=16, threads=1), "tiny") as alone:
        status, _, refused = alone.post("/adapters", {"adapters": []})
        assert (status, "/v1/load_lora_adapter" in refused["error"]["message"]) == (400, True)
        assert alone.status()["adaptersAsked"] is None


def test_the_digest_is_of_names_and_folders() -> None:
    assert asked(a="x", b="y").digest == asked(b="y", a="x").digest == asked(a="x/", b="y").digest
    others = [asked(a="x"), asked(a="y", b="x"), asked(a="x", b="z"), asked()]
    assert len({asked(a="x", b="y").digest, *(each.digest for each in others)}) == 5


@pytest.mark.parametrize("is_held", [True, False])
def test_a_replaced_adapter_stays_for_those_that_hold_it(
    store: AdapterStore, tiny: Family, is_held: bool
) -> None:
    first, second = (source for source in tiny.sources if source.name in ("all", "odd"))
    store.add(first)
    held = store.held("all")
    assert held is not None
    if not is_held:
        held.release()
    store.put(type(first)("all", second.folder))
    other = store.held("all")
    assert other is not None
    assert other.digest != held.digest
    assert (held.place in {each.place for each in store._all()}) is is_held
    if is_held:
        held.release()
    assert [each.name for each in store._all()] == ["all"]
    assert store.sources == {"all": type(first)("all", second.folder)}
