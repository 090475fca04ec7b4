"""What `collab new` writes: the run file with every key, the join page, and for a custom task the package it comes
from.

To add a template, name it in `collab_core.templates` and put its `[task]` sections into `TASKS`. Files to write beside
the run file lie in `templates/<its name>/`: real files of a run called my-run, of which only this name is replaced.
Those in `templates/page/`, for people to join by, are written for every run.
"""

from __future__ import annotations

import re
from pathlib import Path

from collab_core.errors import Code, ConfigError
from collab_core.run.problems import NAME_RULE, show_value
from collab_core.run.runfile import parse_settings
from collab_core.templates import Template

FOLDER = Path(__file__).parent / "templates"
PAGE = "page"

TASKS = {
    Template.TINY_GPT: """\
[task]
name = "tiny-gpt"                 # what is trained, on what
package = ""                      # what to install for a task that is not built in
seed = 0                          # of the initial parameters

[task.options]                    # the task's own
corpus_seed = 0
layers = 2
heads = 4
width = 64
sequence_length = 128
""",
    Template.CAUSAL_LM: """\
[task]
name = "causal-lm"                # any causal model of transformers, on your own text
package = ""                      # what to install for a task that is not built in
seed = 0                          # of the initial parameters

[task.options]
sequence_length = 256             # tokens the model sees at once
gradient_checkpointing = false    # true: less memory, a third more computation

[task.options.model.config]       # of transformers; `collab publish-model` pins a published model instead
model_type = "llama"
hidden_size = 128
intermediate_size = 352
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 1024    # at least sequence_length; vocab_size follows from the tokenizer

[task.options.tokenizer]
kind = "bytes"                    # or file = "tokenizer.json", or repo and revision on the Hub

[[task.options.data]]             # one table per source; several are mixed by their weights
files = ["data/*.txt"]            # below this folder; others say --data-dir. Or repo and revision on the Hub
documents = "paragraph"           # in text files: "paragraph", "line" or "file"
weight = 1.0

[task.options.evaluation]
one_in = 64                       # one document in so many is held out
num_sequences = 32
""",
    Template.CUSTOM: """\
[task]
name = "my_run_task.pictures:Pictures"   # what is trained: a class of an installed package
package = ""                      # once it is published: what people are told to install, e.g. "my-run-task>=0.1"
seed = 0                          # of the initial parameters

[task.options]                    # the task's own, see task/src/my_run_task/pictures.py
size = 16
noise = 1.0
width = 16
""",
}

TO_BRING_HERE = "<!-- what to bring -->\n"
TO_BRING = {
    Template.CAUSAL_LM: """\
You bring the text: plain text files in a folder called `data`. Say where that folder is, with `--data-dir` behind every
`collab train` below, or in the form of the notebook under *options*:

```text
collab train collab1_… --data-dir FOLDER-WITH-DATA-IN-IT
```

""",
    Template.CUSTOM: """\
What is trained comes in a package of its own, `my-run-task`. The organiser of the run gives it to you: a wheel, or its
source. Install it where Collab is installed, and only if you trust who wrote it:

```text
pip install FILE-OR-FOLDER
```

""",
}
"""What a volunteer needs besides the invite, on the join page."""

_TEMPLATE = """\
# A Collab run. It is valid as it stands:
#     collab aux my-run      signs it, starts the first peer and prints the invite
#     collab demo my-run     tries it on this machine alone
# Once people have joined, a change here is a new run with a new invite.

name = "my-run"
description = ""                  # one or two sentences for the people you invite

{task}
[strategy]
name = "allreduce"                # or "diloco": many steps alone between two rounds; or "gossip": in pairs
target_batch_size = 256           # samples the whole swarm collects for one epoch (one update)
local_steps = "auto"              # only for "diloco": steps between two rounds; or a number
fragments = 1                     # only for "diloco": pieces of the model that are averaged in turn
overlap_steps = 0                 # only for "diloco": most steps taken while a round is under way
codec = "fp16"                    # how values travel: "none" (float32), "fp16", "int8", "int4" or "topk"
keep = 2048                       # only for "topk": 64, 128, 256, 512, 1024 or 2048 of 4096 values travel
reduction = "mean"                # or "centered-clip", "trimmed-mean": a few hostile peers change little
matchmaking_time_s = 10.0         # how long a round waits for peers that are late
averaging_timeout_s = 60.0        # how long a peer may be silent in a round before it is left out

[optimizer]
name = "adamw"                    # "adamw", "lamb" or "sgd"; for "diloco" also "adamw8bit"
lr = 0.01
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
momentum = 0.0                    # only for "sgd"
nesterov = false                  # only for "sgd" with momentum
weight_decay = 0.01
clip_norm = 1.0                   # largest norm of the averaged gradient; 0 turns clipping off
warmup_epochs = 5
decay = "constant"                # "constant", "linear" or "cosine"
decay_epochs = 0                  # epochs from warm-up to the final learning rate; 0 with "constant"
final_lr_fraction = 0.1           # final learning rate, as a part of lr

[outer]                           # only for "diloco": the update from everyone's steps
lr = 0.7
momentum = 0.9                    # 0 with keep = 512 or less
mix = 0.5                         # with overlap_steps: how much of its own a trainer keeps

[gossip]                          # only for "gossip", which also needs codec = "none"
stop = "never"                    # "converged": the run ends by itself when models agree and learn no more
consensus = 1e-3                  # models agree below this squared distance, relative to how far they came
plateau = 1e-3                    # the held-out loss falls by less than this part of itself in a window ...
window = 20                       # ... of so many meetings, ...
num_windows = 3                   # ... so many times in a row

[limits]
max_samples_per_peer = 4096       # most that one peer may add to an epoch: its greatest weight
quarantine_epochs = 10            # how long a peer that lied is kept out; doubled each time, 0: never
max_epochs = 0                    # the run ends after so many; 0 means it has no end

[checkpoints]
every = 1                         # epochs between two versions in an auxiliary's archive; 0 keeps none
keep = 20                         # newest versions that stay; of older ones, every 10th epoch does
prefer = "balanced"               # old versions: "storage" keeps them small, "speed" quick to get back
evaluate = 10                     # epochs between two measurements of the loss on held-out data; 0 never
remote = ""                       # where whole states go too: owner/name on the Hub, or a folder
upload_every = 10                 # epochs between two of those
checkpointers = []                # peer IDs of those who upload; none: the organiser's auxiliaries
"""


def run_template(name: str, template: Template = Template.TINY_GPT) -> str:
    """The text of a new `run.toml`.

    Args:
        name: of the run.
        template: what it trains.

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
    return _renamed(_TEMPLATE.format(task=TASKS[template]), name)


def template_files(name: str, template: Template) -> dict[str, bytes]:
    """Files to write beside the run file: path in the run's folder, content."""

    def made(text: str) -> bytes:
        return _renamed(text.replace(TO_BRING_HERE, TO_BRING.get(template, "")), name).encode()

    return {
        _renamed(path.relative_to(folder).as_posix(), name): made(path.read_text(encoding="utf-8"))
        for folder in (FOLDER / PAGE, FOLDER / template.value)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _renamed(text: str, name: str) -> str:
    """The run's name, and what Python can call it: several runs' packages can be installed side by side."""
    identifier = name.replace("-", "_")
    identifier = f"run_{identifier}" if identifier[0].isdigit() else identifier
    return text.replace("my-run", name).replace("my_run", identifier)
