"""Small causal-lm runs for tests: a model of two layers, text made up on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from collab_core.run.settings import TaskSettings
from collab_trainer import TaskContext, load_task
from collab_trainer.causal_lm import CausalLM

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def options(**changes: Any) -> dict[str, Any]:
    """`[task.options]` of a tiny Llama on local text files."""
    return {
        "sequence_length": 32,
        "model": {"config": dict(LLAMA)},
        "data": [{"files": ["*.txt"]}],
        "evaluation": {"one_in": 8},
        **changes,
    }


def task(data_dir: Path | None = None, context: dict[str, Any] | None = None, **changes: Any) -> CausalLM:
    settings = TaskSettings(name="causal-lm", options=options(**changes))
    made = load_task(settings, TaskContext(data_dir=data_dir, **(context or {})))
    assert isinstance(made, CausalLM)
    return made


def write_texts(folder: Path, *, num_files: int = 3, num_documents: int = 200) -> set[str]:
    """Text files with numbered paragraphs; returns all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = set()
    for file in range(num_files):
        mine = [f"document {file}.{number}: the fox sees {number} birds" for number in range(num_documents)]
        (folder / f"{file}.txt").write_text("\n\n".join(mine) + "\n")
        documents |= set(mine)
    return documents


def word_tokenizer(*, end: str = "<end>") -> bytes:
    """A tokenizer.json that knows a few words."""
    words = ["<unk>", end, *["document", "the", "fox", "sees", "birds", ":", "."], *map(str, range(300))]
    vocabulary = {word: number for number, word in enumerate(words)}
    special = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": number, "content": words[number], **special} for number in (0, 1)],
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        }
    ).encode()
