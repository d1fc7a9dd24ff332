"""Tiny random models and a tokenizer, written as `transformers` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "class Näive(Exception):\n    '''Zażółć gęślą jaźń — 你好, 世界 🙂'''\n",
    "for index in range(10):\n    print(index, 'hello world')\n",
    "import os\nimport sys\n\nif __name__ == '__main__':\n    sys.exit(main())\n",
] * 4
VOCAB = 384
EOS = 0


CLASSES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
}
MORE: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
}


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer; token 0 is the end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def config_of(family: str, **changes: Any) -> Any:
    base: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "initializer_range": 0.4,
    }
    return CLASSES[family](**(base | MORE.get(family, {}) | changes))


def save_model(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Writes model and tokenizer to `folder` and returns the transformers model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, **changes))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers zeroes them, which would hide a missing bias
                parameter.normal_(0, 0.3)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    model.eval()
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})
    )
    return model


def save_deep_model(folder: Path) -> None:
    """A model with so many layers that a long answer takes seconds, longer than the test's other steps."""
    save_model(folder, num_hidden_layers=64)


def greedy(model: Any, prompt: list[int], count: int, **more: Any) -> list[int]:
    """transformers' greedy tokens after `prompt`, up to and including the end token (`more`: goes to `generate`)."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=EOS,
            **more,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
