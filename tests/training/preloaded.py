"""What the fork server of `crash` has imported before it forks: all that a training process would import, each anew."""

from __future__ import annotations

import peft
import pytest
import torch
from tests.training import gang
from transformers.models.llama import modeling_llama

from busbar.workloads.training import (
    choice,
    environment,
    export,
    loop,
    memory_copy,
    memory_report,
    preparation,
    resume,
    several,
    supervisor,
)

__all__ = [
    "choice",
    "environment",
    "export",
    "gang",
    "loop",
    "memory_copy",
    "memory_report",
    "modeling_llama",
    "peft",
    "preparation",
    "pytest",
    "resume",
    "several",
    "supervisor",
    "torch",
]
