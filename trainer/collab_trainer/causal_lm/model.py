"""A causal model of `transformers`, from a config and never from anybody's code; its weights only from safetensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from collab_core.errors import Code, TaskError
from collab_core.state.layout import Layout
from collab_core.state.tensors import tree_of
from collab_trainer.causal_lm.initialise import DEFAULT_STD, seeded
from collab_trainer.causal_lm.tokenizer import Tokenizer
from collab_trainer.options import did_you_mean

# Keys of a config that choose code or a form of the weights, not a model. `auto_map` names Python files of a
# repository, an attention implementation may be a repository of kernels: neither is anybody's to choose for a peer.
IGNORED_KEYS = frozenset(
    {"auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "_name_or_path"}
    | {"_experts_implementation", "experts_implementation", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
WEIGHTS = "model*.safetensors"


def read_config(fields: dict[str, Any], tokenizer: Tokenizer, sequence_length: int, *, is_typed: bool) -> Any:
    """The config of the run's model.

    Args:
        fields: `config` of the run file, or a config.json.
        tokenizer: whose tokens the model must know.
        sequence_length: what the model must be able to see at once.
        is_typed: a person wrote it: unknown keys are mistakes, and the vocabulary follows from the tokenizer.

    Raises:
        TaskError: BAD_MODEL.
    """
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    logging.disable_progress_bar()  # only the command line talks to people
    logging.set_verbosity(logging.CRITICAL)
    fields = {key: value for key, value in fields.items() if key not in IGNORED_KEYS}
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        guess = did_you_mean(str(model_type), list(CONFIG_MAPPING.keys()))
        raise _bad(f"model_type = {model_type!r} is no kind of model that transformers knows. {guess}".strip())
    if "quantization_config" in fields:
        raise _bad("the weights are quantised, and training needs them in float32")
    config_class = CONFIG_MAPPING[model_type]
    if is_typed:
        _check_keys(fields, config_class)
        ends = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": tokenizer.end_of_document}
        fields = {"vocab_size": tokenizer.num_tokens, **ends, **fields}
    config = _in_words(lambda: config_class.from_dict({**fields, "use_cache": False}))
    _check_sizes(config, tokenizer, sequence_length)
    return config


def build_model(config: Any, *, seed: int | None) -> torch.nn.Module:
    """A model with this config, in float32 on the CPU; its values are from the seed, or of no importance if None."""
    from transformers import AutoModelForCausalLM

    def build() -> torch.nn.Module:
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        return model

    _check_memory(_in_words(lambda: _num_bytes(build)))
    if seed is None or torch.get_default_device().type == "meta":  # on meta only sizes are asked for
        with torch.random.fork_rng(devices=[]):
            unimportant: torch.nn.Module = _in_words(build)
        return unimportant
    text = config.get_text_config()
    std = getattr(text, "initializer_range", None) or getattr(text, "init_std", None) or DEFAULT_STD
    made: torch.nn.Module = _in_words(lambda: seeded(build, seed=seed, std=float(std)))
    return made


def load_model(config: Any, folder: Path) -> torch.nn.Module:
    """A model with this config and the weights in a folder: all of them, from safetensors only.

    Raises:
        TaskError: BAD_MODEL.
    """
    from transformers import AutoModelForCausalLM

    if not list(folder.glob(WEIGHTS)):
        raise _bad(f"{str(folder)!r} has no {WEIGHTS} (weights in other formats can hold code, and are not read)")
    model, info = _in_words(
        lambda: AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    )
    if missing := sorted(info["missing_keys"]):
        raise _bad(f"the weights in {str(folder)!r} lack {missing[0]} (and {len(missing) - 1} more)")
    loaded: torch.nn.Module = model
    return loaded


def checkpoint_gradients(model: torch.nn.Module) -> None:
    """Compute activations again in the backward pass instead of keeping them."""
    _in_words(lambda: model.gradient_checkpointing_enable({"use_reentrant": False}))  # type: ignore[operator]


def model_root(model: torch.nn.Module) -> str:
    """Root of the parameters and buffers alone: the identity of published weights, whatever the optimizer."""
    layout = Layout.of(model)
    return tree_of(layout.views(layout.read(model))).root


def _check_keys(fields: dict[str, Any], config_class: Any) -> None:
    """transformers takes any key and says nothing, so a mistyped one would silently do nothing."""
    known = {*config_class().to_dict(), *getattr(config_class, "attribute_map", {})} - IGNORED_KEYS - {"model_type"}
    for key in fields:
        if key not in known:
            raise _bad(f"the config of {config_class.model_type} has no {key!r}. {did_you_mean(key, known)}".strip())


def _check_sizes(config: Any, tokenizer: Tokenizer, sequence_length: int) -> None:
    text = config.get_text_config()
    if (vocabulary := getattr(text, "vocab_size", None)) is None or vocabulary < tokenizer.num_tokens:
        raise _bad(f"vocab_size = {vocabulary} is less than the {tokenizer.num_tokens} tokens of the tokenizer")
    positions = getattr(text, "max_position_embeddings", None)
    if type(positions) is int and sequence_length > positions:
        raise _bad(
            f"sequence_length = {sequence_length} is more than the model's max_position_embeddings = {positions}"
        )


def _num_bytes(build: Callable[[], torch.nn.Module]) -> int:
    """How much a model would take, without making it."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return sum(parameter.numel() * 4 for parameter in build().parameters())


def _check_memory(num_bytes: int) -> None:
    """A run's config comes from a stranger: a model that cannot fit must end in words, not in a machine that hangs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > memory:
        raise TaskError(
            Code.BAD_MODEL,
            f"The model's parameters alone take {num_bytes / 1e9:.1f} GB; this machine has {memory / 1e9:.1f} GB.",
            fix="Join from a machine with more memory, or make the model smaller.",
        )


def _in_words(action: Callable[[], Any]) -> Any:
    """Whatever transformers raises for a config that cannot be, in one line."""
    try:
        return action()
    except TaskError:
        raise
    except Exception as error:  # noqa: BLE001 - each architecture has its own way to fail
        words = " ".join(str(error).split())[:300].rstrip(".")
        raise _bad(f"transformers cannot make it: {type(error).__name__}: {words}") from None


def _bad(what: str) -> TaskError:
    return TaskError(
        Code.BAD_MODEL,
        f"The run's model cannot be used: {what.rstrip('.')}.",
        fix="Change [task.options.model] in run.toml.",
    )
