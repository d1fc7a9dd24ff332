"""LoRA and DoRA on a saved model: the numbers of `peft` in a plain loop, a frozen base, and a result that peft reads."""

from __future__ import annotations

import io
import json
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tests.training.crash import Point, train_in_a_process
from tests.training.plain_loop import train_model_plainly
from tests.training.small import GPT2, LLAMA, SEQUENCE, VOCABULARY, engine, manifest
from tests.training.test_bit_equality import batches, packed, plan_for
from tests.training.test_crash_and_resume import losses
from tests.training.test_rows import UNMARKED, answers, save_tokenizer, write_rows
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.workloads.serving.adapter_files import ATTENTION, read_adapter
from busbar.workloads.serving.architecture import read_architecture
from busbar.workloads.training import demand as demand_module
from busbar.workloads.training.control import Control
from busbar.workloads.training.environment import run_from_manifest
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.export import digest_of, trained_weights
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.report import Lines
from busbar.workloads.training.run import run
from busbar.workloads.training.status import Status
from busbar.workloads.training.trainer import Trainer

CPU = torch.device("cpu")
STEPS = 5
ADAPTER = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
MODEL: Any = AutoModelForCausalLM
EXPERTS = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
SHARED_EXPERTS = {  # whose matrices have the names of those of the others
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved models, each with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("bases")
    models = {"llama": LLAMA, "gpt2": GPT2, "other": LLAMA, "experts": EXPERTS, "shared": SHARED_EXPERTS}
    for number, (name, given) in enumerate(models.items()):
        config = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, **given}
        torch.manual_seed(11 + number)
        model = MODEL.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
        model.save_pretrained(folder / name)
        save_tokenizer(folder / name, UNMARKED)
    return folder


def document(adapter: dict[str, Any] | None, base: str = "llama", **changes: Any) -> dict[str, Any]:
    changed = engine(steps=STEPS, model={"uri": f"pvc://bases/{base}"}, **changes)
    del changed["tokenizer"]
    if adapter is not None:
        changed["adapter"] = adapter
    return changed


def build(given: dict[str, Any], bases: Path, placement: str = "resident") -> Trainer:
    spec = parse_engine(given)
    recipe = open_model(spec, bases / (spec.model.uri or "").rpartition("/")[2], VOCABULARY, 0)
    return Trainer(spec, recipe, plan_for(spec, recipe, placement), CPU)


def train(given: dict[str, Any], bases: Path, placement: str) -> tuple[list[float], Trainer]:
    trainer, data = build(given, bases, placement), packed()
    found = [trainer.step(data).loss for _ in range(STEPS)]
    trainer.close()
    return found, trainer


def plain_adapter(base: Path, dtype: torch.dtype, **config: Any) -> Any:
    """The same with peft alone."""
    model = MODEL.from_pretrained(base, dtype=dtype)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", **config), autocast_adapter_dtype=False
        )


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "resident": ("llama", ADAPTER, {"target_modules": ["q_proj", "v_proj"]}, "resident"),
    "state on the host": ("llama", ADAPTER, {"target_modules": ["q_proj", "v_proj"]}, "optimizer-offload"),
    "dropout, state half on the host": (
        "llama",
        {**ADAPTER, "dropout": 0.2},
        {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.2},
        "half",
    ),
    "all layers, rank-stabilized": (
        "llama",
        {"rank": 4, "alpha": 8, "rsLora": True},
        {"target_modules": "all-linear", "use_rslora": True},
        "half",
    ),
    "another architecture": (
        "gpt2",
        {"rank": 4, "alpha": 8, "targets": ["attn.c_attn"]},
        {"target_modules": ["attn.c_attn"], "fan_in_fan_out": True},
        "half",
    ),
    "dropout, everything on the host": (
        "llama",
        {**ADAPTER, "dropout": 0.2},
        {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.2},
        "parameter-offload",
    ),
    "DoRA": (
        "llama",
        {**ADAPTER, "dora": True},
        {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
        "half",
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("base", "adapter", "config", "placement"), CASES.values(), ids=CASES.keys())
def test_an_adapter_equals_peft_in_a_plain_loop_bit_for_bit(
    base: str, adapter: dict[str, Any], config: dict[str, Any], placement: str, dtype: str, bases: Path
) -> None:
    given = document(adapter, base, dtype=dtype)
    ours, trainer = train(given, bases, placement)
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = plain_adapter(bases / base, kind, r=4, lora_alpha=8, **config)
    expected, weights = train_model_plainly(model, batches()[:STEPS], 2, given["optimizer"], True, kind)
    assert ours == expected
    theirs = dict(trainer.model.named_parameters())
    assert {name for name in weights if not torch.equal(weights[name], theirs[name])} == set()


def test_the_base_has_no_gradient_no_state_and_no_traffic(bases: Path) -> None:
    _, whole = train(document(None), bases, "optimizer-offload")
    _, trainer = train(document(ADAPTER), bases, "optimizer-offload")
    frozen = [each for each in trainer.model.parameters() if not each.requires_grad]
    before = MODEL.from_pretrained(bases / "llama").state_dict()
    base = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): each
        for name, each in trainer.model.named_parameters()
        if not each.requires_grad
    }
    assert all(torch.equal(before[name], each) for name, each in base.items())
    assert all(each.grad is None for each in frozen)
    region = trainer.device_arena.regions["base"]
    assert all(0 <= each.data_ptr() - region.data_ptr() < region.numel() for each in frozen)
    assert trainer.device_arena.used["base"] == trainer.plan.device["base"]
    assert trainer.plan.device["gradients"] < whole.plan.device["gradients"] / 4
    assert trainer.optimizer.loaded_bytes < whole.optimizer.loaded_bytes / 4
    assert trainer.plan.checkpoint_bytes < whole.plan.checkpoint_bytes / 4
    assert trainer.device_arena.peak["activations"] > 0.7 * trainer.plan.device["activations"]


