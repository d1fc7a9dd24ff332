"""Four adapters of one model in one job beside a job for each: peak memory, CPU seconds, and whether the bits are equal.

    python benchmarks/training_adapters.py --output benchmarks/results/training_adapters.json

The base is a random Llama of 33.6 M parameters (8 layers, width 512), saved in float32. Four adapters of rank 16 have texts of
their own, lengths and seeds. All run as `busbar train` in processes of their own, on one thread. The peak is the kernel's
(ru_maxrss) of each whole process. Jobs of one adapter each run one after another here, too; their memory is added up, as four
that run at the same time would need it. What any process with torch takes before it has a model is printed beside it, and the
ratio without it, too: on a GPU machine with a large model it vanishes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from rich.progress import Progress

BAR = 0.59
"""Of the memory of four jobs: 41 % less."""
COUNT = 4
CONFIG: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
NOTHING = "import torch, transformers, peft.tuners.lora; import transformers.models.llama.modeling_llama"


def prepare(claims: Path) -> None:
    """The base with its tokenizer, and four texts."""
    from busbar.workloads.training.tokenizer import end_of_text_id, train_tokenizer

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    for number in range(COUNT):
        folder = claims / f"text-{number}"
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("".join(texts[number::COUNT])[:400_000])
    tokenizer = train_tokenizer(texts[:40], 4096)
    fast: Any = transformers.PreTrainedTokenizerFast
    end = tokenizer.id_to_token(end_of_text_id(tokenizer))
    fast(tokenizer_object=tokenizer, bos_token=end, eos_token=end).save_pretrained(claims / "base")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=tokenizer.get_vocab_size(), **CONFIG)
    transformers.LlamaForCausalLM(config).save_pretrained(claims / "base")


def entries(steps: int) -> list[dict[str, Any]]:
    return [
        {
            "name": f"adapter-{number}",
            "rank": 16,
            "steps": steps + number,
            "seed": number,
            "data": {"uri": f"pvc://text-{number}", "sequenceLength": 128},
        }
        for number in range(COUNT)
    ]


def job(of: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    """A TrainingJob for one of the adapters; None: for all."""
    engine: dict[str, Any] = {
        "model": {"uri": "pvc://base"},
        "data": {"uri": "pvc://text-0", "sequenceLength": 128},
        "steps": steps,
        "batch": {"sequences": 4, "microBatch": 2},
        "threads": 1,
    }
    if of is None:
        engine["adapters"] = entries(steps)
    else:
        own = {name: of[name] for name in ("steps", "seed", "data")}
        engine |= {**own, "adapter": {"rank": of["rank"]}}
    return {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "adapters"},
        "spec": {"engine": engine, "output": {"uri": "pvc://out/model"}},
    }


def measured(command: list[str], folder: Path) -> dict[str, float]:
    """Peak bytes and CPU seconds of a process, by the kernel."""
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, code, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said.decode()[-2000:]}")
    return {
        "peak_mib": round(used.ru_maxrss / 1024, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "wall_s": round(time.monotonic() - began, 2),
    }


def trained(of: dict[str, Any] | None, steps: int, claims: Path, out: Path) -> dict[str, Any]:
    out.mkdir()
    (out / "job.yaml").write_text(yaml.safe_dump(job(of, steps)))
    command = [sys.executable, "-m", "busbar.cli.main", "train", "job.yaml", "--plain"]
    found: dict[str, Any] = measured([*command, "--claims", str(claims), "--output", str(out / "model")], out)
    names = [each["name"] for each in entries(steps)] if of is None else [""]
    found["weights"] = {
        name or (of or {})["name"]: hashlib.sha256(
            (out / "model" / name / "adapter_model.safetensors").read_bytes()
        ).hexdigest()
        for name in names
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Progress() as progress:
        task = progress.add_task("runs", total=COUNT + 2)
        folder = Path(name)
        prepare(folder / "claims")
        nothing = measured([sys.executable, "-c", NOTHING], folder)
        progress.advance(task)
        together = trained(None, given.steps, folder / "claims", folder / "together")
        progress.advance(task)
        alone = []
        for each in entries(given.steps):
            alone.append(trained(each, given.steps, folder / "claims", folder / each["name"]))
            progress.advance(task)
    whole = sum(each["peak_mib"] for each in alone)
    own = whole - COUNT * nothing["peak_mib"]
    ratio = together["peak_mib"] / whole
    equal = together["weights"] == {name: sha for each in alone for name, sha in each["weights"].items()}
    result = {
        "command": " ".join(["python", "benchmarks/training_adapters.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        "adapters": COUNT,
        "steps": given.steps,
        "one_job": {name: value for name, value in together.items() if name != "weights"},
        "four_jobs": [{name: value for name, value in each.items() if name != "weights"} for each in alone],
        "process_without_model_mib": nothing["peak_mib"],
        "memory_over_four_jobs": round(ratio, 3),
        "the_same_without_what_each_process_takes": round(
            (together["peak_mib"] - nothing["peak_mib"]) / own, 3
        ),
        "cpu_over_four_jobs": round(together["cpu_s"] / sum(each["cpu_s"] for each in alone), 3),
        "equal_bits": equal,
        "bars": {"memory_over_four_jobs": {"at_most": BAR, "met": ratio <= BAR}},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n")
    if not equal:
        raise SystemExit("an adapter differs from the one of its job alone")


if __name__ == "__main__":
    main()
