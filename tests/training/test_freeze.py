"""Frozen parts: the numbers of a plain loop with `requires_grad_(False)`, no gradient, state or traffic, the same bits."""

from __future__ import annotations

import io
import json
import shutil
import signal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.training.crash import Point, train_in_a_process
from tests.training.plain_loop import train_model_plainly
from tests.training.small import GPT2, LLAMA, SEQUENCE, VOCABULARY, engine, manifest, with_text
from tests.training.test_adapter import build
from tests.training.test_bit_equality import CPU, batches, packed
from tests.training.test_crash_and_resume import losses
from tests.training.test_rows import UNMARKED, save_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.workloads.training import demand as demand_module
from busbar.workloads.training.control import Control
from busbar.workloads.training.environment import run_from_manifest
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.report import Lines
from busbar.workloads.training.run import run
from busbar.workloads.training.status import Status
from busbar.workloads.training.trainer import Trainer

STEPS = 5
MODEL: Any = AutoModelForCausalLM
BASES = {
    "llama": LLAMA,
    "untied": {**LLAMA, "tie_word_embeddings": False},
    "gpt2": GPT2,
    "other": LLAMA,
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved models, each with a tokenizer."""
    folder = tmp_path_factory.mktemp("bases")
    for number, (name, given) in enumerate(BASES.items()):
        config = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, **given}
        torch.manual_seed(21 + number)
        MODEL.from_config(AutoConfig.for_model(config.pop("model_type"), **config)).save_pretrained(
            folder / name
        )
        save_tokenizer(folder / name, UNMARKED)
    return folder


def document(patterns: list[str] | None, base: str = "llama", **changes: Any) -> dict[str, Any]:
    changed = engine(**{"steps": STEPS, "model": {"uri": f"pvc://bases/{base}"}, **changes})
    del changed["tokenizer"]
    if patterns is not None:
        changed["freeze"] = patterns
    return changed


def train(given: dict[str, Any], bases: Path, placement: str) -> tuple[list[float], Trainer]:
    trainer, data = build(given, bases, placement), packed()
    found = [trainer.step(data).loss for _ in range(STEPS)]
    trainer.close()
    return found, trainer


def demand(patterns: list[str] | None, bases: Path, base: str = "llama", **changes: Any) -> Any:
    spec = parse_engine(document(patterns, base, **changes))
    return measure_demand(open_model(spec, bases / base, VOCABULARY, 0), spec, CPU)


CASES: dict[str, tuple[str, list[str], list[str], dict[str, Any]]] = {
    "the tied table, by the head's name": ("llama", ["lm_head.*"], ["model.embed_tokens.weight"], {}),
    "the embedding beside an untied head": (
        "untied",
        ["model.embed_tokens.*"],
        ["model.embed_tokens.weight"],
        {},
    ),
    "a beginning, recomputed": (
        "untied",
        ["model.embed_tokens.*", "model.layers.[0-0].*"],
        ["model.embed_tokens.weight", "model.layers.0.*"],
        {"activations": "recompute"},
    ),
    "the end": (
        "untied",
        ["model.layers.1.*", "model.norm.*", "lm_head.*"],
        ["model.layers.1.*", "model.norm.weight", "lm_head.weight"],
        {},
    ),
    "all blocks": ("untied", ["model.layers.*"], ["model.layers.*"], {}),
    "all matrices of the MLP and a clip that bites": (
        "llama",
        ["*.mlp.?ate_proj.weight", "*.mlp.up_*"],
        ["*.mlp.gate_proj.weight", "*.mlp.up_proj.weight"],
        {"optimizer": {"learningRate": 1e-3, "gradientClip": 0.01, "schedule": "linear"}},
    ),
    "another architecture, with dropout": (
        "gpt2",
        ["transformer.w?e.*", "*.ln_[!2].*"],
        ["transformer.wte.weight", "transformer.wpe.weight", "*.ln_1.*", "*.ln_f.*"],
        {},
    ),
}


@pytest.mark.parametrize(
    ("placement", "dtype"),
    [
        ("resident", "float32"),
        ("optimizer-offload", "float32"),
        ("half", "bfloat16"),
        ("parameter-offload", "float32"),
        ("parameter-offload", "bfloat16"),
    ],
)
@pytest.mark.parametrize(("base", "patterns", "names", "changes"), CASES.values(), ids=CASES.keys())
def test_frozen_parts_equal_a_plain_loop_without_their_gradients_bit_for_bit(
    base: str,
    patterns: list[str],
    names: list[str],
    changes: dict[str, Any],
    placement: str,
    dtype: str,
    bases: Path,
) -> None:
    given = document(patterns, base, dtype=dtype, **changes)
    ours, trainer = train(given, bases, placement)
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = MODEL.from_pretrained(bases / base, dtype=kind)
    before = {name: each.clone() for name, each in model.named_parameters()}
    frozen = {name for name in before if any(fnmatchcase(name, each) for each in names)}
    assert frozen
    for name, each in model.named_parameters():
        each.requires_grad_(name not in frozen)
    torch.manual_seed(0)
    expected, weights = train_model_plainly(model, batches()[:STEPS], 2, given["optimizer"], True, kind)
    theirs = dict(trainer.model.named_parameters())
    assert {name for name, each in theirs.items() if not each.requires_grad} == frozen
    assert ours == expected
    assert {name for name in weights if not torch.equal(weights[name], theirs[name])} == set()
    assert {name for name in before if torch.equal(before[name], theirs[name])} == frozen


def test_frozen_parts_have_no_gradient_no_state_no_traffic_and_no_place_in_checkpoints(bases: Path) -> None:
    _, whole = train(document(None), bases, "optimizer-offload")
    _, trainer = train(document(["model.layers.0.*"]), bases, "optimizer-offload")
    frozen = [each for each in trainer.model.parameters() if not each.requires_grad]
    assert all(each.grad is None for each in frozen)
    region = trainer.device_arena.regions["base"]
    assert all(0 <= each.data_ptr() - region.data_ptr() < region.numel() for each in frozen)
    assert trainer.device_arena.used["base"] == trainer.plan.device["base"]
    block = next(flat.group.elements for flat in whole.groups if flat.group.name == "block-0")
    assert whole.plan.device["gradients"] - trainer.plan.device["gradients"] == 4 * block
    assert whole.optimizer.loaded_bytes - trainer.optimizer.loaded_bytes == STEPS * 8 * block
    unpadded = sum(each.numel() for each in frozen)
    assert whole.snapshot.layout.size - trainer.snapshot.layout.size == 12 * unpadded
    assert [flat.group.name for flat in trainer.groups] == ["embedding", "block-1", "head"]
    assert trainer.device_arena.peak["activations"] > 0.7 * trainer.plan.device["activations"]


def test_the_plan_counts_frozen_parts_once_and_the_whole_result(bases: Path) -> None:
    whole, frozen = demand(None, bases), demand(["model.embed_tokens.*", "*.layers.0.*"], bases)
    assert frozen.parameters < whole.parameters / 2
    assert frozen.frozen_bytes >= 4 * (VOCABULARY * 64 + 64 * (64 + 32 + 32 + 64 + 3 * 112))
    bare = 4 * MODEL.from_pretrained(bases / "llama").num_parameters()
    assert bare <= frozen.result_bytes == frozen.model_bytes < whole.model_bytes  # which pads every norm
    assert frozen.activation_bytes < whole.activation_bytes  # nothing is kept of a frozen beginning


def test_a_head_above_frozen_blocks_is_the_last_group(bases: Path) -> None:
    groups = demand(["model.layers.*"], bases, "untied").groups
    assert [group.name for group in groups] == ["embedding", "head"]


@pytest.mark.parametrize(
    ("bad", "good", "said"),
    [
        (
            "model.layer.*",
            "model.layers.*",
            r"freeze: model\.layer\.\* matches no .*Llama.*name some of model\.emb",
        ),
        ("embed_tokens.*", "*embed_tokens.*", "matches no parameter"),
        (
            "model.layers.[7-9].*",
            "model.layers.[0-9].*",
            r"matches no .*model\.layers\.\*\.self_attn\.q_proj\.weight",
        ),
        ("*", "*.[kqv]_proj.*", "leaves nothing to train.*take one of them out"),
        ("model.*", "model.layers.*", "leaves nothing to train"),  # the head is tied to the embedding
    ],
)
def test_patterns_that_match_nothing_or_everything_are_refused(
    bad: str, good: str, said: str, bases: Path
) -> None:
    with pytest.raises(InvalidJob, match=said):
        demand(["model.norm.*", bad], bases)
    assert demand(["model.norm.*", good], bases).frozen_bytes > 0


@pytest.mark.parametrize(
    "bad", ["", "model.layers.[0-3", "model.layers.[].*", "lm head", "model/*", "[^a]*", "x" * 254]
)
def test_a_bad_pattern_is_refused_with_its_place(bad: str) -> None:
    with pytest.raises(InvalidJob) as refusal:
        parse_engine(engine(freeze=["lm_head.*", bad]))
    assert refusal.value.field == "spec.engine.freeze[1]"


def test_freeze_beside_an_adapter_is_refused() -> None:
    both = {"adapter": {"rank": 4}, "model": {"uri": "pvc://bases/llama"}}
    with pytest.raises(InvalidJob, match="frozen already; remove freeze, or adapter"):
        parse_engine(engine(freeze=["lm_head.*"], **both))


def test_a_run_is_what_it_freezes_in_any_order() -> None:
    one, other = (parse_engine(engine(freeze=each)) for each in (["a.*", "b"], ["b", "a.*", "b"]))
    assert one.identity == other.identity != parse_engine(engine()).identity
    assert parse_engine(engine(freeze=["a.*"])).identity != one.identity


def job(patterns: list[str] | None = None, base: str | None = "llama", **changes: Any) -> dict[str, Any]:
    """A TrainingJob on text that freezes the embedding and the first block."""
    whole = manifest()
    patterns = patterns or ["model.embed_tokens.*", "model.layers.0.*"]
    data = {"uri": "pvc://text", "sequenceLength": SEQUENCE, "holdoutFraction": 0.2}
    if base is None:
        whole["spec"]["engine"] = engine(freeze=patterns, **changes)
    else:
        whole["spec"]["engine"] = document(patterns, base, **{"data": data, "steps": 12, **changes})
    return whole


@pytest.fixture
def claims(bases: Path, tmp_path: Path) -> Path:
    shutil.copytree(bases, tmp_path / "bases")
    return with_text(tmp_path)


def run_here(given: dict[str, Any], claims: Path) -> tuple[int, dict[str, Any], str]:
    status, log = Status(), io.StringIO()
    code = run(run_from_manifest(given, claims, None, {}), status, Control(), Lines("freeze", log))
    return code, status.to_json(), log.getvalue()


@pytest.mark.parametrize("base", ["llama", None], ids=["saved weights", "new weights"])
def test_a_killed_run_resumes_to_the_same_bits_from_checkpoints_of_what_is_trained(
    base: str | None, claims: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = tmp_path_factory.mktemp("whole")
    shutil.copytree(claims, whole, dirs_exist_ok=True)
    given = job(base=base)
    assert train_in_a_process(given, whole) == 0
    point = Point("snapshot:Snapshot", "begin", 2)  # which waits until the first checkpoint is written
    assert train_in_a_process(given, claims, point) == -signal.SIGKILL
    assert train_in_a_process(given, claims) == 0
    status = json.loads((claims / "status.json").read_text())
    assert (status["resumedFromStep"], status["replayMismatches"]) == (4, 0)
    assert losses(claims) == losses(whole)
    ours, theirs = (load_file(each / "out/model/model.safetensors") for each in (claims, whole))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    state = load_file(claims / "out/model/checkpoints/step-00000012/state.safetensors")
    assert not [name for name in state if "embed_tokens" in name or "layers.0." in name]
    assert "weights/model.norm.weight" in state


def test_the_result_is_the_whole_model_and_says_what_was_frozen(claims: Path) -> None:
    code, status, log = run_here(job(evaluation={}), claims)
    assert code == 0, status["message"]
    before, after = MODEL.from_pretrained(claims / "bases/llama"), MODEL.from_pretrained(claims / "out/model")
    weights = dict(before.named_parameters())
    kept = {name for name, each in after.named_parameters() if torch.equal(each, weights[name])}
    assert kept == {name for name in weights if "embed_tokens" in name or "layers.0." in name}
    trained = sum(each.numel() for name, each in weights.items() if name not in kept)
    assert status["model"]["trainableParameters"] == trained < status["model"]["parameters"]
    assert f"frozen are model.embed_tokens.*, model.layers.0.*: {trained} of " in log
    facts = json.loads((claims / "out/model/busbar.json").read_text())
    assert facts["freeze"] == ["model.embed_tokens.*", "model.layers.0.*"]
    assert status["report"]["class"] != run_here_class(claims)


def run_here_class(claims: Path) -> str:
    """The class of the same run with nothing frozen."""
    given = job()
    del given["spec"]["engine"]["freeze"]
    given["spec"]["output"]["uri"] = "pvc://out/whole"
    code, status, _ = run_here(given, claims)
    assert code == 0, status["message"]
    found: str = status["report"]["class"]
    return found


def test_a_run_that_freezes_something_else_does_not_go_on(claims: Path) -> None:
    assert run_here(job(), claims)[0] == 0
    given = job(["model.embed_tokens.*"])
    given["spec"]["engine"]["steps"] = 13
    given["spec"]["checkpoint"]["adopt"] = True
    code, status, _ = run_here(given, claims)
    assert code == 2
    assert "a run with another freeze ['model.embed_tokens.*', 'model.layers.0.*']" in status["message"]


def test_a_run_does_not_go_on_beside_other_frozen_weights(claims: Path) -> None:
    assert run_here(job(), claims)[0] == 0
    for file in (claims / "bases/other").iterdir():  # other weights under the same name
        shutil.copy(file, claims / "bases/llama" / file.name)
    given = job(steps=13)
    given["spec"]["checkpoint"]["adopt"] = True
    code, status, _ = run_here(given, claims)
    assert code == 2
    assert "another frozen weights" in status["message"]


def test_the_result_does_not_replace_the_model_that_holds_the_frozen_weights(claims: Path) -> None:
    given = job()
    given["spec"]["output"]["uri"] = "pvc://bases/llama"
    code, status, _ = run_here(given, claims)
    assert code == 2
    assert "the frozen weights belong to" in status["message"]
    assert (claims / "bases/llama/config.json").is_file()
