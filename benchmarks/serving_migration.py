"""How long a stream stands still when it moves between two engines: with its keys and values, and by computing anew.

    python benchmarks/serving_migration.py [--repeats 9] [--contexts 512 4096] [--out benchmarks/results/serving_migration.json]

Two engine processes with one thread each serve a random Llama of 33.6 M parameters (8 layers, width 512; a block of 64
tokens is 1 MiB). A client that does what the gateway does reads a greedy stream at one of them. In the middle of it

  moved       POST /migrate tells the engine to move it, and the client resumes where the stream says
  recomputed  the client closes it and resumes at the other engine, which knows nothing of it

The stall is the time between the last token from the first engine and the first one from the second; a step is the
median time between two tokens before. The bound is two steps and what the source needed for last stage and commit (as it
reports). Both kinds are interleaved, every prompt is new, and every answer is compared with an undisturbed one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

OUTPUT, BEFORE = 48, 16
BEARER = "secret"
SHAPE: dict[str, int] = {"layers": 8, "hidden": 512, "heads": 8, "kv": 4, "mlp": 1536, "vocab": 8192}


@dataclass
class Stream:
    """What has come, and when."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    digest: str = ""
    end: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        rows = asyncio.run(measure(Path(name), given.contexts, given.repeats))
    result = {
        "benchmark": "serving_migration",
        "command": "python " + " ".join(["benchmarks/serving_migration.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared, load {os.getloadavg()[0]:.1f}",
        "versions": {"python": platform.python_version(), **torch_version()},
        "model": {**SHAPE, "dtype": "float32"},
        "rows": rows,
        "stallOfLongestOverShortest": round(rows[-1]["movedStallMs"] / rows[0]["movedStallMs"], 3),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


def torch_version() -> dict[str, str]:
    import torch

    return {"torch": torch.__version__}


def make_model(folder: Path) -> None:
    """Here and not above: engine processes import this file, and need none of it."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SHAPE["vocab"],
        hidden_size=SHAPE["hidden"],
        intermediate_size=SHAPE["mlp"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["kv"],
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {f"w{i}": i for i in range(SHAPE["vocab"])}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))


async def measure(folder: Path, contexts: list[int], repeats: int) -> list[dict[str, Any]]:
    import aiohttp
    from rich.progress import track
    from tests.free_port import free_port
    from tests.serving import forked

    from busbar.kube.contracts.bearers import one_for_all
    from busbar.workloads.serving.settings import EngineSettings, ServerSettings

    engine = EngineSettings(folder, threads=1, kv_bytes=2**30, deterministic=True)
    ports = [free_port(), free_port()]
    running = [
        forked.start(ServerSettings(engine, "m", port=port, bearers=one_for_all(BEARER))) for port in ports
    ]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    headers = {"Authorization": f"Bearer {BEARER}", "x-busbar-stream": terms()}
    try:
        async with aiohttp.ClientSession(headers=headers) as session:
            for url in urls:
                await ready(session, url)
            found: dict[int, dict[str, list[dict[str, float]]]] = {
                context: {"moved": [], "recomputed": []} for context in contexts
            }
            rng = random.Random(0)
            for repeat in track(range(-1, repeats), description="repeats"):  # the first one warms up
                for context in contexts:
                    for kind in ("moved", "recomputed") if repeat % 2 else ("recomputed", "moved"):
                        source, to = urls if repeat % 2 else urls[::-1]
                        row = await once(session, rng, context, kind, source, to)
                        if repeat >= 0:
                            found[context][kind].append(row)
        return [row_of(context, each) for context, each in found.items()]
    finally:
        for process in running:
            process.kill()


def terms() -> str:
    return json.dumps({"seed": 1, "created": 1_700_000_000, "moves": True})


async def ready(session: Any, url: str) -> None:
    import aiohttp

    while True:
        try:
            async with session.get(url + "/ready") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)


async def once(
    session: Any, rng: random.Random, context: int, kind: str, source: str, to: str
) -> dict[str, float]:
    prompt = [rng.randrange(1, SHAPE["vocab"]) for _ in range(context)]
    body = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True}
    stream, told = Stream(), {"stallSeconds": 0.0, "lastBlocks": 0, "stages": 0, "blocks": 0}
    async with session.post(source + "/v1/completions", json=body) as answer:
        stream.digest = answer.headers["x-busbar-stream-digest"]
        moving = None
        async for line in answer.content:
            take(line, stream)
            if len(stream.tokens) >= BEFORE and kind == "recomputed":
                break
            if len(stream.tokens) >= BEFORE and moving is None:
                moving = asyncio.create_task(move(session, source, to))
    if moving is not None:
        told = await moving
        assert stream.end == f"leaving {to}", (stream.end, told)
    before = list(stream.times)
    request = {
        "path": "/v1/completions",
        "request": body,
        "digest": stream.digest,
        "choices": [{"tokens": stream.tokens}],
    }
    had = len(stream.tokens)
    async with session.post(to + "/resume", json=request) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            take(line, stream)
    assert len(stream.tokens) == OUTPUT
    expected = Stream()
    async with session.post(source + "/v1/completions", json=body) as answer:
        async for line in answer.content:
            take(line, expected)
    assert stream.tokens == expected.tokens, "the answer has changed"
    steps = [after - earlier for earlier, after in itertools.pairwise(before[1:])]
    return {
        "stall": stream.times[had] - before[-1],
        "step": statistics.median(steps),
        **{name: float(told[name]) for name in ("stallSeconds", "lastBlocks", "stages", "blocks")},
    }


async def move(session: Any, source: str, to: str) -> dict[str, Any]:
    async with session.post(source + "/migrate", json={"to": to}) as answer:
        found: dict[str, Any] = await answer.json()
    (done,) = found["streams"]
    assert done["outcome"] == "copied", done
    return dict(done)


def take(line: bytes, stream: Stream) -> None:
    if not line.startswith(b":busbar "):
        return
    if line.startswith(b":busbar ! "):
        stream.end = line[10:].decode().strip()
        return
    ids = line.rstrip(b"\n").split(b" ")[5]
    for each in ids.split(b",") if ids else ():
        stream.tokens.append(int(each))
        stream.times.append(time.perf_counter())


def row_of(context: int, found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    def middle(kind: str, name: str) -> float:
        return statistics.median(each[name] for each in found[kind])

    bounds = [each["stall"] - 2 * each["step"] - each["stallSeconds"] for each in found["moved"]]
    stall, again = middle("moved", "stall"), middle("recomputed", "stall")
    return {
        "context": context,
        "movedStallMs": round(1e3 * stall, 1),
        "recomputedStallMs": round(1e3 * again, 1),
        "recomputedOverMoved": round(again / stall, 2),
        "stepMs": round(1e3 * middle("moved", "step"), 1),
        "lastStageAndCommitMs": round(1e3 * middle("moved", "stallSeconds"), 1),
        "boundMs": round(1e3 * (2 * middle("moved", "step") + middle("moved", "stallSeconds")), 1),
        "overBoundMs": [round(1e3 * each, 1) for each in bounds],
        "blocks": middle("moved", "blocks"),
        "lastBlocks": middle("moved", "lastBlocks"),
        "stages": middle("moved", "stages"),
        "stallsMs": {kind: [round(1e3 * e["stall"], 1) for e in each] for kind, each in found.items()},
    }


if __name__ == "__main__":
    main()
