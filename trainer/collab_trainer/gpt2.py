"""GPT-2 in plain torch, with the names and shapes that transformers gives its parameters.

transformers' own takes more than three seconds of a processor to import, on top of torch: too long for a first try.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True, slots=True)
class GPT2Config:
    """The sizes of a GPT-2."""

    vocabulary: int
    positions: int
    width: int
    layers: int
    heads: int

    def to_json_string(self) -> str:
        """As `AutoModelForCausalLM.from_pretrained` reads it."""
        fields = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocabulary,
            "n_positions": self.positions,
            "n_embd": self.width,
            "n_layer": self.layers,
            "n_head": self.heads,
            "activation_function": "gelu_pytorch_tanh",
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": "float32",
        }
        return json.dumps(fields, indent=2) + "\n"


class Projection(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as GPT-2 has it."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_inputs, num_outputs))
        self.bias = nn.Parameter(torch.empty(num_outputs))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return functional.linear(values, self.weight.T, self.bias)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.c_attn = Projection(config.width, 3 * config.width)
        self.c_proj = Projection(config.width, config.width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.c_attn(stream).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: torch.Tensor = self.c_proj(seen.transpose(1, 2).flatten(-2))
        return mixed


class MLP(nn.Module):
    """Four times as wide inside."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Projection(config.width, 4 * config.width)
        self.c_proj = Projection(4 * config.width, config.width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.c_proj(functional.gelu(self.c_fc(stream), approximate="tanh"))
        return projected


class Layer(nn.Module):
    """What every position gathers from those before it, and makes of it."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        stream = stream + self.attn(self.ln_1(stream))
        made: torch.Tensor = self.mlp(self.ln_2(stream))
        return stream + made


class Transformer(nn.Module):
    """Everything below the logits."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = _embedding(config.vocabulary, config.width)
        self.wpe = _embedding(config.positions, config.width)
        self.h = nn.Sequential(*(Layer(config) for _ in range(config.layers)))
        self.ln_f = nn.LayerNorm(config.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        stream: torch.Tensor = self.ln_f(self.h(self.wte(tokens) + self.wpe(positions)))
        return stream


def _embedding(count: int, width: int) -> nn.Embedding:
    return nn.Embedding(count, width, _weight=torch.empty(count, width))  # not drawn at random, as it is replaced


class GPT2(nn.Module):
    """Tokens to logits. Its parameters, which whoever builds it has to fill, are all of its state."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False, device="meta")
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.transformer(tokens))
        return logits
