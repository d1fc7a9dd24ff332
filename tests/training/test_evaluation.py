"""Bits per byte: n-grams against a dictionary implementation, the model against one long forward pass."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.small import LLAMA, TEXTS
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.workloads.training.corpus import Document
from busbar.workloads.training.evaluation import _windows, model_bits, select_documents
from busbar.workloads.training.ngram import DISCOUNT, Runs, ngram_bits

TRAINING = [text.encode() for text in list(TEXTS.values())[:4]]
HELD_OUT = list(TEXTS.values())[5][:400].encode() + b"\xff\x00 never seen"


def reference_bits(texts: list[bytes], order: int, text: bytes) -> float:
    """Interpolated absolute discounting, counted in dictionaries, one byte at a time."""
    counts: dict[bytes, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for training in texts:
        for position, byte in enumerate(training):
            for length in range(min(order, position) + 1):
                counts[training[position - length : position]][byte] += 1

    def probability(context: bytes, byte: int) -> float:
        shorter = probability(context[1:], byte) if context else 1 / 256
        followers = counts.get(context)
        if not followers:
            return shorter
        total = sum(followers.values())
        own = max(followers.get(byte, 0) - DISCOUNT, 0.0)
        return own / total + DISCOUNT * len(followers) / total * shorter

    return -sum(
        math.log2(probability(text[max(0, position - order) : position], byte))
        for position, byte in enumerate(text)
    )


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_ngrams_equal_a_dictionary_implementation(order: int) -> None:
    other = b"the valve feeds"
    for pieces in (1, 7, 10**9):
        found = ngram_bits(in_pieces(pieces), [HELD_OUT, other], (1, order))[order]
        expected = [reference_bits(TRAINING, order, text) for text in (HELD_OUT, other)]
        assert found == pytest.approx(expected, rel=1e-12)


def in_pieces(size: int) -> Runs:
    """The training texts, each an iterator of pieces."""
    return lambda: [[text[at : at + size] for at in range(0, len(text), size)] for text in TRAINING]


def test_an_ngram_model_is_a_distribution() -> None:
    prefix = b"the pump op"
    texts = [prefix, *(prefix + bytes([byte]) for byte in range(256))]
    before, *after = ngram_bits(in_pieces(10**9), texts, (3,))[3]
    total = sum(2 ** -(bits - before) for bits in after)
    assert total == pytest.approx(1.0, abs=1e-9)


def test_an_untrained_ngram_model_needs_eight_bits() -> None:
    assert ngram_bits(list, [b"abc"], (3,))[3] == [pytest.approx(24.0)]


@pytest.mark.parametrize("count", [2, 31, 32, 33, 48, 100, 257])
def test_windows_score_every_token_once_with_half_a_window_of_context(count: int) -> None:
    windows = _windows(count, 32)
    scored = [position for _, end, first in windows for position in range(first, end)]
    assert scored == list(range(1, count))
    assert all(end - start <= 32 for start, end, _ in windows)
    assert all(first - start >= 16 for start, _, first in windows[1:])


def test_a_text_of_one_window_is_scored_as_one_forward_pass_would() -> None:
    torch.manual_seed(0)
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    make: Any = AutoModelForCausalLM.from_config
    model = make(AutoConfig.for_model("llama", vocab_size=64, **config))
    ids = torch.randint(0, 64, (1, 30), generator=torch.Generator().manual_seed(1))
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    expected = float(loss) * 29 / math.log(2)
    assert model_bits(model, ids[0].tolist(), 32, 2, torch.device("cpu")) == pytest.approx(expected, rel=1e-5)
    assert not model.training


def test_whole_documents_are_chosen_up_to_the_limit(tmp_path: Path) -> None:
    documents: list[Document] = []
    for name in ("aaaa", "bbbbbbbb", "cc", "", "ddd"):
        path = tmp_path / f"{len(documents)}.txt"
        path.write_text(name)
        documents.append(Document(name, path))
    assert [row.text for row in select_documents(documents, 7)] == ["aaaa", "cc"]
    assert [row.text for row in select_documents(documents[1:2], 5)] == ["bbbbb"]
