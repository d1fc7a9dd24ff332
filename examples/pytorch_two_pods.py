"""A plain PyTorch training script over several processes. It knows nothing of Busbar.

Busbar gives each pod what `torchrun` would give each process: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. The
script learns y = sin(x) by data parallelism over gloo. It keeps a checkpoint in OUT, and resumes from it.
SIGTERM (a preemption, or the end of the node) makes all ranks save after the same step and exit with 143, which
tells Busbar that the work is saved. Two processes on one machine:

    for rank in 0 1; do
      RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 OUT=/tmp/out python pytorch_two_pods.py &
    done; wait
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", "300"))
OUT = Path(os.environ.get("OUT", "/tmp/out"))
stopping = False


def stop(signum: int, frame: object) -> None:
    global stopping
    stopping = True


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of step `step`: the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.rand(64, 1, generator=generator) * 6.28
    return x, torch.sin(x)


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Rank 0 writes; a rename makes it whole or absent."""
    OUT.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, OUT / ".checkpoint.tmp")
    (OUT / ".checkpoint.tmp").rename(OUT / "checkpoint.pt")


def main() -> int:
    signal.signal(signal.SIGTERM, stop)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    start = torch.zeros(1, dtype=torch.int64)
    if (OUT / "checkpoint.pt").exists():
        state = torch.load(OUT / "checkpoint.pt")
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start += state["step"]
    first = start.clone()
    dist.broadcast(first, src=0)
    assert first.item() == start.item(), "the ranks do not see the same OUT: put it on a shared claim"
    model = DistributedDataParallel(net)
    for step in range(int(first), STEPS):
        x, y = batch(step, rank)
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        wish = torch.tensor([float(stopping)])
        dist.all_reduce(wish)  # a signal reaches the ranks at different moments: they agree on the step
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}/{STEPS} loss {loss.item():.5f}", flush=True)
        if wish.item() or step + 1 == STEPS:
            if rank == 0:
                save(net, optimizer, step + 1)
            dist.barrier()
            if wish.item() and step + 1 < STEPS:
                print(f"rank {rank}: saved after step {step + 1}, stopping", flush=True)
                dist.destroy_process_group()
                return 143
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    print(f"rank {rank} of {dist.get_world_size()}: done, weights sum {weights.sum().item():.6f}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Not sys.exit: under DistributedDataParallel gloo's threads outlive destroy_process_group, and one that lets go
    # of its last tensor while the interpreter shuts down aborts the process (torch 2.15), with the work all done.
    os._exit(code)
