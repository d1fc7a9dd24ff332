"""A model that its config describes wrongly is refused by the field, before it is trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.small import GPT2, LLAMA, VOCABULARY, engine
from tests.training.test_bit_equality import CPU, packed, plan_for
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import check_causal, measure_demand, open_model
from busbar.workloads.training.tokenizer import load_tokenizer, table_size
from busbar.workloads.training.trainer import Trainer

BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}


def demand_of(config: dict[str, Any]) -> None:
    spec = parse_engine(engine(model={"config": config}))
    measure_demand(open_model(spec, None, VOCABULARY, 0), spec, CPU)


@pytest.mark.parametrize(
    ("base", "bad", "said", "good"),
    [
        (LLAMA, {"num_layers": 3}, "num_layers: is not a field of LlamaConfig", {"num_hidden_layers": 3}),
        (LLAMA, {"hiden_size": 64}, "which has hidden_size", {"rope_theta": 500.0}),
        (GPT2, {"layers": 3}, "is not a field of GPT2Config", {"num_hidden_layers": 3}),
        (LLAMA, {"num_hidden_layers": 0}, "describes a llama model without layers", {"num_hidden_layers": 1}),
        (LLAMA, {"hidden_size": 0}, "cannot be trained here: ZeroDivisionError", {"hidden_size": 32}),
        (LLAMA, {"hidden_act": "relux"}, "cannot be trained here: KeyError: 'relux'", {"hidden_act": "relu"}),
        (LLAMA, {"num_key_value_heads": 3}, "cannot be trained here", {"num_key_value_heads": 4}),
        (LLAMA, {"num_attention_heads": 5}, "not a multiple", {"num_attention_heads": 2}),
        (
            LLAMA,
            {"model_type": "llamax"},
            r"Unrecognized model .* \.\.\.; correct it",
            {"model_type": "mistral"},
        ),
        (LLAMA, {"model_type": "clip"}, "vocabulary of its own|not a field", {"model_type": "qwen2"}),
    ],
    ids=str,
)
def test_a_bad_config_is_refused_and_its_neighbour_passes(
    base: dict[str, Any], bad: dict[str, Any], said: str, good: dict[str, Any]
) -> None:
    with pytest.raises(InvalidJob, match=said) as refusal:
        demand_of({**base, **bad})
    assert refusal.value.field.startswith("spec.engine.model")
    assert len(str(refusal.value)) < 500
    demand_of({**base, **good})


def test_a_model_that_sees_the_tokens_it_has_to_predict_is_refused() -> None:
    spec = parse_engine(engine(model={"config": BERT}))
    recipe = open_model(spec, None, VOCABULARY, 0)
    with pytest.raises(InvalidJob, match="BertLMHeadModel is not causal as it is configured"):
        Trainer(spec, recipe, plan_for(spec, recipe, "resident"), CPU)
    spec = parse_engine(engine(model={"config": {**BERT, "is_decoder": True}}))
    recipe = open_model(spec, None, VOCABULARY, 0)
    trainer = Trainer(spec, recipe, plan_for(spec, recipe, "resident"), CPU)
    assert math.isfinite(trainer.step(packed()).loss)
    trainer.close()


@pytest.mark.parametrize("config", [LLAMA, GPT2, {"model_type": "mixtral", "num_local_experts": 4}], ids=str)
def test_the_check_passes_causal_models_and_leaves_no_trace(config: dict[str, Any]) -> None:
    settings = {**LLAMA, **config} if config["model_type"] == "mixtral" else dict(config)
    make: Any = AutoModelForCausalLM.from_config
    torch.manual_seed(1)
    model = make(AutoConfig.for_model(settings.pop("model_type"), vocab_size=VOCABULARY, **settings)).train()
    state = torch.get_rng_state()
    check_causal(model, VOCABULARY)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidJob, match=r"spec\.engine\.tokenizer\.uri: .* is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_with_gaps_needs_a_row_for_its_largest_id() -> None:
    assert table_size(Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))) == 8
