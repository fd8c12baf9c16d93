"""A decoder as most are built today; its attention is handed in."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


# --8<-- [start:config]
@dataclass(frozen=True)
class Config:
    vocabulary: int = 256
    hidden: int = 64
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4  # grouped-query attention: query heads share them
    mlp: int = 176
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self):
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden={self.hidden}, heads={self.heads}, kv_heads="
                f"{self.kv_heads}: hidden must be a multiple of twice the heads"
                " (RoPE turns pairs), and heads a multiple of kv_heads"
            )


# --8<-- [end:config]
# --8<-- [start:decoder]
class Decoder(nn.Module):
    """Pre-norm, with RMSNorm, RoPE, grouped-query attention and SwiGLU."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, input_ids, position_ids, attention):
        """Logits, [batch, seq, vocabulary].

        input_ids, position_ids: [batch, seq], or this rank's slice of it. The
            positions are those in the whole sequence.
        attention: called as `attention(query, key, value, is_causal=True)`,
            each [batch, seq, heads, head_dim]; the one place where a token
            sees others.
        """
        hidden = self.embedding(input_ids)  # [batch, seq, hidden]
        rotation = self.rotation(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotation, attention)
        return self.head(self.norm(hidden))

    def rotation(self, position_ids):
        """RoPE's cosines and sines, each [batch, seq, 1, head_dim/2]."""
        head_dim = self.config.hidden // self.config.heads
        exponent = torch.arange(0, head_dim, 2, device=position_ids.device)
        frequency = self.config.rope_base ** -(exponent.float() / head_dim)
        angle = position_ids[..., None, None] * frequency  # in fp32
        return angle.cos(), angle.sin()


# --8<-- [end:decoder]
# --8<-- [start:layer]
class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        hidden, mlp = config.hidden, config.mlp
        head_dim = hidden // config.heads
        self.head_dim = head_dim
        self.attention_norm = RMSNorm(config)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, config.kv_heads * head_dim, bias=False)
        self.value = nn.Linear(hidden, config.kv_heads * head_dim, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = RMSNorm(config)
        self.gate = nn.Linear(hidden, mlp, bias=False)
        self.up = nn.Linear(hidden, mlp, bias=False)
        self.down = nn.Linear(mlp, hidden, bias=False)

    def forward(self, hidden, rotation, attention):
        x = self.attention_norm(hidden)  # [batch, seq, hidden]
        query, key, value = (
            projection(x).unflatten(2, (-1, self.head_dim))
            for projection in (self.query, self.key, self.value)
        )  # [batch, seq, heads or kv_heads, head_dim]
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        mixed = attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.flatten(2))
        x = self.mlp_norm(hidden)
        return hidden + self.down(F.silu(self.gate(x)) * self.up(x))


def rotate(x, cosine, sine):
    """RoPE: turns each pair (i, i + head_dim/2) by its angle, in x's dtype."""
    first, second = x.chunk(2, dim=-1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat(turned, dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.epsilon = config.norm_epsilon

    def forward(self, x):
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = precise.pow(2).mean(-1, keepdim=True)
        normed = precise * torch.rsqrt(mean_square + self.epsilon)
        return self.weight * normed.to(x.dtype)


# --8<-- [end:layer]
