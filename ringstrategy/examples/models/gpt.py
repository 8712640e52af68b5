"""A small byte-level transformer (GPT-2's shape: pre-norm blocks, learned positions)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringstrategy.examples.models.example import ADAMW, Example, MakeOptimizer

BYTES = 256


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); attention looks only back."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, time, width) to the same shape."""
        batch, time, width = hidden.shape
        projected = self.queries_keys_values(self.attention_norm(hidden))
        queries, keys, values = projected.view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        hidden = hidden + self.feed_forward(hidden)
        return hidden


class GPT(Example):
    """Predicts the next byte; logs `train_loss` and `val_loss` in nats a byte."""

    def __init__(
        self,
        context: int = 128,  # longest window of bytes it can see
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        tied: bool = False,  # True: the output layer is the byte embedding itself
        optimizer: MakeOptimizer = ADAMW,
    ) -> None:
        super().__init__(optimizer)
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}")
        self.save_hyperparameters(ignore=["optimizer"])
        self.context = context
        self.byte_embedding = nn.Embedding(BYTES, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.apply(_initialise)
        if tied:
            self.head.weight = self.byte_embedding.weight

    def forward(self, window: Tensor) -> Tensor:
        """(batch, time) bytes as int64 to (batch, time, 256) logits of the byte after each."""
        time = window.shape[1]
        if time > self.context:
            raise ValueError(f"a window of {time} bytes is longer than context={self.context}; raise model.context")
        positions = torch.arange(time, device=window.device)
        hidden = self.byte_embedding(window) + self.position_embedding(positions)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of the next byte."""
        window, following = batch
        return F.cross_entropy(self(window).flatten(0, 1), following.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
