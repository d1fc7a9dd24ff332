"""The demo: train a language model on a real Kubernetes, kill it half way, serve it, scale it, tell the story.

``make demo`` runs this file.  It uses what a user has: ``kubectl``, the ``busbar`` command and HTTP (the
ordinary ``openai`` client for completions).  Steps:

1. ``busbar up``: the one-machine cluster, or with ``--cluster current`` the charts on your own.
2. Two training jobs from ``train-python-stdlib.yaml``: the one we kill with SIGKILL half way, and an
   uninterrupted twin.  At the end both have the same fingerprint of losses and weights, bit for bit.
3. ``serve-python-stdlib.yaml``: completions streamed through the gateway while the service is scaled
   1 → 2 → 0; a request at 0 wakes it.  Not one request may fail.
4. On the one-machine cluster: two simulated servers on a feed that does not carry both at full power (power-feed.yaml).
   The second of two jobs starts at once with its boards limited, and is lifted without a restart when the first ends.
5. The story with its numbers, the portal's address, a login and three commands to try.

Exit code 0 only when every claim of the story was checked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from examples.demo_parts import NAMESPACE, Cluster, DemoError, Teller
from examples.demo_power import share_a_feed

HERE = Path(__file__).resolve().parent
BUSBAR = [sys.executable, "-m", "busbar.cli.main"]
JOB = "python-stdlib"
TWIN = "python-stdlib-uninterrupted"
SERVICE = "python-stdlib"
KILL_AT = 0.5
PROMPTS = (
    "def read(self, size=-1):\n",
    "import os\n\n\ndef ",
    "class Error(Exception):\n    ",
    "    return self.",
)


def run_busbar(*arguments: str) -> None:
    """Run a ``busbar`` command with its own output on our terminal."""
    if subprocess.run([*BUSBAR, *arguments]).returncode:
        raise DemoError(f"busbar {' '.join(arguments)} failed; its own lines above say why")


def bring_up(which: str, registry: str | None, name: str) -> Cluster:
    """Start the one-machine cluster, or install the charts on the cluster KUBECONFIG names."""
    if which == "current":
        if not registry:
            raise DemoError("--cluster current needs --registry: where your cluster pulls images from")
        run_busbar("up", "--current", "--registry", registry)
        program = [sys.executable, "-m", "busbar.local.build", "kubectl"]
        kubectl = subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()[-1]
        return forward_ports(Cluster(kubectl, None, "http://127.0.0.1:18080", "http://127.0.0.1:18081"))
    run_busbar("up", "--name", name)
    done = subprocess.run([*BUSBAR, "status", "--name", name, "-o", "json"], capture_output=True, text=True)
    if done.returncode:
        raise DemoError(f"busbar status: {done.stderr.strip()}")
    facts = json.loads(done.stdout)
    return Cluster(facts["kubectl"], facts["kubeconfig"], facts["portalUrl"], facts["gatewayUrl"])


def forward_ports(cluster: Cluster) -> Cluster:
    """On a cluster of your own, reach the portal and the gateway through kubectl port-forward."""
    for service, port in (("busbar-api", 18080), ("busbar-gateway", 18081)):
        command = [
            cluster.kubectl,
            "-n",
            "busbar-system",
            "port-forward",
            f"service/{service}",
            f"{port}:8080",
        ]
        cluster.forwards.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    time.sleep(3)
    return cluster


def apply_training(cluster: Cluster) -> None:
    """Apply the example as it stands, and its twin that nobody interrupts."""
    manifest = (HERE / "train-python-stdlib.yaml").read_text()
    cluster.kube("-n", NAMESPACE, "delete", "trainingjob", JOB, TWIN, "--ignore-not-found", "--wait=true")
    objects = [o for o in yaml.safe_load_all(manifest) if o]
    job = next(o for o in objects if o["kind"] == "TrainingJob")
    twin = json.loads(json.dumps(job))
    twin["metadata"]["name"] = TWIN
    twin["spec"]["output"]["uri"] = job["spec"]["output"]["uri"] + "-uninterrupted"
    cluster.kube("-n", NAMESPACE, "apply", "-f", str(HERE / "train-python-stdlib.yaml"))
    cluster.kube("-n", NAMESPACE, "apply", "-f", "-", stdin=json.dumps(twin))


def kill_trainer(cluster: Cluster, status: dict[str, Any]) -> str:
    """SIGKILL the training process inside its pod; returns the pod's name."""
    pod = f"{JOB}-{status['attempt']}-0"
    code = (
        "import os,signal,pathlib\n"
        "for p in pathlib.Path('/proc').iterdir():\n"
        "  if p.name.isdigit() and p.name != '1' and int(p.name) != os.getpid():\n"
        "    c = (p/'cmdline').read_bytes()\n"
        "    if b'busbar.workloads.training' in c: os.kill(int(p.name), signal.SIGKILL)\n"
    )
    try:
        cluster.kube("-n", NAMESPACE, "exec", pod, "--", "python", "-c", code)
    except DemoError as error:
        if "137" not in str(error):
            raise
    return pod


