"""The README beside a checkpoint."""

from __future__ import annotations

from collab_core.checkpoints.statement import Statement
from collab_core.run.manifest import Manifest

_CARD = """\
---
library_name: transformers
tags:
- collab
---

# {name}

{description}A checkpoint of the collaborative run **{name}**, trained by volunteers with Collab.

| | |
|---|---|
| run | `{run_id}` |
| epoch | {epoch:,} |
| samples so far | {samples:,} |
| loss while training | {loss} |
| loss on held-out data | {held_out} |
| root | `{root}` |

The root is the BLAKE3 Merkle root of the whole state: weights here and in `collab-state.safetensors`, where the
optimizer's are. `collab.json` says so, signed by a peer that the organiser chose. A peer of the run that finds
nobody else alive goes on from here.

## Use it

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{place}")
```

## Join the run

Ask its organiser for an invite, and for Collab if you do not have it.

```
collab train INVITE
```
"""


def checkpoint_card(manifest: Manifest, statement: Statement) -> str:
    """In Markdown, with the metadata that the Hub reads."""
    settings = manifest.settings
    words = " ".join(settings.description.split())
    return _CARD.format(
        name=settings.name,
        description=f"{words}\n\n" if words else "",
        run_id=statement.run_id,
        epoch=statement.epoch,
        samples=statement.history_samples,
        loss=_number(statement.loss),
        held_out=_number(statement.held_out_loss),
        root=statement.root,
        place=settings.checkpoints.remote,
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
