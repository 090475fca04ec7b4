"""Reads a data set of the Hub as trainers do: `stream_in_pieces.py SOURCE '[[SEED, [BLOCKS, …]], …]'`.

Each trainer has a seed and several lives, in which it reads so many blocks and goes on where the last life was. Prints
as JSON what each of them read. A process of its own, because the Hub's client reads HF_ENDPOINT when it is imported.
"""

from __future__ import annotations

import json
import sys

from causal_lm import task

from collab_cli.failures import show_error
from collab_core.errors import CollabError
from collab_trainer.causal_lm import streaming
from collab_trainer.causal_lm import task as task_module

streaming.WINDOW = 16
task_module.MIN_BLOCK_BYTES = 60
task_module.BLOCK_BYTES_PER_TOKEN = 1

try:
    made = task(data=[json.loads(sys.argv[1])])
    trainers = []
    for seed, lives in json.loads(sys.argv[2]):
        position, seen = None, []
        for num_blocks in lives:
            blocks = made.blocks(seed=seed, position=position)
            seen += [document for _ in range(num_blocks) for document in next(blocks)]
            position = json.loads(json.dumps(blocks.position))
        trainers.append(seen)
    text = made.tokenizer.decode([int(token) for token in made._evaluation_rows.flatten()])
    print(json.dumps({"trainers": trainers, "evaluation": text}))
except CollabError as error:
    show_error(error)
    sys.exit(error.exit_code)
