"""Reads data sets of the Hub as trainers do.

Its argument is a list: `[{"source": …, "trainers": [[SEED, [BLOCKS, …]], …], "token": …}, …]`, where a source may be a
list of several. Each trainer has a seed and several lives, in which it reads so many blocks and goes on where the last
life was. Prints for each data set a line of JSON: what each of them read, or what was wrong. A process of its own, as
the Hub's client reads HF_ENDPOINT when it is imported; one for several, because that takes long.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from causal_lm import task

from collab_core.errors import CollabError
from collab_trainer.causal_lm import streaming
from collab_trainer.causal_lm import task as task_module

streaming.WINDOW = 16
task_module.MIN_BLOCK_CHARS = 60
task_module.BLOCK_CHARS_PER_TOKEN = 1


def read(
    source: dict[str, Any] | list[dict[str, Any]], trainers: list[tuple[int, list[int]]], token: str
) -> dict[str, Any]:
    os.environ["HF_TOKEN"] = token  # which it reads whenever it needs it
    try:
        made = task(data=source if isinstance(source, list) else [source])
        documents = []
        for seed, lives in trainers:
            position, seen = None, []
            for num_blocks in lives:
                blocks = made.blocks(seed=seed, position=position)
                seen += [document for _ in range(num_blocks) for document in next(blocks)]
                position = json.loads(json.dumps(blocks.position))
            documents.append(seen)
        text = made.tokenizer.decode([int(one) for one in made._evaluation_rows.flatten()])
    except CollabError as error:
        return {"code": str(error.code), "words": f"{error.message} {error.fix}"}
    return {"trainers": documents, "evaluation": text}


for case in json.loads(sys.argv[1]):
    print(json.dumps(read(**case)), flush=True)
os._exit(0)  # as the `collab` command ends: a thread of arrow may still be letting go of what it read
