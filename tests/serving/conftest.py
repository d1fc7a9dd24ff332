"""Models on disk, once per session; one torch thread, so that runs are reproducible and share the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tools.tiers import UNIT

if TYPE_CHECKING:
    from tests.serving.adapted import Family

os.environ["TRITON_INTERPRET"] = "1"
"""Triton reads it when it is imported, which other packages do as well."""

PURE = (
    "test_scheduler",
    "test_swap_plan",
    "test_kv_quota",
    "test_batch_work",
    "test_drafting",
    "test_fairness",
    "test_guesses",
    "test_priority",
    "test_openai_request",
    "test_openai_tools",
    "test_responses_request",
    "test_toolreader",
    "test_settings",
    "test_speed",
    "test_stream_plan",
    "test_architecture",
    "test_replay",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The unit tier imports no module with torch: this alone would take ten seconds."""
    has_torch = collection_path.name.startswith("test_") and collection_path.stem not in PURE
    return True if has_torch and config.option.markexpr == UNIT.selection else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here, except those of modules without torch, gets the marker `engine`."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.stem not in PURE:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, transformers model) of a tiny random Llama with a byte-level tokenizer."""
    import torch
    from tests.serving.models import save_model

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_model(folder)


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a slow model."""
    import torch
    from tests.serving.models import save_deep_model

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("deep")
    save_deep_model(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A tiny random Llama with adapters of several forms."""
    from tests.serving.adapted import make_family

    return make_family(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's paged attention computes on a CPU."""
    from tests.serving.paged import paged_attention

    from busbar.workloads.serving import paged_decode

    monkeypatch.setattr(paged_decode, "varlen_attn", paged_attention)