def describe(status: dict[str, Any]) -> str:
    """One line about a job, as ``kubectl get`` shows it."""
    progress = status.get("progress") or {}
    if not progress.get("step"):
        return f"{status.get('phase', 'Pending')}: {status.get('message', '')}"
    said = [
        ("loss {:.3f}", progress.get("loss")),
        ("{:.0f} tokens/s", progress.get("tokensPerSecond")),
        ("ETA {:.0f} s", progress.get("etaSeconds")),
        ("checkpoint at step {}", (status.get("checkpoint") or {}).get("step")),
    ]
    first = f"{status.get('phase')} step {progress['step']}/{progress.get('totalSteps', '?')}"
    return " · ".join([first, *(text.format(value) for text, value in said if value is not None)])


def train(cluster: Cluster, teller: Teller, limit_s: float) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Train both, kill one half way; returns both final statuses and the step of the kill."""
    deadline = time.monotonic() + limit_s
    killed_at = 0
    statuses: dict[str, dict[str, Any]] = {}
    while time.monotonic() < deadline:
        for name in (JOB, TWIN):
            statuses[name] = cluster.status("trainingjob", name)
            if statuses[name].get("phase") == "Failed":
                raise DemoError(f"{name} failed: {statuses[name].get('message')}")
        if all(s.get("phase") == "Succeeded" for s in statuses.values()):
            return statuses[JOB], statuses[TWIN], killed_at
        progress = statuses[JOB].get("progress") or {}
        done = (progress.get("step") or 0) / (progress.get("totalSteps") or 1)
        if not killed_at and done >= KILL_AT and statuses[JOB].get("phase") == "Running":
            pod = kill_trainer(cluster, statuses[JOB])
            killed_at = int(progress["step"])
            teller.say(f"half way: SIGKILL to the trainer in pod {pod} at step {killed_at}")
        teller.tick(describe(statuses[JOB]))
        time.sleep(2)
    raise DemoError(
        f"training did not end within {limit_s:.0f} s: {describe(statuses[JOB])} / {describe(statuses[TWIN])}"
    )


def check_training(job: dict[str, Any], twin: dict[str, Any], killed_at: int, teller: Teller) -> None:
    """Hold the claims about training against both statuses."""
    if not killed_at or job.get("restarts", 0) < 1:
        raise DemoError("the trainer was never killed, so nothing was shown about resuming")
    if not job.get("fingerprint") or job["fingerprint"] != twin.get("fingerprint"):
        raise DemoError(f"fingerprints differ: {job.get('fingerprint')} and {twin.get('fingerprint')}")
    evaluation = job["evaluation"]
    ours, bigram, ngram = (evaluation[k] for k in ("bitsPerByte", "bigramBitsPerByte", "ngramBitsPerByte"))
    if not ours < min(bigram, ngram):
        raise DemoError(
            f"the model ({ours:.3f} bits per byte) does not beat bigram {bigram:.3f} and n-gram {ngram:.3f}"
        )
    teller.say(
        f"resumed from its checkpoint: {job['lostWork']['steps']} steps computed twice; "
        "losses and final weights equal the uninterrupted run's, bit for bit"
    )
    teller.say(
        f"bits per byte on held-out files: model {ours:.3f}, bigram {bigram:.3f}, order-3 n-gram {ngram:.3f}"
    )


@dataclass
class Traffic:
    """Streams completions from several threads until told to stop; counts what came back."""

    base_url: str
    token: str
    model: str
    finished: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self) -> Any:
        """The ordinary OpenAI client, without its own retries: a failure must be seen."""
        import openai

        return openai.OpenAI(base_url=f"{self.base_url}/v1", api_key=self.token, max_retries=0, timeout=240)

    def complete(self, prompt: str, max_tokens: int = 40) -> str:
        """One streamed completion; returns its text."""
        stream = self.client().completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0.7,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        text = ""
        for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].text
            if chunk.usage:
                with self._lock:
                    self.tokens += chunk.usage.completion_tokens
        with self._lock:
            self.finished += 1
        return text

    def start(self, workers: int) -> None:
        """Begin the load."""
        for index in range(workers):
            thread = threading.Thread(target=self._loop, args=(index,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _loop(self, index: int) -> None:
        while not self._stop.is_set():
            try:
                self.complete(PROMPTS[index % len(PROMPTS)])
            except Exception as error:
                with self._lock:
                    self.failures.append(f"{type(error).__name__}: {error}")
            self._stop.wait(0.2)

    def stop(self) -> None:
        """End the load and wait for the requests under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=300)


