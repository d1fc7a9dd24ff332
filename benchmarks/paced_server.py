"""`busbar serve` whose model comes no faster than a given rate: BUSBAR_READ_RATE, bytes per second.

It stands for a claim on a network volume, for `serving_wake.py`: each tensor of the checkpoint takes at least its bytes divided by the
rate, whatever the page cache holds. Latency, and other readers of the volume, are not in it.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from busbar.workloads.serving.checkpoint import Checkpoint
from busbar.workloads.serving.command import serve

RATE = float(os.environ["BUSBAR_READ_RATE"])


read = Checkpoint.__getitem__


def paced(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    began = time.monotonic()
    tensor = read(checkpoint, name).clone()  # a mapped tensor is read when it is used
    time.sleep(max(0.0, began + tensor.numel() * tensor.element_size() / RATE - time.monotonic()))
    return tensor


if __name__ == "__main__":
    Checkpoint.__getitem__ = paced  # type: ignore[method-assign]
    sys.exit(serve(prog_name="busbar serve"))
