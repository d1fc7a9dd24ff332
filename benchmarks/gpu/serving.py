"""The serving engine beside transformers' `generate`: greedy equality and tokens/s, in one run.

    python benchmarks/gpu/serving.py [--out results.json] [--model tiny|1b|8b] [--dtype ...]
    python benchmarks/gpu/serving.py --parts speed --batches 1 8 --tokens 128      a part of it, smaller

Needs torch, transformers, safetensors, tokenizers and prometheus-client; no cluster, no download: the
model is random (its config is real). On a machine without a CUDA device it runs a CPU miniature of the
same code and says so in its result; such a result is never a GPU figure.

1. Equality, in float32: prompts of mixed length in one continuous batch, with a KV pool smaller than
   the sum of contexts, against `generate` one prompt at a time.
2. Speed, in --dtype: B sequences with `context` tokens each produce `output` tokens. Ours with paged
   KV and continuous batching, transformers with its static batch; both timed to the last token.
   The ratio is the figure; tokens/s belong to the device named in the same file.
3. Decoding, in --dtype: steps that only decode, in each way that the start would try, beside the time in which the memory
   copies as many bytes as weights and contexts have. No peer.
4. Continuous, in --dtype: as speed, beside transformers' continuous batching.
5. Attention, in --dtype: one layer's decoding for B sequences of a context, gathered and in place, and the share of the
   memory's copy rate at which each reads the keys and values. On a CPU only that the ways run.
6. Streaming, in --dtype: decoding steps of the largest batch where the memory holds a quarter of the layers and two slots,
   with and without reading ahead, beside all layers resident and the bound of reading or computing. This part has not run
   on a GPU yet.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".src"))

import torch
import transformers
from tokenizers import Tokenizer, models

from busbar.workloads.serving.architecture import parse_architecture, read_architecture
from busbar.workloads.serving.block_attention import PRODUCTS, InPlace
from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.dtype_choice import choose_dtypes
from busbar.workloads.serving.kvcache import KvShape
from busbar.workloads.serving.loader import assemble, load
from busbar.workloads.serving.model import TorchCalls
from busbar.workloads.serving.probe import GPU_WAYS, choose_backend, fastest, time_decoding
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.settings import EngineSettings
from busbar.workloads.serving.stream_load import WeightReader
from busbar.workloads.serving.weights import fuse_weights

PARTS = ("equality", "speed", "decoding", "continuous", "attention", "streaming")
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 4, "hidden": 256, "heads": 4, "kv": 4, "mlp": 704, "vocab": 4096},
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv": 8, "mlp": 8192, "vocab": 128256},
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv": 8, "mlp": 14336, "vocab": 128256},
}


@dataclass(frozen=True)
class Plan:
    """The sizes of the run."""

    batches: tuple[int, ...]
    context: int
    output: int
    equality_prompts: int
    equality_tokens: int
    attention: tuple[tuple[int, int], ...]
    """Sequences and tokens of each."""


GPU = Plan(
    batches=(1, 8, 64),
    context=1024,
    output=256,
    equality_prompts=8,
    equality_tokens=64,
    attention=((1, 1024), (8, 1024), (64, 1024), (1, 16384), (8, 16384), (64, 4096)),
)
MINIATURE = Plan(
    batches=(1, 8),
    context=48,
    output=48,
    equality_prompts=6,
    equality_tokens=32,
    attention=((1, 128), (2, 256)),
)


def make_model(shape: dict[str, int], device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """A random Llama of this shape, made on the device."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return model.eval()