def wait_service(cluster: Cluster, teller: Teller, want: str, ready: int, limit_s: float) -> None:
    """Wait until the service has ``ready`` replicas and no others."""
    deadline = time.monotonic() + limit_s
    status: dict[str, Any] = {}
    while time.monotonic() < deadline:
        status = cluster.status("modelservice", SERVICE)
        if status.get("readyReplicas", 0) == ready and status.get("replicas", 0) == ready:
            return
        teller.tick(
            f"service: {status.get('phase')} {status.get('readyReplicas', 0)}/{ready} ready · {status.get('message', '')}"
        )
        time.sleep(1)
    raise DemoError(
        f"the service did not come to {want} within {limit_s:.0f} s: {status.get('phase')}: {status.get('message')}"
    )


def serve(cluster: Cluster, teller: Teller, token: str) -> Traffic:
    """Serve the trained model, scale it under load, let it sleep and wake it."""
    cluster.kube("-n", NAMESPACE, "apply", "-f", str(HERE / "serve-python-stdlib.yaml"))
    scale(cluster, 1)
    wait_service(cluster, teller, "one ready replica", 1, 180)
    traffic = Traffic(cluster.gateway_url, token, SERVICE)
    sample = traffic.complete(PROMPTS[0], 60)
    teller.say(f"first streamed completion: {PROMPTS[0]!r} → {sample[:70]!r}")
    traffic.start(workers=3)
    scale(cluster, 2)
    wait_service(cluster, teller, "2 replicas", 2, 180)
    teller.say(f"scaled to 2 under load: {traffic.finished} requests done, {len(traffic.failures)} failed")
    scale(cluster, 0)
    traffic.stop()
    teller.say("scaled to 0 while requests ran: the replicas finish what they began …")
    wait_service(cluster, teller, "zero", 0, 180)
    started = time.monotonic()
    traffic.complete(PROMPTS[1])
    teller.say(
        f"a request at zero woke the service and was answered after {time.monotonic() - started:.1f} s"
    )
    if traffic.failures:
        raise DemoError(
            f"{len(traffic.failures)} of {traffic.finished} requests failed: {traffic.failures[0]}"
        )
    return traffic


