"""Bits per byte on held-out files, for the model and for n-grams counted on the same training bytes.

Bits per byte do not depend on the tokenizer: the model's total code length of a file is divided by the
file's bytes. Files are read in windows of the training length that overlap by half; each token is scored
once, with at least half a window of context where the file has it. The first token of a file is scored after
the end-of-text token, as in training. At most `MAX_BYTES` are scored, whole files, in a seeded order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from busbar.workloads.training.corpus import Document
from busbar.workloads.training.ngram import Runs, ngram_bits
from busbar.workloads.training.packing import Tokens

MAX_BYTES = 192 * 1024
MAX_COUNTED_BYTES = 64 * 2**20  # of training text, for the n-grams
PIECE_TOKENS = 64 * 1024


@dataclass(frozen=True)
class Scores:
    bits_per_byte: float
    bigram_bits_per_byte: float
    ngram_bits_per_byte: float
    ngram_order: int
    held_out_bytes: int
    held_out_files: int
    training_bytes: int  # on which the n-grams were counted: what the model saw, up to MAX_COUNTED_BYTES

    def to_json(self) -> dict[str, Any]:
        return {
            "bitsPerByte": round(self.bits_per_byte, 4),
            "bigramBitsPerByte": round(self.bigram_bits_per_byte, 4),
            "ngramBitsPerByte": round(self.ngram_bits_per_byte, 4),
            "ngramOrder": self.ngram_order,
            "heldOutBytes": self.held_out_bytes,
            "heldOutFiles": self.held_out_files,
            "trainingBytes": self.training_bytes,
        }


def select_documents(documents: Sequence[Document], limit: int = MAX_BYTES) -> list[str]:
    """Texts of whole files until `limit` bytes; a first file that is larger is cut."""
    texts: list[str] = []
    room = limit
    for document in documents:
        for raw in document.texts(room):
            if len(raw) > room:
                if not texts:
                    texts.append(raw[:room].decode("utf-8", errors="ignore"))
                continue
            if raw:
                texts.append(raw.decode("utf-8", errors="ignore"))
                room -= len(raw)
        if room == 0:
            break
    return texts


def evaluate(
    model: torch.nn.Module,
    encode: Callable[[str], Sequence[int]],
    separator: int,
    sequence: int,
    micro_batch: int,
    held_out: Sequence[str],
    training: Runs,
    order: int,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
) -> Scores:
    """Score `held_out` texts by the model and by n-grams counted on `training`."""
    raw = [text.encode() for text in held_out]
    size = sum(len(text) for text in raw)
    bits = 0.0
    done = 0
    for text, content in zip(held_out, raw, strict=True):
        bits += model_bits(model, [separator, *encode(text)], sequence, micro_batch, device)
        done += len(content)
        progress(done / size)
    ngrams = ngram_bits(training, raw, (1, order))
    return Scores(
        bits_per_byte=bits / size,
        bigram_bits_per_byte=sum(ngrams[1]) / size,
        ngram_bits_per_byte=sum(ngrams[order]) / size,
        ngram_order=order,
        held_out_bytes=size,
        held_out_files=len(raw),
        training_bytes=sum(len(piece) for run in training() for piece in run),
    )


def training_text(runs: Sequence[Tokens], decode: Callable[[Sequence[int]], bytes]) -> Runs:
    """The text of token runs, decoded again each time it is read, so that it is never completely in memory."""

    def read() -> Iterator[Iterator[bytes]]:
        room = [MAX_COUNTED_BYTES]
        for run in runs:
            yield _decoded(run, decode, room)

    return read


def _decoded(run: Tokens, decode: Callable[[Sequence[int]], bytes], room: list[int]) -> Iterator[bytes]:
    for start in range(0, len(run), PIECE_TOKENS):
        if room[0] <= 0:
            return
        piece = decode(run[start : start + PIECE_TOKENS].tolist())[: room[0]]
        room[0] -= len(piece)
        yield piece


def model_bits(
    model: torch.nn.Module, ids: Sequence[int], sequence: int, micro_batch: int, device: torch.device
) -> float:
    """Code length in bits of ids[1:] given ids[0]."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            total = 0.0
            windows = list(_windows(len(ids), sequence))
            full = [window for window in windows if window[1] - window[0] == sequence]
            rest = [window for window in windows if window[1] - window[0] != sequence]
            for at in range(0, len(full), micro_batch):
                total += _score(model, ids, full[at : at + micro_batch], device)
            for window in rest:
                total += _score(model, ids, [window], device)
            return total / math.log(2)
    finally:
        model.train(was_training)


def _windows(count: int, sequence: int) -> list[tuple[int, int, int]]:
    """(start, end, first scored position) of each window over `count` ids."""
    windows = []
    scored = 1
    while scored < count:
        start = max(0, scored - 1 if scored == 1 else scored - sequence // 2)
        end = min(count, start + sequence)
        windows.append((start, end, scored))
        scored = end
    return windows


def _score(
    model: torch.nn.Module, ids: Sequence[int], windows: Sequence[tuple[int, int, int]], device: torch.device
) -> float:
    losses = token_losses(model, torch.tensor([ids[start:end] for start, end, _ in windows], device=device))
    return sum(
        float(losses[row, scored - start - 1 :].sum()) for row, (start, _, scored) in enumerate(windows)
    )


def token_losses(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Loss of each token but the first, as float64, of a batch [rows, length]."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    wanted = tokens[:, 1:]
    # Flat: the form with a class dimension in the middle has no repeatable kernel on a GPU.
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return flat.view(wanted.shape).double()
