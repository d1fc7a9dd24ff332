"""Keys, values and weights in 8 and 4 bits beside float: bytes, requests at once, quality and speed, on one CPU thread.

    python benchmarks/serving_quantised.py [--model DIR] [--repeats 3] [--out benchmarks/results/serving_quantised.json]

Two models:

  demo    the one that `make demo` trains (4 layers, width 256, heads of 64, 4.2 M parameters), trained in this run with
          `busbar train examples/train-python-stdlib.yaml` (about six minutes), or read from --model. It is weak: a
          thousand steps on the source of Python's standard library. Its row says how weak, beside the same text in xz.
  33.6 M  a random Llama (8 layers, width 512), for speed and bytes only

and five parts:

  bytes     of keys and values per token, and of the layers' matrices
  requests  that run at once in the same KV memory, without a preemption, beside a cache in bfloat16
  quality   bits per byte of files that the training held out, in windows of 256 tokens through the engine itself
            (`prompt_logprobs`). The same model with channels of keys made 32 times larger, and those of queries as much
            smaller, is the same function in float; it shows what the balance of channels is for.
  keys      relative error of the demo's keys in ways to divide them into scales
  speed     tokens per CPU second of whole runs, prompts of 32 to 256 tokens and 64 new ones, at batch 1 and 16. The
            sides take their steps in turn, so that all meet the same neighbours on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from benchmarks.gpu.serving import make_model, random_prompt
from tokenizers import Tokenizer, models

from busbar.workloads.serving import weightcodes
from busbar.workloads.serving.architecture import Architecture, parse_architecture, read_architecture
from busbar.workloads.serving.balance import key_peaks
from busbar.workloads.serving.checkpoint import Checkpoint
from busbar.workloads.serving.core import EngineCore
from busbar.workloads.serving.kvcache import KvShape
from busbar.workloads.serving.kvcodes import FORMS, INT4, decode, encode
from busbar.workloads.serving.loader import assemble
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.settings import EngineSettings
from busbar.workloads.serving.text import load_tokenizer
from busbar.workloads.serving.weights import Weights, fuse_weights
from busbar.workloads.training.corpus import open_corpus

REPOSITORY = Path(__file__).resolve().parents[1]
MANIFEST = REPOSITORY / "examples" / "train-python-stdlib.yaml"
SHAPE: dict[str, int] = {"layers": 8, "hidden": 512, "heads": 8, "kv": 4, "mlp": 1536, "vocab": 8192}
CPU = torch.device("cpu")
WINDOW, TEXT_CHARACTERS = 256, 60_000
LARGER = 32.0
KV_BYTES, BLOCK_TOKENS = 16 * 2**20, 64
PROMPT, OUTPUT = 200, 56
"""Of requests at once: four blocks each, held for long enough that all of them are there."""
BATCHES, NEW_TOKENS = (1, 16), 64
SIDES: dict[str, tuple[str, str, str]] = {
    "float32": ("float32", "auto", "auto"),
    "bfloat16": ("bfloat16", "auto", "auto"),
    "weights int8": ("float32", "int8", "auto"),
    "weights int8, rest bfloat16": ("bfloat16", "int8", "auto"),
    "weights int4": ("float32", "int4", "auto"),
    "kv int8": ("float32", "auto", "int8"),
    "kv int4": ("float32", "auto", "int4"),
    "weights int8, kv int8": ("float32", "int8", "int8"),
}
"""dtype, that of the weights, that of keys and values."""
FLOATS = ("float32", "bfloat16")
KV_AIMS: dict[str, dict[str, float]] = {
    "bytesOverBfloat16": {"int8": 0.53, "int4": 0.29},
    "requestsAtOnceOverBfloat16": {"int8": 1.8, "int4": 3.3},
    "bitsPerByteMoreThanFloat": {"int8": 0.01, "int4": 0.03},
}
LAYER_AIM = 1.1
"""Bytes of the layers' matrices over nominal."""
SPEED_AIM = 1.0
"""Tokens per CPU second with weights in int8 over the best float, at batch 16."""