def scale(cluster: Cluster, replicas: int) -> None:
    """What a person would type."""
    cluster.kube("-n", NAMESPACE, "scale", "modelservice", SERVICE, f"--replicas={replicas}")


def make_token(cluster: Cluster, scopes: str, subject: str, role: str) -> str:
    """A token for a person, made by the platform's administrator; shown once."""
    command = ["exec", "deploy/busbar-api", "--", "busbar-api", "token", "create"]
    return cluster.kube(
        "-n",
        "busbar-system",
        *command,
        "--subject",
        subject,
        "--role",
        role,
        "--scopes",
        scopes,
        "--tenant",
        "demo",
    ).strip()


def story(
    cluster: Cluster,
    teller: Teller,
    job: dict[str, Any],
    killed_at: int,
    traffic: Traffic,
    login: str,
    power: str,
) -> None:
    """Tell what happened."""
    evaluation, usage = job["evaluation"], job.get("usage") or {}
    last, portal = ".venv/bin/busbar status", cluster.portal_url
    if cluster.forwards:  # they end with this program
        last = "kubectl -n busbar-system port-forward service/busbar-api 18080:8080"
        portal += " (after the last command below)"
    kube = f"kubectl --kubeconfig {cluster.kubeconfig}" if cluster.kubeconfig else "kubectl"
    print(
        f"""
What happened
  A model was trained on the Python standard library's source in pods of a real Kubernetes
  ({job["progress"]["totalSteps"]} steps, optimizer state offloaded, mode {(job.get("admission") or {}).get("mode")}).
  Its trainer was killed with SIGKILL at step {killed_at}; it resumed from a checkpoint, computed
  {job["lostWork"]["steps"]} steps twice, and ended with the same losses and weights as a run nobody touched.
  Bits per byte on files it never saw: {evaluation["bitsPerByte"]:.3f}; a bigram needs {evaluation["bigramBitsPerByte"]:.3f}, an order-3 n-gram {evaluation["ngramBitsPerByte"]:.3f}.
  It used {usage.get("acceleratorSeconds", 0):.0f} accelerator-seconds.
  Served over the OpenAI API while scaled 1 → 2 → 0 → 1: {traffic.finished} requests, {traffic.tokens} tokens, {len(traffic.failures)} failures.
  {power}
  All of it took {teller.elapsed()} after the set-up.

Portal   {portal}
Login    {login}
         (a token for the user demo-user; it is shown only here)

Try next
  {kube} -n {NAMESPACE} get trainingjobs,modelservices -w
  {kube} get acceleratorpools,tenants
  {last}
"""
    )


def main() -> int:
    """Entry point; 0 when every claim held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--cluster",
        choices=["local", "current"],
        default="local",
        help="this machine, or the one KUBECONFIG names",
    )
    parser.add_argument("--registry", help="with --cluster current: where images are pushed and pulled")
    parser.add_argument("--name", default="busbar", help="instance name of the one-machine cluster")
    parser.add_argument(
        "--train-limit", type=float, default=1500, metavar="SECONDS", help="give up training after this"
    )
    arguments = parser.parse_args()
    cluster: Cluster | None = None
    try:
        cluster = bring_up(arguments.cluster, arguments.registry, arguments.name)
        teller = Teller()
        teller.say("set-up done; training begins")
        apply_training(cluster)
        job, twin, killed_at = train(cluster, teller, arguments.train_limit)
        check_training(job, twin, killed_at, teller)
        login = make_token(cluster, "rest,inference", "demo-user", "user")
        traffic = serve(cluster, teller, login)
        power = "Power was left out: on a cluster of your own no power is simulated."
        if arguments.cluster == "local":
            power = share_a_feed(cluster, teller)
        story(cluster, teller, job, killed_at, traffic, login, power)
    except DemoError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        print("demo: `.venv/bin/busbar status` says what runs and where the logs are", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped; the cluster goes on, `busbar down` ends it", file=sys.stderr)
        return 130
    finally:
        if cluster is not None:
            cluster.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
