"""JSONL rows: what is read of them, which tokens are learned, and what happens to bad ones."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.plain_loop import train_plainly
from tests.training.small import LLAMA, SEQUENCE, SEQUENCES, TEXTS, VOCABULARY, engine, manifest
from tests.training.test_bit_equality import plan_for
from transformers import PreTrainedTokenizerFast

from busbar.workloads.training.chat import ChatTemplate
from busbar.workloads.training.control import Control
from busbar.workloads.training.corpus import Document, open_corpus
from busbar.workloads.training.encoding import encoder
from busbar.workloads.training.environment import run_from_manifest
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.evaluation import evaluate, select_documents
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import open_model
from busbar.workloads.training.packing import NOT_LEARNED, TOKEN, Packed, Tokens, pack
from busbar.workloads.training.preparation import prepare
from busbar.workloads.training.report import Lines
from busbar.workloads.training.rows import BadRow, RowReader
from busbar.workloads.training.run import run
from busbar.workloads.training.settings import Fields
from busbar.workloads.training.status import Status
from busbar.workloads.training.tokenizer import end_of_text_id, load_tokenizer, train_tokenizer
from busbar.workloads.training.trainer import Trainer

CPU = torch.device("cpu")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}[OPEN]{{ m.content }}{{ eos_token }}\n[CLOSE]"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKED = TEMPLATE.replace("[OPEN]", "{% generation %}").replace("[CLOSE]", "{% endgeneration %}")
UNMARKED = TEMPLATE.replace("[OPEN]", "").replace("[CLOSE]", "")
CONVERSATIONS = [
    [
        {"role": "system", "content": "You watch the feeders."},
        {"role": "user", "content": "Which valve opens — 日本 — first?"},
        {"role": "assistant", "content": "the pump feeds two cells 日本"},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "a valve drops the line"},
    ],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "one feeder holds a phase"}],
]


def save_tokenizer(folder: Path, template: str | None) -> Path:
    tokenizer = train_tokenizer(TEXTS.values(), VOCABULARY)
    fast: Any = PreTrainedTokenizerFast
    end = tokenizer.id_to_token(end_of_text_id(tokenizer))
    fast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, chat_template=template).save_pretrained(
        folder
    )
    return folder


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def answers(count: int) -> list[dict[str, str]]:
    """Questions and answers, some of which are longer than a sequence."""
    lines = [line for text in TEXTS.values() for line in text.splitlines()]
    return [
        {"prompt": " ".join(lines[n : n + 1 + n % 7]), "completion": " " + lines[n + 1]} for n in range(count)
    ]


def stream_of(document: Document, tokenizer: Any, sequence: int = 10**5) -> Tokens:
    return np.concatenate(
        [
            tokens
            for tokens, _ in pack([document], encoder(tokenizer), end_of_text_id(tokenizer), 10**6, sequence)
        ]
    )


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_conversations_are_the_tokens_and_answers_of_the_tokenizers_own_template(
    template: str, tmp_path: Path
) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", template)
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    document = Document("chat.jsonl", path, rows=RowReader(chat=ChatTemplate(folder)))
    tokenizer = load_tokenizer(folder)
    encoded = [encoder(tokenizer)(piece.row) for piece in document.pieces()]
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    for ours, messages in zip(encoded, CONVERSATIONS, strict=True):
        expected = theirs.apply_chat_template(
            messages, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ours.ids == theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert ours.ids == expected["input_ids"]
        assert ours.learned == [bool(flag) for flag in expected["assistant_masks"]]


def test_a_template_that_adds_a_thought_to_the_last_answer_alone_is_understood(tmp_path: Path) -> None:
    thought = "<think>\n\n</think>\n"
    thinking = UNMARKED.replace(
        "{{ m.content }}{{ eos_token }}",
        "{{ '" + thought.replace("\n", "\\n") + "' if loop.last }}{{ m.content | trim }}{{ eos_token }}",
    )
    template = ChatTemplate(save_tokenizer(tmp_path / "tokenizer", thinking))
    messages = [{**m, "content": m["content"] + "\n"} for m in CONVERSATIONS[0]]
    learned = [part.text for part in template.row(messages).parts if part.learned]
    first, last = (m["content"] for m in CONVERSATIONS[0] if m["role"] == "assistant")
    assert learned == [f"{first}<|endoftext|>\n", f"{thought}{last}<|endoftext|>\n"]


def test_a_template_that_hides_earlier_answers_is_refused(tmp_path: Path) -> None:
    hiding = UNMARKED.replace("{{ m.content }}{{ eos_token }}", "{{ m.content if loop.last else 'hidden' }}")
    template = ChatTemplate(save_tokenizer(tmp_path / "tokenizer", hiding))
    with pytest.raises(BadRow, match="renders in another way when more follows"):
        template.row(CONVERSATIONS[0])
    assert template.row(CONVERSATIONS[1])


def test_a_tokenizer_that_was_saved_with_a_limit_loses_no_text(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS.values(), VOCABULARY)
    whole = tokenizer.encode("the pump opens the line").ids
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("the pump opens the line").ids == whole


def test_of_a_prompt_with_its_completion_the_completion_and_its_end_are_learned(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS.values(), VOCABULARY)
    end = end_of_text_id(tokenizer)
    rows = [{"prompt": "the pump", "completion": " opens"}, {"prompt": "a valve", "completion": " drops"}]
    path = write_rows(tmp_path / "a.jsonl", [*rows, {"text": "the line"}])
    stream = stream_of(Document("a.jsonl", path, rows=RowReader()), tokenizer)
    expected: list[tuple[int, bool]] = []
    for row in rows:
        expected += [(end, True), *((token, False) for token in tokenizer.encode(row["prompt"]).ids)]
        expected += [(token, True) for token in tokenizer.encode(row["completion"]).ids]
    expected += [(end, True), *((token, True) for token in tokenizer.encode("the line").ids)]
    tokens, learned = (stream & TOKEN).tolist(), ((stream & NOT_LEARNED) == 0).tolist()
    assert list(zip(tokens, learned, strict=True)) == expected


def test_the_end_of_a_conversation_is_that_of_its_template(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", UNMARKED)
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    reader = RowReader(chat=ChatTemplate(folder))
    tokenizer = load_tokenizer(folder)
    first = encoder(tokenizer)(next(iter(Document("a", path, rows=reader).pieces())).row)
    separator = len(first.ids) + 1  # behind the first separator and the first row
    stream = stream_of(Document("a.jsonl", path, rows=reader), tokenizer)
    assert int(stream[separator] & TOKEN) == end_of_text_id(tokenizer)
    assert stream[separator] & NOT_LEARNED


def test_sequences_from_which_nothing_is_learned_are_left_out(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS.values(), VOCABULARY)
    path = write_rows(
        tmp_path / "a.jsonl", [{"prompt": "the pump opens " * 40, "completion": " the line"}] * 3
    )
    stream = stream_of(Document("a.jsonl", path, rows=RowReader()), tokenizer, 8)
    whole = stream[: stream.size // 8 * 8].reshape(-1, 8)
    assert 0 < len(whole) < 10
    assert all(((row[1:] & NOT_LEARNED) == 0).any() for row in whole)


def test_a_masked_run_equals_a_plain_loop_bit_for_bit(tmp_path: Path) -> None:
    document = engine(steps=6, data={"uri": "pvc://rows", "sequenceLength": SEQUENCE, "holdoutFraction": 0})
    spec = parse_engine(document)
    write_rows(tmp_path / "rows/a.jsonl", answers(120))
    prepared = prepare(spec, open_corpus("pvc://rows", tmp_path / "rows", 0.0), None, tmp_path / "cache")
    data = prepared.packed
    labels = [data.labels(step, SEQUENCES) for step in range(6)]
    assert all(own is not None for own in labels)
    counts = {
        int((own[rows, 1:] >= 0).sum()) for own in labels if own is not None for rows in ([0, 1], [2, 3])
    }
    assert len(counts) > 3  # the micro-batches differ in what they learn
    recipe = open_model(spec, None, VOCABULARY, 0)
    trainer = Trainer(spec, recipe, plan_for(spec, recipe, "half"), CPU)
    ours = [trainer.step(data).loss for _ in range(6)]
    trainer.close()
    batches = [torch.from_numpy(data.batch(step, SEQUENCES)) for step in range(6)]
    wanted = [torch.from_numpy(own) for own in labels if own is not None]
    losses, weights = train_plainly(
        LLAMA, VOCABULARY, batches, 2, document["optimizer"], fused=True, labels=wanted
    )
    assert ours == losses
    assert all(torch.equal(weight, weights[name]) for name, weight in trainer.model.named_parameters())


def test_a_micro_batch_with_nothing_to_learn_adds_nothing() -> None:
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, SEQUENCE * 8).astype(np.uint32)
    tokens.reshape(8, SEQUENCE)[:6] |= NOT_LEARNED
    spec = parse_engine(engine(steps=3))
    recipe = open_model(spec, None, VOCABULARY, 0)
    trainer = Trainer(spec, recipe, plan_for(spec, recipe, "resident"), CPU)
    losses = [trainer.step(Packed.cut(tokens, SEQUENCE, 0, SEQUENCES)).loss for _ in range(2)]
    trainer.close()
    assert all(math.isfinite(loss) for loss in losses)


def test_the_answers_of_held_out_rows_are_scored_and_their_bytes_counted(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "the pump 日", "completion": " opens the line 本"}])
    tokenizer = train_tokenizer(TEXTS.values(), VOCABULARY)
    rows = select_documents([Document("a.jsonl", path, rows=RowReader())])
    spec = parse_engine(engine())
    model = open_model(spec, None, VOCABULARY, 0).build()
    encode, training = encoder(tokenizer), [text.encode() for text in TEXTS.values()]
    scores = evaluate(model, encode, 0, SEQUENCE, 2, rows, lambda: [[text] for text in training], 3, CPU)
    found = encode(rows[0])
    ids = torch.tensor([[0, *found.ids]])
    own = torch.where(torch.tensor([[False, *(found.learned or [])]]), ids, -100)
    model.eval()
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=own).loss)
    answer = len(" opens the line 本".encode())
    assert scores.held_out_bytes == answer
    assert found.learned is not None
    assert scores.bits_per_byte == pytest.approx(loss * sum(found.learned) / math.log(2) / answer, rel=1e-5)
    assert 1 < scores.ngram_bits_per_byte < 9


BAD = [
    ('{"prompt": "x"}', "has no field `text` or `completion` or `messages`, but prompt"),
    ('{"completion": "x"}', "has no field `prompt` of type string, but no such field"),
    ('{"text": "x", "completion": "y", "prompt": "z"}', "has the fields `text` and `completion`"),
    ('{"messages": "x"}', "has a field `messages` that is not a list of objects"),
    ('{"messages": [{"role": "assistant"}]}', "has a field `messages` that is not a list of objects"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "has no message of the role assistant"),
    ("{torn", "is not JSON"),
]


@pytest.mark.parametrize(("line", "said"), BAD, ids=[row[0] for row in BAD])
def test_a_bad_row_is_named_or_counted(line: str, said: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "good"}, line, {"prompt": "a", "completion": "b"}])
    with pytest.raises(InvalidJob, match=f"a.jsonl, line 2, {said}.*data.onBadRow: skip"):
        list(Document("a.jsonl", path, rows=RowReader()).pieces())
    refusals: list[InvalidJob] = []
    document = Document("a.jsonl", path, rows=RowReader(skips=True))
    assert [piece.row.text for piece in document.pieces(refusals.append)] == ["good", "ab"]
    assert [refusal.problem.split(",")[1] for refusal in refusals] == [" line 2"]


def test_what_a_chat_template_refuses_is_a_bad_row(tmp_path: Path) -> None:
    strict = "{{ raise_exception('roles must alternate') if messages[0].role != 'user' }}" + UNMARKED
    reader = RowReader(chat=ChatTemplate(save_tokenizer(tmp_path / "tokenizer", strict)), skips=True)
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    refusals: list[InvalidJob] = []
    assert len(list(Document("a.jsonl", path, rows=reader).pieces(refusals.append))) == 1
    assert "is refused by the chat template: roles must alternate" in str(refusals[0])


def rendered(chat: ChatTemplate, tmp_path: Path) -> list[tuple[str, list[str]]]:
    """The text of each conversation, and its answers."""
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    pieces = Document("a.jsonl", path, rows=RowReader(chat=chat)).pieces()
    return [(piece.row.text, [part.text for part in piece.row.parts if part.learned]) for piece in pieces]


@pytest.mark.parametrize("own", [MARKED, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("of_tokenizer", [None, "{{ messages[0].content }}"], ids=["none", "another"])
def test_the_jobs_own_template_counts_whether_the_tokenizer_has_one_or_is_trained_here(
    own: str, of_tokenizer: str | None, tmp_path: Path
) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", own)
    expected = rendered(ChatTemplate(folder), tmp_path)
    other = save_tokenizer(tmp_path / "other", of_tokenizer)
    assert rendered(ChatTemplate(other, own), tmp_path) == expected
    assert rendered(ChatTemplate(None, own), tmp_path) == expected
    digests = {ChatTemplate(place, given).digest for place in (folder, None) for given in (own, "x", None)}
    assert len(digests) == 6


def test_a_template_that_is_none_ends_the_job_also_where_bad_rows_are_left_out(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"messages": CONVERSATIONS[0]}])
    reader = RowReader(chat=ChatTemplate(None, "{% for m in messages %}"), skips=True)
    with pytest.raises(InvalidJob, match=r"data\.chatTemplate: the chat template is no template"):
        list(Document("a.jsonl", path, rows=reader).pieces())


def test_a_run_writes_the_jobs_template_beside_its_tokenizer(tmp_path: Path) -> None:
    write_rows(tmp_path / "text/a.jsonl", [{"messages": CONVERSATIONS[0]}] * 40)
    data = {"uri": "pvc://text", "sequenceLength": SEQUENCE, "holdoutFraction": 0, "chatTemplate": MARKED}
    document = manifest(steps=4, data=data, tokenizer={"train": {"vocabSize": 290}})
    status, log = Status(), io.StringIO()
    described = run_from_manifest(document, tmp_path, None, {})
    assert run(described, status, Control(), Lines("rows", log)) == 0, log.getvalue()
    loaded: Any = PreTrainedTokenizerFast.from_pretrained(described.places.output)
    assert loaded.get_chat_template() == MARKED


@pytest.mark.parametrize("saved", [False, True], ids=["trained", "saved"])
def test_conversations_need_a_chat_template(saved: bool, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", None) if saved else None
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    reader = RowReader(chat=ChatTemplate(folder), skips=True)  # which is not about the template
    with pytest.raises(InvalidJob, match="has no chat template"):
        list(Document("a.jsonl", path, rows=reader).pieces())


def test_only_the_fields_that_are_named_are_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "x", "question": "q", "answer": "a"}])
    names = Fields(text=None, prompt="question", completion="answer", messages=None)
    (piece,) = Document("a.jsonl", path, rows=RowReader(names)).pieces()
    assert [(part.text, part.learned) for part in piece.row.parts] == [("q", False), ("a", True)]


def test_a_field_that_is_null_is_not_there(tmp_path: Path) -> None:
    row = {"text": None, "prompt": "q", "completion": "a", "messages": None}
    (piece,) = Document("a", write_rows(tmp_path / "a.jsonl", [row]), rows=RowReader()).pieces()
    assert [part.text for part in piece.row.parts] == ["q", "a"]
    with pytest.raises(BadRow, match=r"has no field .* but nothing"):
        RowReader().read(b'{"text": null}')


def test_the_format_wins_over_the_files_ending(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "x"}])
    write_rows(tmp_path / "b.log", [{"text": "y"}])

    def texts(form: str | None) -> list[str]:
        corpus = open_corpus("pvc://text", tmp_path, 0.0, form=form)
        return [piece.row.text for document in corpus.train for piece in document.pieces()]

    assert texts(None) == ["x", '{"text": "y"}\n']
    assert texts("jsonl") == ["x", "y"]
    assert texts("text") == ['{"text": "x"}\n', '{"text": "y"}\n']
    digests = {open_corpus("pvc://text", tmp_path, 0.0, form=form).digest for form in (None, "jsonl", "text")}
    assert len(digests) == 3


def test_skipped_rows_are_counted_in_the_status_also_by_a_run_that_reads_its_cache(tmp_path: Path) -> None:
    rows = [*answers(200), "{torn", *answers(100), "[]"]
    write_rows(tmp_path / "text/a.jsonl", rows)
    document = manifest(
        steps=3,
        data={"uri": "pvc://text", "sequenceLength": SEQUENCE, "holdoutFraction": 0, "onBadRow": "skip"},
    )
    for _ in range(2):
        status, log = Status(), io.StringIO()
        described = run_from_manifest(document, tmp_path, None, {})
        assert run(described, status, Control(), Lines("rows", log)) == 0, log.getvalue()
        assert status.to_json()["badRows"] == 2
        assert "2 rows are not trained on" in log.getvalue()
    document["spec"]["engine"]["data"]["onBadRow"] = "fail"
    status = Status()
    described = run_from_manifest(document, tmp_path, tmp_path / "other", {})
    assert run(described, status, Control(), Lines("rows", io.StringIO())) == 2
    assert "a.jsonl, line 201, is not JSON" in status.to_json()["message"]