def test_merging_is_in_the_plan(bases: Path) -> None:
    def demand(**changes: Any) -> Any:
        spec = parse_engine(document({**ADAPTER, **changes}))
        return measure_demand(open_model(spec, bases / "llama", VOCABULARY, 0), spec, CPU)

    alone, merged = demand(), demand(merge=True)
    assert alone.merge_bytes == 0
    assert merged.merge_bytes == 4 * 64 * 64 * 4
    assert merged.result_bytes == alone.result_bytes + alone.model_bytes


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_proj", "query"], "targets: query matches no linear layer.*down_proj, gate_proj, k_proj"),
        (["lm_head"], "lm_head matches no linear layer"),
        (["self_attn"], "self_attn matches no linear layer"),
        (["proj"], "proj matches no linear layer"),
    ],
)
def test_targets_that_match_nothing_are_refused_with_those_that_exist(
    targets: list[str], said: str, bases: Path
) -> None:
    spec = parse_engine(document({"rank": 4, "targets": targets}))
    with pytest.raises(InvalidJob, match=said):
        measure_demand(open_model(spec, bases / "llama", VOCABULARY, 0), spec, CPU)


def test_an_adapter_needs_saved_weights() -> None:
    with pytest.raises(InvalidJob, match=r"an adapter needs model\.uri"):
        parse_engine(engine(adapter={"rank": 4}))


def job(**changes: Any) -> dict[str, Any]:
    """A TrainingJob that adapts pvc://bases/llama to questions and answers."""
    whole = manifest()
    whole["spec"]["engine"] = document(
        changes.pop("adapter", ADAPTER),
        data={"uri": "pvc://rows/a.jsonl", "sequenceLength": SEQUENCE},
        **changes,
    ) | {"steps": 12}
    return whole


@pytest.fixture
def claims(bases: Path, tmp_path: Path) -> Path:
    shutil.copytree(bases, tmp_path / "bases")
    write_rows(tmp_path / "rows/a.jsonl", answers(300))
    return tmp_path


