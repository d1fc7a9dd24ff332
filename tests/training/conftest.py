"""The training engine's tests: small models, one thread, and real processes where process behaviour is under test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.small import engine, with_text


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A small corpus of ten files, some of which are held out."""
    return with_text(tmp_path) / "text"


@pytest.fixture
def make_engine() -> Callable[..., dict[str, Any]]:
    return engine
