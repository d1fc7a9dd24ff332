"""Adapters over HTTP: names, the list, loading and unloading, and what the metrics say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.serving.adapted import Family, adapted_greedy, save_adapter
from tests.serving.inside import TOKEN, serving_inside
from tests.serving.models import EOS, greedy, make_tokenizer
from tests.serving.processes import OpenStream, Service, serving

from busbar.kube.contracts.bearers import Role, is_allowed
from busbar.workloads.serving.adapter_files import read_adapter
from busbar.workloads.serving.adapter_pages import Form
from busbar.workloads.serving.architecture import read_architecture
from busbar.workloads.serving.errors import AdapterInvalid, SettingsError
from busbar.workloads.serving.resume import stream_digest
from busbar.workloads.serving.settings import AdapterSource, EngineSettings, parse_adapter

MODEL = "tiny-model"
PROMPT = "def add(a, b):\n"
TOKENIZER = make_tokenizer()
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny: Family) -> Path:
    """A folder of adapters, and one beside it."""
    top = tmp_path_factory.mktemp("root")
    save_adapter(tiny.model, top / "adapters" / "fresh", 50)
    shutil.copytree(top / "adapters" / "fresh", top / "outside")
    (top / "adapters" / "link").symlink_to(top / "outside")
    (top / "adapters" / "loop").symlink_to("loop")
    return top / "adapters"


@pytest.fixture(scope="module")
def server(tiny: Family, root: Path) -> Iterator[Service]:
    engine = EngineSettings(tiny.folder, block_tokens=16, threads=1, adapters=tiny.sources, adapter_root=root)
    with serving_inside(engine, MODEL) as running:
        yield running


@pytest.fixture
def client(server: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as made:
        yield made


def text(tokens: list[int]) -> str:
    decoded: str = TOKENIZER.decode([t for t in tokens if t != EOS], skip_special_tokens=True)
    return decoded


def answer(client: openai.OpenAI, model: str) -> str:
    found = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)
    assert found.model == model
    return found.choices[0].text


def test_a_models_name_selects_the_adapter(client: openai.OpenAI, tiny: Family) -> None:
    ids = TOKENIZER.encode(PROMPT).ids
    assert answer(client, MODEL) == text(greedy(tiny.model, ids, 12))
    for name, adapted in tiny.adapted.items():
        expected = text(adapted_greedy(adapted, ids, 12))
        assert answer(client, f"{MODEL}:{name}") == answer(client, name) == expected


def test_a_stream_has_the_adapters_text(client: openai.OpenAI, tiny: Family) -> None:
    chunks = client.completions.create(
        model=f"{MODEL}:all", prompt=PROMPT, max_tokens=12, temperature=0, stream=True
    )
    expected = text(adapted_greedy(tiny.adapted["all"], TOKENIZER.encode(PROMPT).ids, 12))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_embeddings_and_tokens_know_the_adapters_name(client: openai.OpenAI, server: Service) -> None:
    vectors = [
        client.embeddings.create(model=name, input="abc", encoding_format="float").data[0].embedding
        for name in (MODEL, f"{MODEL}:all")
    ]
    assert vectors[0] != vectors[1]
    assert server.post("/tokenize", {"model": f"{MODEL}:all", "prompt": "abc"})[0] == 200
    assert server.post("/tokenize", {"model": f"{MODEL}:none", "prompt": "abc"})[0] == 404


def test_the_list_names_the_parent(client: openai.OpenAI, tiny: Family) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list().data}
    assert cards[MODEL]["parent"] is None
    for name in tiny.adapted:
        card = cards[f"{MODEL}:{name}"]
        assert (card["parent"], card["root"], card["max_model_len"]) == (MODEL, MODEL, 512)
    assert client.models.retrieve(f"{MODEL}:all").id == f"{MODEL}:all"


@pytest.mark.parametrize("name", ["other", f"{MODEL}:other", f"{MODEL}:", ":all", f"all:{MODEL}", "x:all"])
def test_an_unknown_adapter_is_the_404_of_an_unknown_model(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        answer(client, name)
    body: Any = caught.value.body
    assert body["message"] == f"the model {name!r} is not served here; this replica serves '{MODEL}'"
    assert body["param"] == "model"


@pytest.mark.parametrize("path", ["fresh", "{root}/fresh", "./x/../fresh"])
def test_an_adapter_is_loaded_and_unloaded(
    path: str, server: Service, client: openai.OpenAI, root: Path
) -> None:
    body = {"lora_name": "fresh", "lora_path": path.format(root=root)}
    assert server.post(LOAD, body)[2] == {"id": f"{MODEL}:fresh", "loaded": True}
    assert answer(client, f"{MODEL}:fresh") != answer(client, MODEL)
    status, _, refused = server.post(LOAD, body)
    assert (status, "is in use" in refused["error"]["message"]) == (400, True)
    assert server.post(UNLOAD, {"lora_name": "fresh"})[2] == {"id": f"{MODEL}:fresh", "loaded": False}
    assert server.post(UNLOAD, {"lora_name": "fresh"})[0] == 404
    with pytest.raises(openai.NotFoundError):
        answer(client, f"{MODEL}:fresh")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"lora_name": "x", "lora_path": "../outside"}, "lora_path", "leads out of the folder"),
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path", "leads out of the folder"),
        ({"lora_name": "x", "lora_path": "link"}, "lora_path", "leads out of the folder"),
        ({"lora_name": "x", "lora_path": "loop"}, "lora_path", "loop"),
        ({"lora_name": "x", "lora_path": "a" * 5000}, "lora_path", "cannot be read"),
        ({"lora_name": "x", "lora_path": "\ud800"}, "lora_path", "is no path"),
        ({"lora_name": "x", "lora_path": "none"}, "lora_path", "does not exist"),
        ({"lora_name": "x", "lora_path": "."}, "lora_path", "is missing"),
        ({"lora_name": "x", "lora_path": "a\0b"}, "lora_path", "must be a text"),
        ({"lora_name": "a:b", "lora_path": "fresh"}, "lora_name", "no name for an adapter"),
        ({"lora_name": 1, "lora_path": "fresh"}, "lora_name", "must be a text"),
        ({"lora_path": "fresh"}, "lora_name", "must be a text"),
        ({"lora_name": "x"}, "lora_path", "must be a text"),
        ({"lora_name": "x", "lora_path": "fresh", "force": True}, "force", "unknown field"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(
    body: dict[str, Any], param: str, message: str, server: Service
) -> None:
    status, _, refused = server.post(LOAD, body)
    assert (status, refused["error"]["param"]) == (400, param)
    assert message in refused["error"]["message"]


def test_without_a_folder_nothing_is_loaded_over_http(tiny: Family) -> None:
    with serving_inside(EngineSettings(tiny.folder, block_tokens=16, threads=1), MODEL) as running:
        status, _, refused = running.post(LOAD, {"lora_name": "x", "lora_path": "fresh"})
        assert (status, "--adapter-root" in refused["error"]["message"]) == (400, True)
        assert len(json.loads(running.get("/v1/models")[2])["data"]) == 1


def test_a_stream_ends_as_it_began_when_its_adapter_is_replaced(
    server: Service, root: Path, tiny: Family
) -> None:
    save_adapter(tiny.model, root / "leaving", 51)
    assert server.post(LOAD, {"lora_name": "leaving", "lora_path": "leaving"})[0] == 200
    body = {"model": "leaving", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    expected = server.post("/v1/completions", body)[2]["choices"][0]["text"]
    stream = OpenStream(server, body | {"stream": True})
    first = stream.line()
    assert server.post(UNLOAD, {"lora_name": "leaving"})[0] == 200
    assert server.post(LOAD, {"lora_name": "leaving", "lora_path": "fresh"})[0] == 200
    events = (first + stream.rest()).decode().split("\n\n")
    assert events[-2] == "data: [DONE]"
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2] if event) == expected
    assert server.post("/v1/completions", body)[2]["choices"][0]["text"] != expected
    assert server.post(UNLOAD, {"lora_name": "leaving"})[0] == 200


def test_metrics_count_by_adapter(server: Service, client: openai.OpenAI) -> None:
    def count(name: str) -> float:
        lines = server.get("/metrics")[2].decode()
        found = re.findall(rf'^{name}_total\{{adapter="odd",.*\}} (\S+)$', lines, re.MULTILINE)
        return sum(map(float, found))

    before = count("busbar:adapter_requests"), count("busbar:adapter_generation_tokens")
    client.completions.create(
        model=f"{MODEL}:odd", prompt=PROMPT, max_tokens=5, extra_body={"ignore_eos": True}
    )
    after = count("busbar:adapter_requests"), count("busbar:adapter_generation_tokens")
    assert (after[0] - before[0], after[1] - before[1]) == (1, 5)
    assert server.metric("vllm:lora_requests_info") > 0


def test_only_the_bearer_for_commands_loads_and_unloads() -> None:
    bearers = {role: f"secret-{role}" for role in Role}
    for path in (LOAD, UNLOAD):
        allowed = [role for role in Role if is_allowed(path, f"Bearer secret-{role}", bearers)]
        assert allowed == [Role.COMMAND]


def test_another_adapter_is_another_stream() -> None:
    class Other:
        digest = "1"

    adapter: Any = Other()
    assert stream_digest("m", []) != stream_digest("m", [], adapter)


def test_flags_name_an_adapters_folder() -> None:
    assert parse_adapter("a=b=c") == AdapterSource("a", Path("b=c"))
    for wrong in ("a", "a=", "=b", "a b=c"):
        with pytest.raises(SettingsError):
            parse_adapter(wrong)


def test_serve_with_flags(tiny: Family) -> None:
    """`busbar serve --adapter` in a process of its own; a wrong folder ends it with a sentence."""
    source = tiny.sources[1]
    with serving(tiny.folder, "--model-id", MODEL, "--adapter", f"{source.name}={source.folder}") as running:
        names = [card["id"] for card in json.loads(running.get("/v1/models")[2])["data"]]
        assert names == [MODEL, f"{MODEL}:{source.name}"]


def test_adapters_that_do_not_fit_together_are_read_again(tiny: Family, root: Path) -> None:
    arch, sources = read_architecture(tiny.folder), {source.name: source for source in tiny.sources}
    forms = [Form.of(read_adapter(sources[n].folder, arch, torch.float32)) for n in ("all", "odd")]
    most = max(form.slot_bytes(arch, torch.float32) for form in forms)
    broken = shutil.copytree(sources["odd"].folder, root / "broken")
    adapters = (sources["all"], sources["odd"], AdapterSource("broken", broken))
    engine = EngineSettings(tiny.folder, block_tokens=16, threads=1, adapters=adapters, adapter_bytes=most)
    with serving_inside(engine, MODEL) as running:
        ids = TOKENIZER.encode(PROMPT).ids
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}
        for name in ("all", "odd", "all", "odd"):
            _, _, found = running.post("/v1/completions", body | {"model": name})
            assert found["choices"][0]["text"] == text(adapted_greedy(tiny.adapted[name], ids, 6))
            assert [r["name"] for r in running.status()["adapters"] if r["inMemory"]] == [name]
        (broken / "adapter_config.json").unlink()
        assert running.post("/v1/completions", body | {"model": "all"})[0] == 200
        assert running.post("/v1/completions", body | {"model": "broken"})[0] == 404


def test_a_pod_serves_without_an_adapter_that_is_refused_and_says_why(tiny: Family, root: Path) -> None:
    bad = AdapterSource("bad", root / "nothing")
    adapters = (bad, tiny.sources[1])
    engine = EngineSettings(
        tiny.folder, block_tokens=16, threads=1, adapters=adapters, skip_bad_adapters=True
    )
    with serving_inside(engine, MODEL) as running:
        reports = running.status()["adapters"]
        assert [(r["name"], r["inMemory"]) for r in reports] == [("bad", False), ("all", True)]
        assert "does not exist" in reports[0]["message"]
        body = {"model": f"{MODEL}:bad", "prompt": "a", "max_tokens": 1}
        assert running.post("/v1/completions", body)[0] == 404
        assert running.post("/v1/completions", body | {"model": f"{MODEL}:all"})[0] == 200
    with (
        pytest.raises(AdapterInvalid, match="does not exist"),
        serving_inside(EngineSettings(tiny.folder, block_tokens=16, threads=1, adapters=adapters), MODEL),
    ):
        pass
