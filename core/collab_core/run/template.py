"""The run file that `collab new` writes: every key with its default, and a word on what it is for."""

from __future__ import annotations

import re

from collab_core.errors import Code, ConfigError
from collab_core.run.problems import NAME_RULE, show_value
from collab_core.run.runfile import parse_settings

_TEMPLATE = """\
# A Collab run. It is valid as it stands:
#     collab aux {name}      signs it, starts the first peer and prints the invite
#     collab demo {name}     tries it on this machine alone
# Once people have joined, a change here is a new run with a new invite.

name = "{name}"
description = ""                  # one or two sentences for the people you invite

[task]
name = "tiny-gpt"                 # what is trained, on what
seed = 0                          # of the initial parameters

[task.options]                    # the task's own
corpus_seed = 0
layers = 2
heads = 4
width = 64
sequence_length = 128

[strategy]
name = "allreduce"
target_batch_size = 256           # samples the whole swarm collects for one epoch (one update)
codec = "fp16"                    # how values travel: "fp16" or "none" (float32, twice the bytes)
matchmaking_time_s = 10.0         # how long a round waits for peers that are late
averaging_timeout_s = 60.0        # how long a peer may be silent in a round before it is left out

[optimizer]
name = "adamw"                    # "adamw", "lamb" or "sgd"
lr = 0.01
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
momentum = 0.0                    # only for "sgd"
weight_decay = 0.01
clip_norm = 1.0                   # largest norm of the averaged gradient; 0 turns clipping off
warmup_epochs = 5
decay = "constant"                # "constant", "linear" or "cosine"
decay_epochs = 0                  # epochs from warm-up to the final learning rate; 0 with "constant"
final_lr_fraction = 0.1           # final learning rate, as a part of lr

[limits]
max_samples_per_peer = 4096       # most that one peer may add to an epoch: its greatest weight
max_epochs = 0                    # the run ends after so many; 0 means it has no end
"""


def run_template(name: str) -> str:
    """The text of a new `run.toml`.

    Raises:
        ConfigError: BAD_OPTION, the name is not allowed.
    """
    try:
        parse_settings({"name": name}, "name")
    except ConfigError:
        better = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:48].strip("-")
        raise ConfigError(
            Code.BAD_OPTION,
            f"A run cannot be named {show_value(name)}: a name is {NAME_RULE}.",
            fix=f"Try `collab new {better or 'my-run'}`.",
        ) from None
    return _TEMPLATE.format(name=name)
