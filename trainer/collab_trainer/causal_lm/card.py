"""The README that lies beside a published initial model."""

from __future__ import annotations

from collab_core.run.settings import RunSettings

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- collab
- initial-weights
---

# {name}: the initial model

{description}These are the weights that the collaborative run **{name}** begins with, before anybody trained. The
run is described by a `run.toml` that points here; whoever signs it checks that the weights have the root below.

| | |
|---|---|
| architecture | {architecture} |
| parameters | {num_parameters:,} |
| sequence length | {sequence_length:,} tokens |
| tokenizer | {tokenizer} |
| seed | {seed} |
| root | `{root}` |

The root is the BLAKE3 Merkle root of every parameter and buffer: equal roots, bit-identical models.

## Join the run

Ask its organiser for an invite, and for Collab if you do not have it. You need neither this repository nor an account:
config, tokenizer and weights come from the other peers.

```
collab train INVITE
```

## Use it elsewhere

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{place}")
```
"""


def model_card(
    settings: RunSettings,
    *,
    architecture: str,
    num_parameters: int,
    sequence_length: int,
    tokenizer: str,
    root: str,
    place: str,
) -> str:
    """A card in Markdown, with the metadata that the Hub reads."""
    words = " ".join(settings.description.split())
    return _CARD.format(
        name=settings.name,
        description=f"{words}\n\n" if words else "",
        architecture=architecture,
        num_parameters=num_parameters,
        sequence_length=sequence_length,
        tokenizer=tokenizer,
        seed=settings.task.seed,
        root=root,
        place=place,
    )
