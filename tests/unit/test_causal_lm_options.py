"""causal-lm's options: every mistake is said in words, before anything is joined or downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from causal_lm import LLAMA, options, task, word_tokenizer, write_texts

from collab_core.errors import Code, ConfigError, TaskError
from collab_core.run import RunFolder, run_template
from collab_core.run.settings import TaskSettings
from collab_core.templates import Template
from collab_trainer import TaskContext, load_task, prepare
from collab_trainer.causal_lm import CausalLMOptions
from collab_trainer.options import read_options

COMMIT = "ab" * 20


def read(**changes: Any) -> CausalLMOptions:
    return read_options(TaskSettings(name="causal-lm", options=options(**changes)), CausalLMOptions)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence_length": 1}, ["sequence_length = 1", "from 8 to 1048576"]),
        ({"sequence_lenght": 64}, ["no option 'sequence_lenght'", "Did you mean 'sequence_length'?"]),
        ({"model": {}}, ["[task.options.model]", "exactly one of config, repo and path"]),
        ({"model": {"config": LLAMA, "path": "x"}}, ["exactly one of", "'config', 'path'"]),
        ({"model": {"repo": "a/b"}}, ["revision is missing", "/a/b/commits/main", "git ls-remote"]),
        ({"model": {"repo": "a/b", "revision": "main"}}, ["revision = 'main' can move", "40 hex digits"]),
        ({"model": {"repo": "../b", "revision": COMMIT}}, ["not the name of a repository"]),
        ({"model": {"path": "x", "revision": COMMIT}}, ["revision is for a repo"]),
        ({"model": {"path": "x", "root": "abc"}}, ["model.root = 'abc'"]),
        ({"model": {"confg": LLAMA}}, ["no option 'model.confg'", "Did you mean 'config'?", "keys", "repo"]),
        ({"model": "gpt2"}, ["model = 'gpt2'", "a table"]),
        ({"tokenizer": {"kind": "bytes", "file": "t.json"}}, ["one place", "kind and file"]),
        ({"tokenizer": {"kind": "words"}}, ["tokenizer.kind = 'words'", "'bytes'"]),
        ({"data": []}, ["data = []", "at least 1"]),
        ({"data": [{}]}, ["[task.options.data.0]", "either files or a repo"]),
        ({"data": [{"files": ["*.txt"], "weight": 0}]}, ["data.0.weight = 0", "greater than 0"]),
        ({"data": [{"files": ["*.txt"], "wieght": 1}]}, ["data.0.wieght", "Did you mean 'weight'?"]),
        ({"data": [{"files": ["/etc/passwd"]}]}, ["'/etc/passwd'", "below the data folder", "--data-dir"]),
        ({"data": [{"files": ["../../*.txt"]}]}, ["without '..'"]),
        ({"data": [{"files": ["a.bin"]}]}, ["say what the files ['a.bin'] are"]),
        ({"data": [{"files": ["a.txt", "b.jsonl"]}]}, ["say what the files"]),
        ({"data": [{"repo": "wikitext", "revision": COMMIT}]}, ["not the name of a repository"]),
        ({"data": [{"repo": "a/b", "revision": "v1"}]}, ["/datasets/a/b/commits/main"]),
        ({"evaluation": {"one_in": 1}}, ["evaluation.one_in = 1", "from 2 to"]),
        ({"gradient_checkpointing": 1}, ["gradient_checkpointing = 1", "true or false"]),
    ],
)
def test_a_bad_option_is_refused_in_words(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TaskError) as caught:
        read(**changes)
    assert caught.value.code is Code.BAD_TASK_OPTION
    for word in words:
        assert word in str(caught.value)


def test_options_that_must_be_there_are_named() -> None:
    with pytest.raises(TaskError, match="The task causal-lm needs the option 'model'"):
        read_options(TaskSettings(name="causal-lm", options={"data": [{"files": ["*.txt"]}]}), CausalLMOptions)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "lama"}, ["'lama'", "Did you mean 'llama'?"]),
        ({}, ["model_type = None"]),
        ({**LLAMA, "hiden_size": 32}, ["no 'hiden_size'", "Did you mean 'hidden_size'?"]),
        ({**LLAMA, "hidden_size": "32"}, ["hidden_size", "expected int"]),
        ({**LLAMA, "num_attention_heads": 5}, ["not a multiple of the number of attention heads"]),
        ({**LLAMA, "hidden_act": "nope"}, ["nope"]),
        ({**LLAMA, "vocab_size": 100}, ["vocab_size = 100 is less than the 257 tokens"]),
        ({**LLAMA, "max_position_embeddings": 16}, ["sequence_length = 32", "max_position_embeddings = 16"]),
        ({**LLAMA, "hidden_size": 2**20, "intermediate_size": 2**22}, ["GB; this machine has"]),
        ({"model_type": "bert"}, ["no 'foo'"]),
        ({"model_type": "t5"}, ["transformers cannot make it"]),
    ],
)
def test_a_config_that_cannot_be_is_refused_in_words(config: dict[str, Any], words: list[str]) -> None:
    if config.get("model_type") == "bert":
        config = {**config, "foo": 1}
    with pytest.raises(TaskError) as caught:
        # an empty table is as good as none, so give it something that is no model
        task(model={"config": config or {"hidden_size": 32}}).build_model()
    assert caught.value.code is Code.BAD_MODEL
    for word in words:
        assert word in str(caught.value)


def test_nothing_in_a_config_can_choose_code() -> None:
    """`auto_map` names Python files, an attention implementation may be a repository of kernels."""
    fields = {**LLAMA, "vocab_size": 257, "auto_map": {"AutoModelForCausalLM": "evil.Evil"}}
    fields |= {"_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel", "dtype": "float16"}
    assets = {"config.json": json.dumps(fields).encode()}
    made = task(context={"assets": assets}, model={"path": "x"})
    model = made.build_model()
    assert type(model).__module__.startswith("transformers.models.llama")
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
    quantised = json.dumps({**fields, "quantization_config": {"quant_method": "bitsandbytes"}}).encode()
    with pytest.raises(TaskError, match="quantised"):
        task(context={"assets": {"config.json": quantised}}, model={"path": "x"})


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff"])
def test_a_config_file_that_is_none_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(TaskError, match=r"config\.json is not") as caught:
        task(context={"assets": {"config.json": data}}, model={"path": "x"})
    assert caught.value.code is Code.BAD_MODEL


# --- tokenizers ---


def test_bytes_are_tokens_and_one_more_ends_a_document() -> None:
    made = task()
    assert made.tokenizer.num_tokens == 257
    assert made.config.vocab_size == 257
    assert made.config.eos_token_id == 256
    assert made.tokenizer.encode(["aé"]) == [[97, 0xC3, 0xA9]]
    assert made.tokenizer.decode([97, 256, 0xC3, 0xA9]) == "aé"


def test_a_tokenizer_file_travels_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "words.json").write_bytes(word_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    folder = RunFolder.create(tmp_path / "run", run_template("run", Template.CAUSAL_LM))
    settings = folder.settings().model_copy(
        update={"task": TaskSettings(name="causal-lm", options=options(tokenizer={"file": "../words.json"}))}
    )
    prepared = prepare(settings, folder.path)
    assert prepared.assets.keys() == {"tokenizer.json", "tokenizer_config.json"}
    made = load_task(settings.task, TaskContext(assets=prepared.assets))  # a volunteer: no folder, no Hub
    assert made.tokenizer.end_of_document == 1  # type: ignore[attr-defined]
    assert made.tokenizer.encode(["the fox sees 7 birds"]) == [[3, 4, 5, 16, 6]]  # type: ignore[attr-defined]
    assert made.config.vocab_size == 309  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tokenizer", "files", "words"),
    [
        ({}, {}, ["does not say which token ends a document", "<unk>, <end>"]),
        ({"end_of_document": "<eos>"}, {}, ["no token '<eos>'"]),
        ({}, {"tokenizer_config.json": b'{"eos_token": "<nope>"}'}, ["no token '<nope>'"]),
        ({}, {"config.json": b'{"eos_token_id": 999}'}, ["no token 999"]),
    ],
)
def test_a_tokenizer_without_an_end_of_document_is_refused(
    tokenizer: dict[str, Any], files: dict[str, bytes], words: list[str]
) -> None:
    with pytest.raises(TaskError) as caught:
        task(
            context={"assets": {"tokenizer.json": word_tokenizer(), **files}},
            tokenizer={"file": "tokenizer.json", **tokenizer},
        )
    assert caught.value.code is Code.BAD_TOKENIZER
    for word in words:
        assert word in str(caught.value)


def test_a_broken_tokenizer_file_is_refused_in_words() -> None:
    with pytest.raises(TaskError, match=r"tokenizer\.json cannot be read") as caught:
        task(context={"assets": {"tokenizer.json": b"{}"}}, tokenizer={"file": "tokenizer.json"})
    assert caught.value.code is Code.BAD_TOKENIZER


def test_a_missing_tokenizer_or_model_file_names_its_place(tmp_path: Path) -> None:
    for changes, code in (
        ({"tokenizer": {"file": "nope.json"}}, Code.BAD_TOKENIZER),
        ({"model": {"path": "nope"}}, Code.BAD_MODEL),
    ):
        settings = RunFolder.create(tmp_path / code.name.lower(), run_template("run")).settings()
        settings = settings.model_copy(update={"task": TaskSettings(name="causal-lm", options=options(**changes))})
        with pytest.raises(TaskError, match="nope") as caught:
            prepare(settings, tmp_path)
        assert caught.value.code is code


# --- data ---


def test_missing_data_names_the_place_and_the_flag(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"No file matches \*\.txt in") as caught:
        task(tmp_path, {"needs_data": True})
    assert str(tmp_path) in caught.value.message
    assert "--data-dir" in caught.value.fix
    with pytest.raises(TaskError, match="You have not said where yours are") as caught:
        task(None, {"needs_data": True})
    assert "--data-dir" in caught.value.fix
    task(None)  # an auxiliary needs none


@pytest.mark.parametrize(
    ("files", "source", "words"),
    [
        ({"a.txt": b""}, {"files": ["*.txt"]}, ["no document", "a.txt"]),
        ({"a.jsonl": b'{"content": "x"}\n'}, {"files": ["*.jsonl"]}, ["no column 'text'", "content"]),
        ({"a.jsonl": b'{"text": 3}\n'}, {"files": ["*.jsonl"]}, ["'text' holds int64, not text"]),
        ({"a.jsonl": b'{"text": ["a"]}\n'}, {"files": ["*.jsonl"]}, ["not text"]),
        ({"a.jsonl": b'{"text": "a"}\n{"te'}, {"files": ["*.jsonl"]}, ["a.jsonl", "cannot be read as json"]),
        ({"a.jsonl": b""}, {"files": ["*.jsonl"]}, ["a.jsonl"]),
        ({"a.parquet": b"PAR1 no PAR1"}, {"files": ["*.parquet"]}, ["a.parquet", "cannot be read as parquet"]),
        ({"a.txt": b"fine", "b.txt": b"\xff\xfe\xff"}, {"files": ["*.txt"]}, ["b.txt'", "cannot be read as text"]),
    ],
    ids=["empty", "no field", "numbers", "lists", "cut", "empty jsonl", "broken parquet", "no UTF-8"],
)
def test_data_that_cannot_be_used_is_refused_in_words(
    tmp_path: Path, files: dict[str, bytes], source: dict[str, Any], words: list[str]
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(TaskError) as caught:
        task(tmp_path, data=[source]).blocks(seed=1, position=None)
    assert caught.value.code is Code.NO_DATA
    for word in words:
        assert word in str(caught.value)


def test_nothing_held_out_says_what_to_change(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one long paragraph")
    made = task(tmp_path, evaluation={"one_in": 1_000_000})
    with pytest.raises(TaskError, match="None of the documents is held out") as caught:
        made.evaluate(made.build_model())
    assert caught.value.code is Code.NO_DATA
    assert "one_in" in caught.value.fix


def test_the_template_is_valid_and_its_model_can_be_built(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", run_template("run", Template.CAUSAL_LM))
    write_texts(folder.path / "data")
    made = load_task(folder.settings().task, TaskContext(data_dir=folder.path, needs_data=True))
    assert made.build_model()
    assert len(next(made.blocks(seed=1, position=None))) > 0
    with pytest.raises(ConfigError):
        run_template("No Name", Template.CAUSAL_LM)
