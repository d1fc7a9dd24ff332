"""A model with experts, 2.5 times larger than its memory limit: its experts read one by one, beside whole layers.

    python benchmarks/serving_stream_experts.py [--repeats 3] [--steps 8] [--out benchmarks/results/serving_stream_experts.json]

A random Qwen3-MoE of about 2.4 GiB in float32 (16 layers, width 1024, 64 experts of width 192 in a layer, 4 for each token),
on one CPU thread and the reading one. As root: each side is a process of its own in a memory cgroup (version 1 or 2, without
swap) whose limit is the file's size over 2.5. With one request, and with 16 at once:

  experts     the engine's own plan: everything but experts stays, and these are read one by one, also ahead, as the next
              layer's router foresees, while that is used
  not ahead   the same, and only what a layer waits for is read
  layers      whole layers are read, as without this plan (--stream-unit layers)
  resident    without a limit, weights in the fastest layout: the tokens

A side does `steps` decoding steps when it is told to, then the next side, and so on for each repeat, so that all meet the
same neighbours. Tokens are drawn at temperature 1 with a seed for each request: a random model that takes the likeliest
token repeats itself, and then always uses the same experts. So every expert is about equally likely here, which is the
hardest case for a cache; trained models use some more often than others. All answers must be those of `resident`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serving_stream import Side, facts, run, tell

from busbar.local import cgroups

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 192,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SMALL: dict[str, Any] = SHAPE | {"num_hidden_layers": 4, "moe_intermediate_size": 64}
OVER, PROMPT, BATCHES = 2.5, 16, (1, 16)
WARM_UP = 16
"""Decoding steps before anything is measured: what is used often is learnt from as many."""
SIDES = ("experts", "not ahead", "layers", "resident")
GROUP = "busbar-serving-stream-experts"
SMALL_MEMORY = 210 * 2**20


def main() -> int:
    def one_side(given: argparse.Namespace) -> int:
        name, _, batch = given.side.partition(":")
        return side(name, int(batch), given.folder, given.steps * given.repeats)

    return run(__doc__, 8, 8, measure, one_side)


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    shape = SMALL if given.no_limit else SHAPE
    make(folder / "model", shape)
    size = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
    limit = None if given.no_limit else int(size / OVER)
    try:
        rows = [row(batch, folder, given, limit) for batch in BATCHES]
    finally:
        if limit is not None:
            cgroups.remove(GROUP)
    return {
        **facts("serving_stream_experts", shape, size, limit),
        "rows": rows,
        "sameTokens": all(each["sameTokens"] for each in rows),
    }


def row(batch: int, folder: Path, given: argparse.Namespace, limit: int | None) -> dict[str, Any]:
    """All sides with so many requests at once."""
    from rich.progress import track

    sides: dict[str, Side] = {}
    try:
        for name in track(SIDES, f"starting, {batch} at once"):  # one after the other: they write files
            bound = None if name == "resident" else limit
            group = f"{GROUP}/{SIDES.index(name)}"
            sides[name] = Side(f"{name}:{batch}", folder, given, bound, __file__, group)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
        for turn in track(range(given.repeats * len(SIDES)), "measuring"):
            name = SIDES[turn % len(SIDES)]
            found[name].append(sides[name].ask({"steps": given.steps}))
        ends = {name: side.ask({"steps": 0}) for name, side in sides.items()}
        peaks = {name: side.peak() for name, side in sides.items()}
    finally:
        for side_ in sides.values():
            side_.end()
    tokens = batch * given.steps
    cpu, wall = (
        {name: statistics.median(turn[what] for turn in turns) for name, turns in found.items()}
        for what in ("cpuSeconds", "seconds")
    )
    read = {name: sum(turn["read"] for turn in turns) for name, turns in found.items()}
    all_tokens = tokens * given.repeats
    return {
        "batch": batch,
        "plans": {name: side.started["text"] for name, side in sides.items() if name != "resident"},
        "peakBytesInCgroup": peaks,
        "tokensPerCpuSecond": {name: round(tokens / each, 3) for name, each in cpu.items()},
        "tokensPerSecond": {name: round(tokens / each, 3) for name, each in wall.items()},
        "mibReadPerToken": {name: round(each / all_tokens / 2**20, 2) for name, each in read.items()},
        "hitRate": {name: ratio(turns, "hits", "queries") for name, turns in found.items()},
        "prefetchesUsed": {name: ratio(turns, "prefetchHits", "prefetches") for name, turns in found.items()},
        "ratiosToLayers": {
            "tokensPerCpuSecond": round(cpu["layers"] / cpu["experts"], 3),
            "tokensPerSecond": round(wall["layers"] / wall["experts"], 3),
            "bytesRead": round(read["experts"] / read["layers"], 3) if read["layers"] else None,
        },
        "ratioToNotAhead": round(wall["not ahead"] / wall["experts"], 3),
        "seconds": {name: [round(turn["seconds"], 3) for turn in turns] for name, turns in found.items()},
        "cpuSeconds": {
            name: [round(turn["cpuSeconds"], 3) for turn in turns] for name, turns in found.items()
        },
        "sameTokens": all(end["tokens"] == ends["resident"]["tokens"] for end in ends.values()),
        "comparedTokens": sum(map(len, ends["resident"]["tokens"])),
    }


def ratio(turns: list[dict[str, Any]], some: str, of: str) -> float | None:
    whole = sum(turn[of] for turn in turns)
    return round(sum(turn[some] for turn in turns) / whole, 3) if whole else None


def make(folder: Path, shape: dict[str, Any]) -> None:
    """In a process of its own, whose memory is gone before anything is measured."""
    code = (
        "import sys, json, torch, transformers; from tokenizers import Tokenizer, models;"
        "torch.manual_seed(0); shape = json.loads(sys.argv[1]);"
        "config = transformers.Qwen3MoeConfig(**shape);"
        "transformers.AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[2], max_shard_size='100GB');"
        "Tokenizer(models.WordLevel({f'w{i}': i for i in range(shape['vocab_size'])}, unk_token='w0'))"
        ".save(sys.argv[2] + '/tokenizer.json')"
    )
    subprocess.run(
        [sys.executable, "-c", code, json.dumps(shape), str(folder)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


# -- in a side's process -------------------------------------------------------------------------------


def side(name: str, batch: int, folder: Path, steps: int) -> int:
    group = os.environ["BUSBAR_GROUP"]
    if group:
        cgroups.enter(group, os.getpid())  # before torch is imported: everything counts
    answers = sys.stdout
    sys.stdout = sys.stderr
    work = turns_of(name, batch, folder, steps, answers)
    next(work)
    for line in sys.stdin:
        work.send(json.loads(line)["steps"])
    return 0


def turns_of(name: str, batch: int, folder: Path, steps: int, answers: TextIO) -> Generator[None, int, None]:
    """Yields whenever it waits for the number of steps to do."""
    import torch

    from busbar.workloads.serving.expert_stream import ExpertCounts, ExpertStreamedLayers
    from busbar.workloads.serving.loader import load
    from busbar.workloads.serving.sampling import SamplingParams
    from busbar.workloads.serving.settings import EngineSettings

    resident = name == "resident"
    length = PROMPT + WARM_UP + steps + 2
    blocks = batch * -(-length // 16) + 2
    block_bytes = 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 16 * 4
    settings = EngineSettings(
        folder / "model",
        kv_bytes=blocks * block_bytes,
        max_model_len=length,
        max_running=max(BATCHES),
        max_batched_tokens=PROMPT * max(BATCHES),
        block_tokens=16,
        threads=1,
        weights="resident" if resident else "stream",
        stream_dir=None if resident else folder / "layers",
        stream_depth=0 if name == "not ahead" else None,
        stream_unit="layers" if name == "layers" else "auto",
        memory_bytes=None if os.environ["BUSBAR_GROUP"] or resident else SMALL_MEMORY,
    )
    loaded = load(settings, "random")
    core, streaming = loaded.core, loaded.streaming
    layers = core.runner.decoder.weights.layers
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(100, SHAPE["vocab_size"], (batch, PROMPT), generator=generator).tolist()
    found: list[list[int]] = [[] for _ in range(batch)]
    for index in range(batch):
        params = SamplingParams(max_tokens=WARM_UP + steps + 1, temperature=1.0, seed=index, ignore_eos=True)
        core.submit(str(index), prompts[index], params, 0.0)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        for delta in core.step():
            found[int(delta.request_id)] += delta.tokens

    def counted() -> ExpertCounts:
        if isinstance(layers, ExpertStreamedLayers):
            return ExpertCounts(**vars(layers.cache.counts))
        return ExpertCounts(read_bytes=0 if streaming is None else done * streaming.plan.pass_bytes)

    while not all(found):  # prompts
        step()
    for _ in range(WARM_UP):
        step()
    tell(answers, text="" if streaming is None else streaming.text)
    while True:
        wanted = yield
        before, began, cpu = counted(), time.perf_counter(), time.process_time()
        for _ in range(wanted):
            step()
        spent, used, after = time.perf_counter() - began, time.process_time() - cpu, counted()
        tell(
            answers,
            seconds=spent,
            cpuSeconds=used,
            read=after.read_bytes - before.read_bytes,
            queries=after.queries - before.queries,
            hits=after.hits - before.hits,
            prefetches=after.prefetches - before.prefetches,
            prefetchHits=after.prefetch_hits - before.prefetch_hits,
            tokens=found if not wanted else [],
        )


if __name__ == "__main__":
    sys.exit(main())
