"""causal-lm's model: the same first bytes on every machine, for any architecture."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from causal_lm import LLAMA, task

from collab_core.state.layout import Layout
from collab_trainer.causal_lm.model import model_root

SMALL: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 8},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True},
    "mamba": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "opt": {
        "model_type": "opt",
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    },
}
ROOTS = """
import sys, torch
sys.path.insert(0, "tests")
from causal_lm import task
from collab_trainer.causal_lm.model import model_root
from unit.test_causal_lm_model import SMALL
torch.set_num_threads(int(sys.argv[1]))
for kind in ("llama", "gpt2", "gemma2", "mixtral", "opt"):
    print(kind, model_root(task(model={"config": SMALL[kind]}).build_model()))
"""


@pytest.mark.parametrize("kind", SMALL)
def test_any_architecture_is_built_from_the_seed_and_trains(kind: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    made = task(model={"config": SMALL[kind]})
    model = made.build_model()
    torch.manual_seed(2)
    assert model_root(made.build_model()) == model_root(model), "torch's own seed does not matter"
    torch.set_rng_state(state)
    made.build_model()
    assert torch.equal(torch.get_rng_state(), state), "and is left alone"
    Layout.of(model)  # float32 throughout
    batch = {"tokens": torch.arange(2 * 33).view(2, 33)}
    loss = made.loss(model, batch)
    assert 5 < float(loss.detach()) < 8, "an untrained model knows nothing: ln 257 is 5.5"
    loss.backward()  # type: ignore[no-untyped-call]
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_another_seed_gives_another_model() -> None:
    from collab_core.run.settings import TaskSettings
    from collab_trainer import load_task

    settings = TaskSettings(name="causal-lm", seed=1, options=task().options.model_dump())
    assert model_root(load_task(settings).build_model()) != model_root(task().build_model())


def test_roots_do_not_depend_on_instruction_sets_or_threads() -> None:
    outputs = set()
    for capability, num_threads in (("default", "1"), ("avx2", "2")):
        finished = subprocess.run(
            [sys.executable, "-c", ROOTS, num_threads],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": "tests"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        outputs.add(finished.stdout)
    assert len(outputs) == 1, outputs


def test_norms_biases_and_ties_stay_as_the_architecture_wants_them() -> None:
    llama = task(model={"config": {**LLAMA, "tie_word_embeddings": True}}).build_model()
    assert llama.get_submodule("lm_head").weight is llama.get_submodule("model.embed_tokens").weight
    assert bool((llama.get_parameter("model.norm.weight") == 1).all())
    gemma = task(model={"config": SMALL["gemma2"]}).build_model()
    assert not gemma.get_parameter("model.norm.weight").any(), "Gemma adds one itself"
    gpt2 = task(model={"config": SMALL["gpt2"]}).build_model()
    assert not gpt2.get_parameter("transformer.h.0.attn.c_attn.bias").any()
    spread = float(llama.get_parameter("model.layers.0.mlp.up_proj.weight").detach().std())
    assert spread == pytest.approx(0.02, rel=0.1)
