"""Text to tokens and back: bytes, or a `tokenizer.json` that came with the run. Nothing is downloaded here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from collab_core.errors import Code, TaskError
from collab_trainer.causal_lm.options import CausalLMOptions

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CONFIG = "config.json"
NUM_BYTES = 256


class Tokenizer(Protocol):
    """What the task needs of a tokenizer. Used by several threads at once."""

    num_tokens: int
    """Every token is below it."""
    end_of_document: int

    def encode(self, documents: Sequence[str]) -> list[list[int]]:
        """The tokens of each document, without any token around them."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text for people; tokens that are no text may be left out."""


class ByteTokenizer:
    """Every byte of UTF-8 is a token; one more ends a document."""

    num_tokens = NUM_BYTES + 1
    end_of_document = NUM_BYTES

    def encode(self, documents: Sequence[str]) -> list[list[int]]:
        return [list(document.encode(errors="replace")) for document in documents]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library: data and nothing else, so it cannot run anybody's code.

    Args:
        data: the tokenizer.json.
        end_of_document: the token, as text or as a number.
    """

    def __init__(self, data: bytes, end_of_document: str | int | None) -> None:
        from tokenizers import Tokenizer as Fast

        try:
            self._fast = Fast.from_str(data.decode())
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception for whatever is wrong with a file
            raise _bad(f"{TOKENIZER} cannot be read: {_first_line(error)}.") from None
        self._fast.no_truncation()
        self._fast.no_padding()
        self.num_tokens: int = max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        token = self._fast.token_to_id(end_of_document) if isinstance(end_of_document, str) else end_of_document
        if token is None or not 0 <= token < self.num_tokens:
            special = [added.content for added in self._fast.get_added_tokens_decoder().values() if added.special]
            what = "does not say which token ends a document"
            if end_of_document is not None:
                what = f"has no token {end_of_document!r} to end a document with"
            raise _bad(f"The tokenizer {what}; its special tokens are: {', '.join(special[:20]) or 'none'}.")
        self.end_of_document: int = token

    def encode(self, documents: Sequence[str]) -> list[list[int]]:
        encoded = self._fast.encode_batch_fast(list(documents), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._fast.decode(list(tokens), skip_special_tokens=True))


def load_tokenizer(options: CausalLMOptions, assets: Mapping[str, bytes]) -> Tokenizer:
    """The run's tokenizer, from the files that came with the run.

    Raises:
        TaskError: BAD_TOKENIZER.
    """
    chosen = options.tokenizer
    if chosen.kind == "bytes" or (TOKENIZER not in assets and not (chosen.repo or chosen.file)):
        return ByteTokenizer()
    return FileTokenizer(assets[TOKENIZER], chosen.end_of_document or _end_of_document(assets))


def _end_of_document(assets: Mapping[str, bytes]) -> str | int | None:
    """What the files call the end of a text: the tokenizer's own word first, then the model's."""
    token = read_json(assets.get(TOKENIZER_CONFIG, b"{}"), TOKENIZER_CONFIG).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        return token
    number = read_json(assets.get(CONFIG, b"{}"), CONFIG).get("eos_token_id")
    if isinstance(number, list):
        number = number[0] if number else None
    return number if type(number) is int else None


def read_json(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object from a file of the run.

    Raises:
        TaskError: BAD_MODEL.
    """
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise _bad(f"{name} is not JSON: {_first_line(error)}.", Code.BAD_MODEL) from None
    if not isinstance(value, dict):
        raise _bad(f"{name} is not a JSON object.", Code.BAD_MODEL)
    return value


def _bad(message: str, code: Code = Code.BAD_TOKENIZER) -> TaskError:
    return TaskError(
        code,
        message,
        fix="Change [task.options.tokenizer] in run.toml: another file or repo, or name the token with end_of_document."
        if code is Code.BAD_TOKENIZER
        else "Take the file from a model that transformers can load.",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]
