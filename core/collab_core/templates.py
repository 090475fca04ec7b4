"""Names of what `collab new` can begin with. Apart from `collab_core.run`, so that `--help` need not load that."""

from __future__ import annotations

from enum import StrEnum


class Template(StrEnum):
    """A run to begin with; `collab_core.run.template` has the text of each."""

    TINY_GPT = "tiny-gpt"
    CAUSAL_LM = "causal-lm"
    CUSTOM = "custom"