def run_here(given: dict[str, Any], claims: Path) -> tuple[int, dict[str, Any]]:
    status = Status()
    code = run(run_from_manifest(given, claims, None, {}), status, Control(), Lines("lora", io.StringIO()))
    return code, status.to_json()


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens).logits
    return found


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own
def test_the_result_is_an_adapter_that_peft_loads_and_merges(claims: Path) -> None:
    code, status = run_here(job(evaluation={}), claims)
    assert code == 0, status["message"]
    output = claims / "out/model"
    assert not (output / "config.json").exists()
    assert (output / "chat_template.jinja").read_text() == UNMARKED
    assert status["model"]["adapter"] == "LoRA of rank 4 on q_proj, v_proj"
    assert 0 < status["model"]["trainableParameters"] < status["model"]["parameters"] / 20
    assert status["evaluation"]["bitsPerByte"] > 0
    adapted = PeftModel.from_pretrained(MODEL.from_pretrained(claims / "bases/llama"), output)
    written = json.loads((output / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(claims / "bases/llama")
    assert (written["r"], repr(written["lora_alpha"])) == (4, "8")
    plain = logits(MODEL.from_pretrained(claims / "bases/llama"))
    assert not torch.allclose(logits(adapted), plain)

    code, status = run_here(job(evaluation={}, adapter={**ADAPTER, "merge": True}), claims)
    assert code == 0, status["message"]
    assert status["resumedFromStep"] == 12  # what is written changes nothing in the numbers
    assert not (output / "adapter_config.json").exists()
    theirs = adapted.state_dict()
    for name, each in load_file(output / "adapter/adapter_model.safetensors").items():
        assert torch.equal(each, theirs[name.replace(".weight", ".default.weight")])
    merged: Any = adapted.merge_and_unload()
    assert torch.equal(logits(MODEL.from_pretrained(output)), logits(merged))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own
def test_an_adapter_of_a_model_with_experts_is_written_for_peft_and_for_serving(claims: Path) -> None:
    given = job(adapter={"rank": 4})
    given["spec"]["engine"]["model"] = {"uri": "pvc://bases/experts"}
    code, status = run_here(given, claims)
    assert code == 0, status["message"]
    base, output = claims / "bases/experts", claims / "out/model"
    adapted = PeftModel.from_pretrained(MODEL.from_pretrained(base), output)
    assert not torch.allclose(logits(adapted), logits(MODEL.from_pretrained(base)))
    served = read_adapter(output, read_architecture(base), torch.float32)
    assert {name for _, name in served.factors} == set(ATTENTION)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own
@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"
)  # its own, too
def test_an_adapter_of_experts_is_merged(claims: Path) -> None:
    given = job(adapter={"rank": 4, "merge": True})
    given["spec"]["engine"]["model"] = {"uri": "pvc://bases/shared"}
    code, status = run_here(given, claims)
    assert code == 0, status["message"]
    output = claims / "out/model"
    adapted: Any = PeftModel.from_pretrained(
        MODEL.from_pretrained(claims / "bases/shared"), output / "adapter"
    )
    assert any("mlp.experts" in name for name in adapted.state_dict() if "lora_A" in name)
    assert torch.allclose(logits(MODEL.from_pretrained(output)), logits(adapted), atol=1e-4)


def test_a_killed_run_resumes_to_the_same_bits_from_checkpoints_of_the_adapter_alone(
    claims: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = tmp_path_factory.mktemp("whole")
    shutil.copytree(claims, whole, dirs_exist_ok=True)
    given = job(adapter={**ADAPTER, "dropout": 0.1})
    assert train_in_a_process(given, whole) == 0
    point = Point("snapshot:Snapshot", "begin", 2)  # which waits until the first checkpoint is written
    assert train_in_a_process(given, claims, point) == -signal.SIGKILL
    assert train_in_a_process(given, claims) == 0
    status = json.loads((claims / "status.json").read_text())
    assert status["resumedFromStep"] == 4
    assert status["replayMismatches"] == 0
    assert losses(claims) == losses(whole)
    ours, theirs = (load_file(each / "out/model/adapter_model.safetensors") for each in (claims, whole))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    state = load_file(claims / "out/model/checkpoints/step-00000012/state.safetensors")
    assert {name.partition("/")[2].split(".")[-3] for name in state if not name.startswith("rng/")} == {
        "lora_A",
        "lora_B",
    }

    for file in (claims / "bases/other").iterdir():  # other weights under the same name
        shutil.copy(file, claims / "bases/llama" / file.name)
    given["spec"]["engine"]["steps"] = 13
    given["spec"]["checkpoint"]["adopt"] = True
    code, status = run_here(given, claims)
    assert code == 2
    assert "another base model" in status["message"]


def test_the_result_does_not_replace_the_base(claims: Path) -> None:
    given = job()
    given["spec"]["output"]["uri"] = "pvc://bases/llama"
    code, status = run_here(given, claims)
    assert code == 2
    assert "the model that the adapter or the frozen weights belong to" in status["message"]
    assert (claims / "bases/llama/config.json").is_file()


def test_the_digest_of_the_weights_is_that_of_the_adapter(bases: Path) -> None:
    one, other = build(document(ADAPTER), bases), build(document(ADAPTER, "other"), bases)
    assert digest_of(trained_weights(one)) == digest_of(trained_weights(other))
    for trainer in (one, other):
        trainer.close()
