"""vLLM as a peer in the same run: a process of its own environment that computes a batch whenever it is told to.

    with VllmPeer(python, model_folder, prompts, count) as peer:
        tokens, cpu_s = peer.run()

The other half of this file runs there: it imports nothing of ours, reads the batch from its first line, and answers each
further line with the tokens and the CPU seconds of its process tree (vLLM may compute in a worker process).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

Tokens = list[list[int]]


class VllmPeer:
    """One thread, float32, greedy, whole outputs."""

    def __init__(self, python: Path, model: Path, prompts: Tokens, count: int, *, eager: bool) -> None:
        environment = {
            **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0",
            "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        told = self._ask({"model": str(model), "prompts": prompts, "count": count, "eager": eager})
        self.version = str(told["version"])

    def run(self) -> tuple[Tokens, float]:
        """The tokens of each prompt, and the CPU seconds that they took."""
        told = self._ask({})
        return told["tokens"], told["cpuSeconds"]

    def _ask(self, line: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith("{"):  # vLLM prints there, too
                found: dict[str, Any] = json.loads(answer)
                return found
        raise RuntimeError("vLLM has ended; its errors are above")

    def __enter__(self) -> VllmPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _tree_cpu_s(root: int) -> float:
    """User and system seconds of a process and of those below it."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
    inside = {root}
    while more := {pid for pid, parent in parents.items() if parent in inside} - inside:
        inside |= more
    return sum(ticks.get(pid, 0) for pid in inside) / os.sysconf("SC_CLK_TCK")


def _serve() -> None:
    import vllm  # type: ignore[import-not-found,unused-ignore]

    told = json.loads(sys.stdin.readline())
    model = vllm.LLM(
        told["model"], dtype="float32", enforce_eager=told["eager"], skip_tokenizer_init=True,
        max_model_len=2048, enable_prefix_caching=False, max_num_seqs=len(told["prompts"]),
    )  # fmt: skip
    params = vllm.SamplingParams(temperature=0.0, max_tokens=told["count"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in told["prompts"]]
    print(json.dumps({"version": vllm.__version__}), flush=True)
    for _ in sys.stdin:
        began = _tree_cpu_s(os.getpid())
        outputs = model.generate(prompts, params, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"tokens": tokens, "cpuSeconds": _tree_cpu_s(os.getpid()) - began}), flush=True)


if __name__ == "__main__":
    _serve()
