"""`busbar serve DIR`: the engine on this machine, without Kubernetes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from busbar.workloads.serving.errors import ServingError
    from busbar.workloads.serving.loader import Loaded
    from busbar.workloads.serving.probe import Trial
    from busbar.workloads.serving.settings import ServerSettings
    from busbar.workloads.serving.supervisor import Told

EXAMPLES = """
\b
Examples:
  busbar serve ./model
  busbar serve ./model --port 8001 --model-id my-model
  busbar serve ./model --kv-memory 2Gi --max-model-len 4096 --max-running 16
  busbar serve ./model --adapter support=./support-lora --adapter sql=./sql-lora
  BUSBAR_TOKEN=secret busbar serve ./model --host 0.0.0.0
\b
Then:
  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{"model": "model", "prompt": "def ", "max_tokens": 32}'
"""


@click.command(epilog=EXAMPLES)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port to listen on."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--model-id", help="Name clients ask for.  [default: the folder's name]")
@click.option(
    "--role",
    type=click.Choice(["both", "prefill", "decode"]),
    default="both",
    show_default=True,
    help="prefill: behind a gateway, compute prompts and hand each stream to a replica of another role at its first token. "
    "decode: take them. Alone, and where no other takes a stream, every role computes whole answers.",
)
@click.option(
    "--kv-memory", help="Memory for the KV cache, as 256Mi or 2Gi.  [default: 256Mi; GPU: 85 % of free]"
)
@click.option(
    "--host-kv-memory",
    help="Host memory for KV blocks that the KV cache has no room for: preempted requests and idle conversations are "
    "swapped there instead of being computed again.  [default: none]",
)
@click.option(
    "--kv-quota",
    "kv_quotas",
    metavar="TENANT=GUARANTEED:MOST",
    multiple=True,
    help="A tenant's guaranteed and largest part of the KV cache in percent, as research=25:50. May be repeated.",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(1),
    help="Longest prompt plus output in tokens.  [default: the model's]",
)
@click.option(
    "--max-running", type=click.IntRange(1), default=64, show_default=True, help="Requests computed together."
)
@click.option(
    "--max-batched-tokens",
    type=click.IntRange(1),
    help="Tokens per step; longer prompts are split.  [default: 512; --weights stream: up to 2048]",
)
@click.option(
    "--block-tokens", type=int, default=64, show_default=True, help="Tokens per KV block (a power of two)."
)
@click.option(
    "--max-waiting",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Requests that may wait; more get 503.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="How long running requests may go on after SIGTERM.",
)
@click.option(
    "--stall-seconds",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    help="A step that takes longer makes /health fail.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "fastest"]),
    default="auto",
    show_default=True,
    help="Of the weights. auto: float32 on a CPU, the checkpoint's on a GPU. fastest: bfloat16 on a CPU that multiplies it "
    "faster, which is tried at the start.",
)
@click.option(
    "--weights",
    type=click.Choice(["resident", "stream", "auto"]),
    default="resident",
    show_default=True,
    help="stream: layers that do not fit into memory are read from a file (GPU: from host memory) in every step. auto: "
    "stream where they do not fit.",
)
@click.option(
    "--memory",
    help="Memory for weights, KV cache and work space.  [default: what is free on the device]",
)
@click.option(
    "--stream-dir",
    type=click.Path(path_type=Path),
    help="Folder for the file that layers are streamed from; it has the size of the weights.  [default: busbar-layers-UID in "
    "the folder for temporary files]",
)
@click.option(
    "--stream-depth",
    type=click.IntRange(0, 7),
    help="Streamed layers that are read ahead.  [default: 1, more if they are small]  Of single experts: 0 reads none ahead.",
)
@click.option(
    "--stream-unit",
    type=click.Choice(["auto", "layers", "experts"]),
    default="auto",
    show_default=True,
    help="What is read at a time. auto: single experts where the model has them and the rest of its layers fits.",
)
@click.option(
    "--keep-weights",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Start the server again when it crashes, from weights that outlive it in this folder, ready to compute with; one in "
    "memory, as /dev/shm/NAME. It has the size of the weights: on a CPU it is what they take, on a GPU a copy in host memory. "
    " [default: none]",
)
@click.option(
    "--weights-dtype",
    type=click.Choice(["auto", "int8", "int4"]),
    default="auto",
    show_default=True,
    help="Keep the layers' matrices in 8 or 4 bits; made while the model loads. auto: as --dtype.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "int8", "int4"]),
    default="auto",
    show_default=True,
    help="Keep keys and values in 8 or 4 bits, so that the KV memory holds more tokens. auto: in float.",
)
@click.option(
    "--prefix-cache/--no-prefix-cache",
    default=True,
    show_default=True,
    help="Prompts that begin alike share the beginning's KV blocks.",
)
@click.option(
    "--speculate",
    metavar="N",
    type=click.IntRange(0, 16),
    default=0,
    show_default=True,
    help="Guess up to N next tokens from the request's own text (and by --draft) and check them in one step; 0: off.",
)
@click.option(
    "--draft",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="A small model with the same tokenizer that guesses tokens for --speculate where a request's own text says nothing.  "
    "[default: none]",
)
@click.option(
    "--tpot-ms",
    type=click.FloatRange(0, min_open=True),
    help="Time per token to keep: sizes the pieces of prompts.  [default: none]",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="On a CPU: a request's output is bit for bit the same in any company, at a lower speed.",
)
@click.option(
    "--adapter",
    "adapters",
    metavar="NAME=DIR",
    multiple=True,
    help="A LoRA adapter that PEFT has saved; requests ask for MODEL:NAME. May be repeated.",
)
@click.option(
    "--adapter-memory",
    default="1Gi",
    show_default=True,
    help="Memory for adapters; those used least recently are read again when they are asked for.",
)
@click.option(
    "--adapter-root",
    type=click.Path(path_type=Path),
    help="Adapters below this folder may be loaded over HTTP.  [default: none]",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: all this process may use]")
@click.option(
    "--token",
    envvar="BUSBAR_TOKEN",
    help="Bearer that clients must send (or BUSBAR_TOKEN).  [default: none, open]",
)
def serve(
    directory: Path,
    port: int,
    host: str,
    model_id: str | None,
    role: str,
    kv_memory: str | None,
    host_kv_memory: str | None,
    kv_quotas: tuple[str, ...],
    max_model_len: int | None,
    max_running: int,
    max_batched_tokens: int | None,
    block_tokens: int,
    max_waiting: int,
    drain_seconds: float,
    stall_seconds: float,
    device: str,
    dtype: str,
    weights: str,
    memory: str | None,
    stream_dir: Path | None,
    stream_depth: int | None,
    stream_unit: str,
    keep_weights: Path | None,
    weights_dtype: str,
    kv_dtype: str,
    prefix_cache: bool,
    speculate: int,
    draft: Path | None,
    tpot_ms: float | None,
    deterministic: bool,
    adapters: tuple[str, ...],
    adapter_memory: str,
    adapter_root: Path | None,
    threads: int | None,
    token: str | None,
) -> None:
    """Serve the model in DIR over the OpenAI API.

    DIR holds what transformers' save_pretrained writes: config.json, *.safetensors, tokenizer.json.
    Llama, Mistral, Qwen2 and Qwen3 models are served, on a CPU or a GPU. Ctrl-C drains and stops.
    """
    from busbar.kube.contracts.bearers import one_for_all
    from busbar.kube.contracts.workload import ReplicaRole
    from busbar.workloads.serving.errors import ServingError
    from busbar.workloads.serving.settings import (
        EngineSettings,
        ServerSettings,
        parse_adapter,
        parse_bytes,
        parse_quota,
    )

    try:
        own_quotas = tuple(map(parse_quota, kv_quotas))
        settings = ServerSettings(
            engine=EngineSettings(
                model_dir=directory,
                kv_bytes=None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"),
                host_kv_bytes=0
                if host_kv_memory is None
                else parse_bytes(host_kv_memory, "--host-kv-memory"),
                kv_quotas=own_quotas,
                max_model_len=max_model_len,
                max_running=max_running,
                max_batched_tokens=max_batched_tokens,
                block_tokens=block_tokens,
                device=device,
                dtype=dtype,
                weights=weights,
                memory_bytes=None if memory is None else parse_bytes(memory, "--memory"),
                stream_dir=stream_dir,
                stream_depth=stream_depth,
                stream_unit=stream_unit,
                keep_dir=keep_weights,
                weights_dtype=weights_dtype,
                kv_dtype=kv_dtype,
                prefix_cache=prefix_cache,
                speculate=speculate,
                draft_dir=draft,
                tpot_ms=tpot_ms,
                deterministic=deterministic,
                threads=threads,
                adapters=tuple(map(parse_adapter, adapters)),
                adapter_bytes=parse_bytes(adapter_memory, "--adapter-memory"),
                adapter_root=adapter_root,
            ),
            fixed_kv_quotas=own_quotas,
            model_id=model_id or directory.resolve().name,
            role=ReplicaRole(role),
            host=host,
            port=port,
            bearers=None if token is None else one_for_all(token),
            drain_s=drain_seconds,
            stall_s=stall_seconds,
            max_waiting=max_waiting,
        )
    except ServingError as error:
        sys.exit(_failed(error))
    from busbar.kube import logs
    from busbar.workloads.serving.supervisor import supervised

    logs.set_up("text")
    if token is None and host not in ("127.0.0.1", "::1", "localhost"):
        click.echo(f"Anyone who reaches {host}:{port} may use this model: no --token is set.", err=True)
    sys.exit(supervised(settings, _serve))


def _serve(settings: ServerSettings, told: Told) -> int:
    from busbar.workloads.serving import process
    from busbar.workloads.serving.errors import ServingError

    try:
        return process.serve(settings, lambda loaded: _announce(settings, loaded, told))
    except ServingError as error:
        told.ends_for(str(error))
        return _failed(error)


def _failed(error: ServingError) -> int:
    click.echo(f"Error: {error}", err=True)
    return error.exit_status


def _announce(settings: ServerSettings, loaded: Loaded, told: Told) -> None:
    told.serves()
    core = loaded.core
    pool, shape = core.scheduler.pool, core.runner.cache.shape
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    click.echo(
        f"Serving {settings.model_id!r} at http://{host}:{settings.port}/v1 "
        f"({loaded.arch.family}, {loaded.arch.parameter_count / 1e6:.1f} M parameters, {loaded.device.type})\n"
        f"  weights: {loaded.weights_stored}, {loaded.weight_bytes / 2**20:.0f} MiB{_tried(loaded.products)}\n"
        f"{'' if loaded.streaming is None else f'  streamed: {loaded.streaming.text}' + chr(10)}"
        f"  KV cache: {pool.total} blocks of {shape.block_tokens} tokens in {shape.stored}, "
        f"{loaded.kv_bytes / 2**20:.0f} MiB; context up to {core.max_model_len} tokens\n"
        f"  host KV tier: {pool.host.total} blocks\n"
        f"{_draft_line(loaded)}"
        f"  attention: {loaded.attention}{_tried(loaded.trials)}\n"
        f"  greedy output independent of the batch: "
        f"{'yes' if loaded.batch_invariant else 'no, on this machine' if core.runner.decoder.fixed_order else 'not promised (--deterministic)'}; loaded in {loaded.load_s:.1f} s",
        err=True,
    )


def _tried(trials: Sequence[Trial]) -> str:
    return f" (tried: {'; '.join(map(str, trials))})" if trials else ""


def _draft_line(loaded: Loaded) -> str:
    if (draft := loaded.draft) is None:
        return ""
    return (
        f"  draft: {draft.parameters / 1e6:.1f} M parameters, {draft.weight_bytes / 2**20:.0f} MiB, and "
        f"{draft.kv_bytes / 2**20:.0f} MiB of KV cache\n"
    )
