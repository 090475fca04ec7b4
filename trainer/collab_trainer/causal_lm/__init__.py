"""The task causal-lm: any causal model of `transformers`, on local text or on data sets of the Hub.

Read in this order:
    options.py      what the run file may say
    task.py         the task as the training loop sees it
    model.py        from a config to a model; initialise.py gives it its first values
    tokenizer.py    text to tokens; packing.py: tokens to rows
    documents.py    local files; streaming.py: data sets of the Hub
    reading.py      a peer's own way through a source; shuffle.py, blocks.py
    held_out.py     what evaluation measures on
    files.py        where the organiser's side finds config, tokenizer and weights
    publish.py      the initial model as others find it; card.py
"""

from collab_trainer.causal_lm.files import collect_files
from collab_trainer.causal_lm.options import CausalLMOptions
from collab_trainer.causal_lm.task import CausalLM

__all__ = ["CausalLM", "CausalLMOptions", "collect_files"]
