"""Bits per byte on held-out files, for the model and for n-grams counted on the same training bytes.

Bits per byte do not depend on the tokenizer: the model's total code length of a file is divided by the
file's bytes. Files are read in windows of the training length that overlap by half; each token is scored
once, with at least half a window of context where the file has it. The first token of a file is scored after
the end-of-text token, as in training. Of a row with a prompt, and of a conversation, the answers are scored, by the
model and by the n-grams, and their bytes are counted. At most `MAX_BYTES` are scored, whole files, in a seeded order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from busbar.workloads.training.corpus import Document
from busbar.workloads.training.encoding import Encode
from busbar.workloads.training.ngram import Runs, ngram_bits
from busbar.workloads.training.packing import TOKEN, Tokens
from busbar.workloads.training.rows import Row, text_row
from busbar.workloads.training.tiled_loss import token_losses

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


def select_documents(documents: Sequence[Document], limit: int = MAX_BYTES) -> list[Row]:
    """Whole rows and texts until `limit` bytes; a first text that is larger is cut."""
    rows: list[Row] = []
    room = limit
    for document in documents:
        for row in document.whole(room):
            size = len(row.text.encode())
            if size > room and (rows or not row.plain):
                continue
            if size > room:
                row = text_row(row.text.encode()[:room].decode("utf-8", errors="ignore"))
            if row.text:
                rows.append(row)
                room -= min(room, size)
        if room == 0:
            break
    return rows


def evaluate(
    model: torch.nn.Module,
    encode: Encode,
    separator: int,
    sequence: int,
    micro_batch: int,
    held_out: Sequence[Row],
    training: Runs,
    order: int,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
) -> Scores:
    """Score what is learned in the rows of `held_out` by the model and by n-grams counted on `training`."""
    raw = [row.text.encode() for row in held_out]
    scored = [_scored_bytes(row) for row in held_out]
    bits = rows_bits(model, encode, separator, sequence, micro_batch, held_out, device, progress)
    ngrams = ngram_bits(training, raw, (1, order), scored)
    counted = sum(
        size if mask is None else int(mask.sum()) for size, mask in zip(map(len, raw), scored, strict=True)
    )
    return Scores(
        bits_per_byte=bits / counted,
        bigram_bits_per_byte=sum(ngrams[1]) / counted,
        ngram_bits_per_byte=sum(ngrams[order]) / counted,
        ngram_order=order,
        held_out_bytes=counted,
        held_out_files=len(raw),
        training_bytes=sum(len(piece) for run in training() for piece in run),
    )


def rows_bits(
    model: torch.nn.Module,
    encode: Encode,
    separator: int,
    sequence: int,
    micro_batch: int,
    held_out: Sequence[Row],
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
) -> float:
    """Code length in bits of what is learned in the rows of `held_out`."""
    size = sum(len(row.text.encode()) for row in held_out)
    bits, done = 0.0, 0
    for row in held_out:
        found = encode(row)
        learned = None if found.learned is None else [False, *found.learned]
        bits += model_bits(model, [separator, *found.ids], sequence, micro_batch, device, learned)
        done += len(row.text.encode())
        progress(done / size)
    return bits


def _scored_bytes(row: Row) -> npt.NDArray[np.bool_] | None:
    """Which bytes of the row are learned; None: all."""
    if row.plain:
        return None
    return np.concatenate([np.full(len(part.text.encode()), part.learned) for part in row.parts])


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
        piece = decode((run[start : start + PIECE_TOKENS] & TOKEN).tolist())[: room[0]]
        room[0] -= len(piece)
        yield piece


def model_bits(
    model: torch.nn.Module,
    ids: Sequence[int],
    sequence: int,
    micro_batch: int,
    device: torch.device,
    learned: Sequence[bool] | None = None,
) -> float:
    """Code length in bits of ids[1:] given ids[0]; only of those that are `learned`, where that is given."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            total = 0.0
            windows = list(_windows(len(ids), sequence))
            full = [window for window in windows if window[1] - window[0] == sequence]
            rest = [window for window in windows if window[1] - window[0] != sequence]
            for at in range(0, len(full), micro_batch):
                total += _score(model, ids, full[at : at + micro_batch], device, learned)
            for window in rest:
                total += _score(model, ids, [window], device, learned)
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
    model: torch.nn.Module,
    ids: Sequence[int],
    windows: Sequence[tuple[int, int, int]],
    device: torch.device,
    learned: Sequence[bool] | None,
) -> float:
    losses = token_losses(model, torch.tensor([ids[start:end] for start, end, _ in windows], device=device))
    total = 0.0
    for row, (start, end, scored) in enumerate(windows):
        own = losses[row, scored - start - 1 :]
        if learned is not None:
            own = own[torch.tensor(learned[scored:end], device=device)]
        total += float(own.sum())
    return total