def train(folder: Path) -> Path:
    """The demo's model."""
    command = [
        sys.executable,
        "-m",
        "busbar.cli.main",
        "train",
        str(MANIFEST),
        "--output",
        str(folder),
        "--plain",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    return folder


class Model:
    """An architecture with its tensors, from which engines are made."""

    def __init__(self, arch: Architecture, tensors: Mapping[str, torch.Tensor], tokenizer: Tokenizer) -> None:
        self.arch = arch
        self.tensors = tensors
        self.tokenizer = tokenizer

    @classmethod
    def demo(cls, folder: Path) -> Model:
        return cls(read_architecture(folder), dict(Checkpoint(folder)), load_tokenizer(folder))

    @classmethod
    def random(cls) -> Model:
        model = make_model(SHAPE, CPU, torch.float32)
        arch = parse_architecture(model.config.to_dict())
        words = {f"w{i}": i for i in range(arch.vocab_size)}
        return cls(arch, model.state_dict(), Tokenizer(models.WordLevel(words, unk_token="w0")))

    def with_large_keys(self) -> Model:
        """The same function with two channels of every key head (a rotary pair) larger, and the queries' smaller."""
        arch, tensors = self.arch, dict(self.tensors)
        for layer in range(arch.layers):
            for kind, heads, factor in (("k", arch.kv_heads, LARGER), ("q", arch.heads, 1 / LARGER)):
                name = f"model.layers.{layer}.self_attn.{kind}_proj.weight"
                changed = tensors[name].clone().view(heads, arch.head_dim, -1)
                changed[:, [5, 5 + arch.head_dim // 2]] *= factor
                tensors[name] = changed.view(-1, arch.hidden)
        return Model(arch, tensors, self.tokenizer)

    def weights(self, dtype: str, stored: str) -> Weights:
        kind = getattr(torch, dtype)
        return fuse_weights(self.tensors, self.arch, CPU, kind, weightcodes.FORMS.get(stored))

    def engine(
        self, weights: Weights, kv: str, kv_dtype: torch.dtype = torch.float32, **more: Any
    ) -> EngineCore:
        settings = EngineSettings(
            Path("in-memory"), kv_dtype=kv, prefix_cache=False, **({"kv_bytes": 256 * 2**20} | more)
        )
        arguments = (self.arch, weights, kv_dtype, self.tokenizer, "model")
        core, _, _ = assemble(settings, *arguments, clock=time.process_time)
        return core


def bytes_of(name: str, model: Model) -> dict[str, Any]:
    arch = model.arch
    plain = KvShape.of(arch, BLOCK_TOKENS, torch.bfloat16)
    tokens = {"bfloat16": plain.block_bytes / BLOCK_TOKENS, "float32": 2 * plain.block_bytes / BLOCK_TOKENS}
    tokens |= {kv: replace(plain, form=form).block_bytes / BLOCK_TOKENS for kv, form in FORMS.items()}
    float32 = model.weights("float32", "auto")
    count = float32.layer_bytes // 4
    coded = {form: model.weights("float32", form) for form in weightcodes.FORMS}
    nominal = {form: count * weightcodes.FORMS[form].bits / 8 for form in coded}
    over = {form: coded[form].layer_bytes / nominal[form] for form in coded}
    kv_over = {kv: tokens[kv] / tokens["bfloat16"] for kv in FORMS}
    return {
        "model": name,
        "headDim": arch.head_dim,
        "kvBytesPerToken": tokens,
        "kvOverBfloat16": rounded(kv_over, 4),
        "layerWeights": count,
        "layerBytes": {"float32": float32.layer_bytes} | {f: w.layer_bytes for f, w in coded.items()},
        "layerOverNominal": rounded(over, 4),
        "modelBytes": {"float32": float32.bytes} | {form: each.bytes for form, each in coded.items()},
        "aimsMet": {kv: kv_over[kv] <= KV_AIMS["bytesOverBfloat16"][kv] for kv in FORMS}
        | {f"weights {form}": over[form] <= LAYER_AIM for form in over},
    }


def requests_at_once(name: str, model: Model) -> dict[str, Any]:
    weights = model.weights("float32", "auto")
    most: dict[str, int] = {}
    preempted: dict[str, int] = {}
    sides = {"bfloat16": ("auto", torch.bfloat16), "float32": ("auto", torch.float32)}
    sides |= {kv: (kv, torch.float32) for kv in FORMS}
    for side, (kv, dtype) in sides.items():
        core = model.engine(weights, kv, dtype, kv_bytes=KV_BYTES, max_running=256, deterministic=True)
        params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
        per_request = -(-(PROMPT + OUTPUT) // BLOCK_TOKENS)
        for index in range(core.scheduler.pool.total // per_request + 4):
            core.submit(str(index), random_prompt(PROMPT, model.arch.vocab_size, index), params, 0.0)
        most[side] = 0
        while not core.idle:
            core.step()
            most[side] = max(most[side], len(core.scheduler.running))
        preempted[side] = core.scheduler.preemption_count
    ratio = {kv: most[kv] / most["bfloat16"] for kv in FORMS}
    return {
        "model": name,
        "kvBytes": KV_BYTES,
        "tokensPerRequest": PROMPT + OUTPUT,
        "mostAtOnce": most,
        "preemptions": preempted,
        "overBfloat16": rounded(ratio, 3),
        "overFloat32": rounded({kv: most[kv] / most["float32"] for kv in FORMS}, 3),
        "aimsMet": {kv: ratio[kv] >= KV_AIMS["requestsAtOnceOverBfloat16"][kv] for kv in FORMS},
    }


def held_out() -> list[str]:
    """The beginnings of files that the demo's training did not see."""
    found: list[str] = []
    for document in open_corpus("builtin://python-stdlib", None, 0.05).holdout:
        found.append(document.path.read_text(encoding="utf-8", errors="replace")[:6000])
        if sum(map(len, found)) > TEXT_CHARACTERS:
            break
    return found


def bits_per_byte(core: EngineCore, windows: list[list[int]]) -> float:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for index, window in enumerate(windows):
        core.submit(str(index), window, params, 0.0)
    bits, size = 0.0, 0
    while not core.idle:
        for delta in core.step():
            if delta.prompt_logprobs is not None:
                bits -= sum(delta.prompt_logprobs.logprobs) / math.log(2)
                size += len(core.tokenizer.decode(windows[int(delta.request_id)][1:]).encode())
    return bits / size


def quality(model: Model) -> dict[str, Any]:
    texts = held_out()
    tokens = [model.tokenizer.encode(text).ids for text in texts]
    windows = [ids[first : first + WINDOW] for ids in tokens for first in range(0, len(ids), WINDOW)]
    windows = [window for window in windows if len(window) > 16]
    whole = "".join(texts).encode()
    rows: dict[str, float] = {}
    cases = [(kv, stored) for kv in ("auto", *FORMS) for stored in ("auto", *weightcodes.FORMS)]
    for kv, stored in cases:
        name = f"weights {stored.replace('auto', 'float32')}, kv {kv.replace('auto', 'float32')}"
        rows[name] = bits_per_byte(model.engine(model.weights("float32", stored), kv), windows)
        print(f"  {name}: {rows[name]:.4f}", file=sys.stderr)
    large = model.with_large_keys()
    weights = large.weights("float32", "auto")
    for name, balanced in (("balanced", True), ("as they are", False)):
        core = large.engine(weights, "int4")
        if not balanced:
            arch = model.arch
            core.runner.decoder.balance(torch.ones((arch.layers, arch.kv_heads, arch.head_dim)))
        rows[f"large keys, kv int4, channels {name}"] = bits_per_byte(core, windows)
    rows["large keys, kv float32"] = bits_per_byte(large.engine(weights, "auto"), windows)
    plain = rows["weights float32, kv float32"]
    more = {
        kind: {form: rows[other.format(form)] - plain for form in ("int8", "int4")}
        for kind, other in (("kv", "weights float32, kv {}"), ("weights", "weights {}, kv float32"))
    }
    return {
        "parameters": model.arch.parameter_count,
        "windows": len(windows),
        "tokensPerWindow": WINDOW,
        "bitsPerByte": rounded(rows, 5),
        "xzBitsPerByte": round(8 * len(lzma.compress(whole, preset=9)) / len(whole), 3),
        "moreThanFloat": {kind: rounded(each, 5) for kind, each in more.items()},
        "aimsMet": {kv: more["kv"][kv] < KV_AIMS["bitsPerByteMoreThanFloat"][kv] for kv in FORMS},
    }


def key_errors(name: str, model: Model) -> dict[str, Any]:
    """Errors of keys in four bits, over four blocks of held-out text: per channel the root mean square over that of its
    numbers, and the mean over channels (queries may be large where keys are small)."""
    weights = model.weights("float32", "auto")
    core = model.engine(weights, "auto", deterministic=True)
    ids = model.tokenizer.encode("".join(held_out())).ids[: 4 * BLOCK_TOKENS]
    core.submit("text", ids, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), 0.0)
    core.step()
    (sequence,) = core.scheduler.running
    cache = core.runner.cache
    blocks = torch.tensor(sequence.blocks[:4])
    keys = torch.stack([cache.contents(layer, blocks)[:, 0] for layer in range(model.arch.layers)])
    # [layers, blocks, heads, slots, dim]
    peaks = key_peaks(core.runner.decoder, cache.shape, CPU, 512)[:, None, :, None]
    errors = {
        "per token and head": coded(keys) - keys,
        "per token and head, channels balanced": coded(keys / peaks) * peaks - keys,
        "per channel of a block of 64": coded(keys.transpose(-1, -2)).transpose(-1, -2) - keys,
    }

    def mean(error: torch.Tensor) -> float:
        sizes = (each.square().mean((1, 3)).sqrt() for each in (error, keys))
        wrong, right = sizes
        return round(float((wrong / right).mean()), 4)

    return {"model": name, "meanRelativeError": {way: mean(error) for way, error in errors.items()}}


def coded(numbers: torch.Tensor) -> torch.Tensor:
    """With a scale for each last dimension, and back."""
    flat = numbers.reshape(-1, numbers.shape[-1])
    return decode(*encode(flat, INT4), INT4, torch.float32).view(numbers.shape)


def speed(name: str, model: Model, repeats: int) -> list[dict[str, Any]]:
    made: dict[tuple[str, str], Weights] = {}
    cores: dict[str, EngineCore] = {}
    for side, (dtype, stored, kv) in SIDES.items():
        if (dtype, stored) not in made:
            made[dtype, stored] = model.weights(dtype, stored)
        cores[side] = model.engine(made[dtype, stored], kv)
    serve(model, cores, 1)
    seconds: dict[int, dict[str, list[float]]] = {batch: {side: [] for side in SIDES} for batch in BATCHES}
    for _ in range(repeats):
        for batch in BATCHES:
            for side, spent in serve(model, cores, batch).items():
                seconds[batch][side].append(spent)
    return [speed_row(name, batch, each) for batch, each in seconds.items()]


def serve(model: Model, cores: Mapping[str, EngineCore], batch: int) -> dict[str, float]:
    """CPU seconds of the same requests on all sides, a step of each in turn."""
    rng = random.Random(batch)
    prompts = [random_prompt(rng.randrange(32, 257), model.arch.vocab_size, i) for i in range(batch)]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for core in cores.values():
        for index, prompt in enumerate(prompts):
            core.submit(str(index), prompt, params, time.process_time())
    spent = dict.fromkeys(cores, 0.0)
    order = list(cores)
    while any(not core.idle for core in cores.values()):
        order.append(order.pop(0))
        for side in order:
            if not cores[side].idle:
                began = time.process_time()
                cores[side].step()
                spent[side] += time.process_time() - began
    return spent


def speed_row(name: str, batch: int, seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    rate = {side: batch * NEW_TOKENS / statistics.median(each) for side, each in seconds.items()}
    best = max(FLOATS, key=lambda side: rate[side])
    over = {side: rate[side] / rate[best] for side in rate}
    print(f"{name} batch {batch:2}: {rounded(rate, 1)}, best float {best}", file=sys.stderr)
    return {
        "model": name,
        "batch": batch,
        "bestFloat": best,
        "tokensPerCpuSecond": rounded(rate, 1),
        "overBestFloat": rounded(over, 3),
        "overFloat32": rounded({side: rate[side] / rate["float32"] for side in rate}, 3),
        "aim": SPEED_AIM if batch == 16 else None,
        "aimMet": over["weights int8"] >= SPEED_AIM if batch == 16 else None,
        "cpuSeconds": {side: [round(one, 3) for one in each] for side, each in seconds.items()},
    }


def rounded(numbers: Mapping[str, float], places: int) -> dict[str, float]:
    return {name: round(number, places) for name, number in numbers.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="The demo's model, trained before.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        demo = Model.demo(arguments.model or train(Path(scratch) / "model"))
    both = {"demo": demo, "33.6 M": Model.random()}
    result = {
        "benchmark": "serving_quantised",
        "command": " ".join(["python", "benchmarks/serving_quantised.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{'with' if torch.cpu._is_amx_tile_supported() else 'without'} matrix units for bfloat16 and int8, 1 thread, "
        "shared",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "aims": {"kv": KV_AIMS, "layerBytesOverNominal": LAYER_AIM, "weightsInt8OverBestFloat": SPEED_AIM},
        "bytes": [bytes_of(name, model) for name, model in both.items()],
        "requestsAtOnce": [requests_at_once(name, model) for name, model in both.items()],
        "quality": quality(demo),
        "keys": [
            key_errors(name, each) for name, each in (("demo", demo), ("large keys", demo.with_large_keys()))
        ],
        "speed": [row for name, model in both.items() for row in speed(name, model, arguments.repeats)],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