def make_engine(
    model: Any,
    kv_bytes: int,
    max_running: int,
    block_tokens: int = 64,
    prefix_cache: bool = False,
    tensors: Mapping[str, torch.Tensor] | None = None,
    kv_form: str = "auto",
) -> EngineCore:
    """Our engine on the same weights (copied and fused), which are the model's own unless `tensors` names them as a
    checkpoint does. Runs are repeated with the same prompts, so beside a peer without a prefix cache ours is off."""
    arch = parse_architecture(model.config.to_dict())
    device = model.device
    weights = fuse_weights(model.state_dict() if tensors is None else tensors, arch, device, model.dtype)
    words = {f"w{i}": i for i in range(arch.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    settings = EngineSettings(
        Path("in-memory"),
        kv_bytes=kv_bytes,
        max_running=max_running,
        block_tokens=block_tokens,
        max_batched_tokens=2048 if device.type == "cuda" else 512,
        prefix_cache=prefix_cache,
        kv_dtype=kv_form,
    )
    kv_dtype = torch.float32 if device.type == "cpu" else model.dtype
    core, _, _ = assemble(settings, arch, weights, kv_dtype, tokenizer, "random", time.monotonic)
    return core


def run_ours(core: EngineCore, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    found: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        core.submit(str(index), prompt, params, time.monotonic())
    while not core.idle:
        for delta in core.step():
            found[int(delta.request_id)] += delta.tokens
    return found


def run_transformers(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """All prompts have the same length."""
    inputs = torch.tensor(prompts, device=model.device)
    with torch.no_grad():
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    tokens: list[list[int]] = out[:, inputs.shape[1] :].tolist()
    return tokens


def random_prompt(length: int, vocab: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(100, vocab, (length,), generator=generator).tolist()
    return tokens


def check_equality(shape: dict[str, int], device: torch.device, plan: Plan) -> dict[str, Any]:
    """In float32, one batch under memory pressure against one prompt at a time."""
    model = make_model(shape, device, torch.float32)
    lengths = [7 + (i * 37) % (2 * plan.context) for i in range(plan.equality_prompts)]
    prompts = [random_prompt(n, shape["vocab"], i) for i, n in enumerate(lengths)]
    longest = max(lengths) + plan.equality_tokens
    total = sum(lengths) + plan.equality_tokens * len(lengths)
    block = 16
    block_bytes = 2 * shape["layers"] * shape["kv"] * (shape["hidden"] // shape["heads"]) * block * 4
    blocks = max(-(-longest // block), total // block // 2)
    core = make_engine(model, (blocks + 1) * block_bytes, len(prompts), block)
    ours = run_ours(core, prompts, plan.equality_tokens)
    theirs = [run_transformers(model, [p], plan.equality_tokens)[0] for p in prompts]
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(y))
        for x, y in zip(ours, theirs, strict=True)
    ]
    return {
        "dtype": "float32",
        "prompts": len(prompts),
        "tokensEach": plan.equality_tokens,
        "equalPrompts": sum(n == plan.equality_tokens for n in same),
        "equalTokensBeforeFirstDifference": same,
        "kvPoolTokens": core.scheduler.capacity_tokens,
        "sumOfContexts": total,
        "preemptions": core.scheduler.preemption_count,
        "blocksLeftBehind": core.scheduler.pool.used,
        "attention": core.runner.decoder.attention_name,
        "graphs": 0 if core.runner.graphs is None else len(core.runner.graphs),
        "layerKernels": not isinstance(core.runner.decoder.calls, TorchCalls),
    }


def measure_speed(
    shape: dict[str, int], device: torch.device, dtype: torch.dtype, plan: Plan, repeats: int
) -> list[dict[str, Any]]:
    model = make_model(shape, device, dtype)
    widest = max(plan.batches)
    per_token = 2 * shape["layers"] * shape["kv"] * (shape["hidden"] // shape["heads"]) * 4
    core = make_engine(model, (widest + 1) * (plan.context + plan.output + 64) * per_token, widest)
    rows = []
    for batch in plan.batches:
        prompts = [random_prompt(plan.context, shape["vocab"], 1000 + i) for i in range(batch)]
        sides = {
            "ours": partial(run_ours, core, prompts, plan.output),
            "transformers": partial(run_transformers, model, prompts, plan.output),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(repeats + 1):
            for name, run in sides.items():
                if device.type == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter() if device.type == "cuda" else time.process_time()
                run()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                ended = time.perf_counter() if device.type == "cuda" else time.process_time()
                if repeat:  # the first is a warm-up
                    seconds[name].append(ended - began)
        median = {name: sorted(times)[len(times) // 2] for name, times in seconds.items()}
        rows.append(
            {
                "batch": batch,
                "context": plan.context,
                "output": plan.output,
                "oursTokensPerSecond": round(batch * plan.output / median["ours"], 1),
                "transformersTokensPerSecond": round(batch * plan.output / median["transformers"], 1),
                "ratio": round(median["transformers"] / median["ours"], 3),
                "seconds": seconds,
            }
        )
        print(f"  batch {batch}: {rows[-1]['ratio']}x transformers", file=sys.stderr)
    return rows


def measure_decoding(
    shape: dict[str, int], device: torch.device, dtype: torch.dtype, plan: Plan, kv_form: str
) -> list[dict[str, Any]]:
    """Steps of decoding alone. The bound: weights and contexts once, at the copy rate."""
    steps, rows, rate = 32, [], copy_rate(device)
    per_token = 2 * shape["layers"] * shape["kv"] * (shape["hidden"] // shape["heads"]) * dtype.itemsize
    core = make_engine(
        make_model(shape, device, dtype),
        (max(plan.batches) + 1) * (plan.context + 2 * steps + 64) * per_token,
        max(plan.batches),
        kv_form=kv_form,
    )
    gc.collect()  # the model
    runner, weights = core.runner, core.runner.decoder.weights
    graphs, calls, cache = runner.graphs, runner.decoder.calls, runner.cache.shape
    torchs = calls if isinstance(calls, TorchCalls) else TorchCalls(runner.decoder)
    ways = {"launched": (None, torchs), "graphs": (graphs, torchs), "graphs, layer kernels": (graphs, calls)}
    for batch in plan.batches:
        prompts = [random_prompt(plan.context, shape["vocab"], 1000 + i) for i in range(batch)]
        read = weights.head.bytes + weights.layer_bytes
        read += batch * (plan.context + steps // 2) * cache.block_bytes // cache.block_tokens
        row: dict[str, Any] = {"batch": batch, "context": plan.context, "bytes": read}
        for name, (runner.graphs, runner.decoder.calls) in ways.items():
            if ("graphs" in name and graphs is None) or ("kernels" in name and calls is torchs):
                continue
            if graphs is not None:
                graphs.forget()
            timed_decoding(core, prompts, steps, device)  # records
            spent = min(timed_decoding(core, prompts, steps, device)[1] for _ in range(2)) / steps
            row[name] = {
                "millisecondsPerStep": round(spent * 1e3, 3),
                "ofTheBound": round(read / rate / spent, 3),
            }
        rows.append(row)
        print(f"  decoding: {row}", file=sys.stderr)
    return [{"attention": runner.decoder.attention_name, "copyBytesPerSecond": round(rate)}, *rows]


def measure_continuous(
    shape: dict[str, int], device: torch.device, dtype: torch.dtype, plan: Plan
) -> list[dict[str, Any]]:
    """Beside transformers' continuous batching, which records and compiles in its first run."""
    model = make_model(shape, device, dtype)
    per_token = 2 * shape["layers"] * shape["kv"] * (shape["hidden"] // shape["heads"]) * dtype.itemsize
    widest = max(plan.batches)
    core = make_engine(model, (widest + 1) * (plan.context + plan.output + 64) * per_token, widest)
    config = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=plan.output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    settings = transformers.generation.configuration_utils.ContinuousBatchingConfig(max_memory_percent=0.6)
    rows = []
    for batch in plan.batches:
        prompts = [random_prompt(plan.context, shape["vocab"], 3000 + i) for i in range(batch)]

        def theirs(prompts: list[list[int]] = prompts) -> int:
            found = model.generate_batch(
                inputs=prompts,
                generation_config=config,
                continuous_batching_config=settings,
                persistent_manager=True,
            )
            return sum(len(each.generated_tokens) for each in found.values())

        def ours(prompts: list[list[int]] = prompts) -> int:
            return sum(map(len, run_ours(core, prompts, plan.output)))

        row: dict[str, Any] = {"batch": batch, "context": plan.context, "output": plan.output}
        for name, run in (("ours", ours), ("continuousBatching", theirs)):
            run()
            began = time.perf_counter()
            count = run()
            row[name] = {"tokens": count, "seconds": round(time.perf_counter() - began, 4)}
        if row["ours"]["tokens"] == row["continuousBatching"]["tokens"]:
            row["ratio"] = round(row["continuousBatching"]["seconds"] / row["ours"]["seconds"], 3)
        rows.append(row)
        print(f"  continuous: {row}", file=sys.stderr)
    return rows


def measure_attention(
    shape: dict[str, int], device: torch.device, dtype: torch.dtype, plan: Plan
) -> dict[str, Any]:
    """One layer's decoding attention in every way that runs here, as microseconds and as a share of the copy rate."""
    one = KvShape(1, shape["kv"], shape["hidden"] // shape["heads"], 64, dtype)
    gathering, _ = choose_backend(one, shape["heads"], device)
    rate = copy_rate(device)
    ways: Mapping[str, Callable[[], InPlace]] = (
        {PRODUCTS.name: lambda: PRODUCTS} if device.type == "cpu" else GPU_WAYS
    )
    rows = []
    for batch, context in plan.attention:
        row: dict[str, Any] = {"batch": batch, "context": context}
        read = batch * context * one.block_bytes / one.block_tokens
        for name, find in ways.items():
            try:
                within, gathered = time_decoding(
                    one, shape["heads"], device, find(), gathering, batch, context
                )
            except Exception as problem:
                row[name] = {"doesNotRun": str(problem)[:500]}
                continue
            for way, seconds in ((name, within), (f"gathered, {gathering.name}", gathered)):
                row[way] = {
                    "microseconds": round(seconds * 1e6, 1),
                    "ofTheCopyRate": round(read / seconds / rate, 3),
                }
            row[name]["overGathered"] = round(gathered / within, 2)
        rows.append(row)
        print(f"  attention: {row}", file=sys.stderr)
    return {"copyBytesPerSecond": round(rate), "rows": rows}


def copy_rate(device: torch.device) -> float:
    """Bytes per second that a large copy in the device's memory reads and writes."""
    source = torch.zeros(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / fastest(lambda: target.copy_(source), device)


def measure_streaming(
    shape: dict[str, int], device: torch.device, dtype: torch.dtype, plan: Plan, repeats: int
) -> dict[str, Any]:
    """Decoding with a quarter of the layers' memory: streamed with and without reading ahead, beside all layers resident.

    On a GPU layers come from pinned host memory; on a CPU from a file. The bound is the longer of the resident step and of
    reading the streamed layers at the rate of the start.
    """
    batch, steps = max(plan.batches), 16
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(shape, device, dtype).save_pretrained(folder / "model")
        words = {f"w{i}": i for i in range(shape["vocab"])}
        Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "model" / "tokenizer.json"))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        per_token = 2 * shape["layers"] * shape["kv"] * (shape["hidden"] // shape["heads"]) * 4
        length = plan.context + steps + 64
        base = EngineSettings(
            folder / "model",
            kv_bytes=(batch + 1) * length * per_token,
            max_running=batch,
            max_batched_tokens=512,
            max_model_len=length,
            dtype="auto" if device.type == "cuda" else str(dtype).removeprefix("torch."),
            prefix_cache=False,
        )
        streamed = replace(base, weights="stream", stream_dir=folder / "layers", stream_depth=1)
        arch = read_architecture(folder / "model")
        needs = WeightReader(
            streamed, arch, device, choose_dtypes(base.dtype, arch.dtype, device), length
        ).needs
        streamed = replace(
            streamed, memory_bytes=needs.least_bytes + shape["layers"] // 4 * needs.layer_bytes
        )
        sides = {"resident": base, "streamed": streamed, "notAhead": replace(streamed, stream_depth=0)}
        prompts = [random_prompt(plan.context, shape["vocab"], 2000 + i) for i in range(batch)]
        row: dict[str, Any] = {"batch": batch, "steps": steps}
        answers: dict[str, list[list[int]]] = {}
        for name, settings in sides.items():  # one after the other: each takes the device's memory
            loaded = load(settings, "random")
            seconds = []
            for _ in range(repeats):
                answers[name], spent = timed_decoding(loaded.core, prompts, steps, device)
                seconds.append(spent / steps)
            row[name] = {"secondsPerStep": sorted(seconds)[len(seconds) // 2], "all": seconds}
            if loaded.streaming is not None:
                row[name] |= {"plan": loaded.streaming.text, "readSeconds": loaded.streaming.pass_s}
            loaded.core.runner.decoder.weights.layers.close()
            del loaded
    bound = max(row["resident"]["secondsPerStep"], row["streamed"]["readSeconds"])
    row["ofTheBound"] = round(bound / row["streamed"]["secondsPerStep"], 3)
    row["overNotAhead"] = round(row["notAhead"]["secondsPerStep"] / row["streamed"]["secondsPerStep"], 3)
    row["equalAnswers"] = sum(a == b for a, b in zip(answers["streamed"], answers["resident"], strict=True))
    return row


def timed_decoding(
    core: EngineCore, prompts: list[list[int]], steps: int, device: torch.device
) -> tuple[list[list[int]], float]:
    """The answers, and the seconds of their last `steps` tokens."""
    params = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
    found: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        core.submit(str(index), prompt, params, time.monotonic())
    began = None
    while not core.idle:
        if began is None and all(found):
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
        for delta in core.step():
            found[int(delta.request_id)] += delta.tokens
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert began is not None
    return found, time.perf_counter() - began


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, help="default: 1b on a GPU, tiny on a CPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the timed part")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which of them; default: all"
    )
    parser.add_argument("--batches", type=int, nargs="+", help="sequences at once in the timed parts")
    parser.add_argument(
        "--kv-dtype", choices=("auto", "int8", "int4"), default="auto", help="of the decoding part"
    )
    parser.add_argument("--context", type=int, help="tokens of each prompt in the timed parts")
    parser.add_argument("--tokens", type=int, help="that each sequence produces in the timed parts")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    name = given.model or ("1b" if on_gpu else "tiny")
    dtype = given.dtype or ("bfloat16" if on_gpu else "float32")
    plan = GPU if on_gpu else MINIATURE
    batches = tuple(given.batches or plan.batches)
    plan = replace(
        plan,
        batches=batches,
        output=given.tokens or plan.output,
        context=given.context or plan.context,
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    if not on_gpu:
        torch.set_num_threads(1)
        print("No CUDA device: this is a CPU miniature and says nothing about a GPU.", file=sys.stderr)
    result = {
        "benchmark": "serving",
        "kind": "gpu" if on_gpu else "cpu-miniature",
        "command": " ".join(["python", "benchmarks/gpu/serving.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(0) if on_gpu else f"CPU, 1 thread ({platform.machine()})",
        "timer": "wall, synchronised" if on_gpu else "CPU seconds of the process",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": {"name": name, **SHAPES[name]},
        "dtype": dtype,
    }
    measures: dict[str, Callable[[], Any]] = {
        "equality": lambda: check_equality(SHAPES[name], device, plan),
        "speed": lambda: measure_speed(SHAPES[name], device, getattr(torch, dtype), plan, given.repeats),
        "decoding": lambda: measure_decoding(
            SHAPES[name], device, getattr(torch, dtype), plan, given.kv_dtype
        ),
        "continuous": lambda: measure_continuous(SHAPES[name], device, getattr(torch, dtype), plan),
        "attention": lambda: measure_attention(SHAPES[name], device, getattr(torch, dtype), plan),
        "streaming": lambda: measure_streaming(
            SHAPES[name], device, getattr(torch, dtype), plan, given.repeats
        ),
    }
    for part in PARTS:
        if part in given.parts:
            result[part] = measures[part]()
            if given.out:  # what there is, should a later part take too long
                given.out.write_text(json.dumps(result, indent=2) + "\n")
            if on_gpu:
                gc.collect()
                torch.cuda.empty_cache()
    print(json.dumps(result, indent=2))
    equality = result.get("equality")
    if equality is None:
        return 0
    assert isinstance(equality, dict)
    return 0 if equality["equalPrompts"] == equality["prompts"] and not equality["blocksLeftBehind"] else 1


if __name__ == "__main__":
    sys.exit(main())
