"""What the training benchmarks train: a model of a size worth measuring, its data on each rank, a loss."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ringstrategy.examples.data.digits import Digits
from ringstrategy.examples.data.stdlib_text import StdlibText, Windows
from ringstrategy.examples.models.cnn import CNN
from ringstrategy.examples.models.gpt import GPT

_INPUTS, _OUTPUTS = 1024, 512
_CONTEXT = 64
_HEADS = 4
_HELD_OUT_BYTES = 65_536
_TEXT_BYTES = 3_000_000  # ends in the email package; later modules are character tables

Batches = Sequence[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """The same for all cases of a run."""

    kind: str
    batch: str  # in words
    make: Callable[[], nn.Module]
    batches: Callable[[int, int], Batches]  # of this rank: so many, from this seed
    loss: Loss

    def model(self, seed: int) -> nn.Module:
        """A fresh one: the same weights from the same seed."""
        torch.manual_seed(seed)
        return self.make()

    def described(self, model: nn.Module, digits: int = 1) -> str:
        """Kind, size and batch, in words."""
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return f"{self.kind} of {parameters / 1e6:.{digits}f} M parameters, {self.batch}"


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all targets, for logits of shape (..., classes)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def mlp(width: int = 2048, layers: int = 6, batch: int = 32) -> Task:
    """24.1 M parameters, on noise."""

    def batches(count: int, seed: int) -> Batches:
        data = _generator(seed)
        return [
            (torch.randn(batch, _INPUTS, generator=data), torch.randn(batch, _OUTPUTS, generator=data))
            for _ in range(count)
        ]

    make = partial(perceptron, _INPUTS, *[width] * layers, _OUTPUTS)
    return Task("MLP", f"batch {batch} a rank", make, batches, F.mse_loss)


def perceptron(*widths: int) -> nn.Module:
    """Linear layers of these widths, a ReLU between each two."""
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def _generator(seed: int) -> torch.Generator:
    """Of this rank's data."""
    return torch.Generator().manual_seed(1000 * (seed + 1) + dist.get_rank())


def gpt(width: int = 384, layers: int = 6, batch: int = 1) -> Task:
    """10.9 M parameters, on the standard library's source: random windows of 64 bytes, other ones on each rank."""
    if width % _HEADS:
        raise ValueError(f"the GPT has {_HEADS} heads: its width must be a multiple of that, got {width}")

    def batches(count: int, seed: int) -> Batches:
        text = _text().training.text
        starts = torch.randint(len(text) - _CONTEXT, (count * batch,), generator=_generator(seed))
        return list(zip(*(side.split(batch) for side in _stacked(Windows(text, starts, _CONTEXT))), strict=True))

    make = partial(GPT, _CONTEXT, width, layers, _HEADS)
    return Task("byte GPT", f"batch {batch} x {_CONTEXT} bytes a rank", make, batches, cross_entropy)


def cnn(width: int = 384, batch: int = 8) -> Task:
    """2.7 M parameters, nearly all of them in the second of two convolutions, on handwritten digits of 8x8."""

    def batches(count: int, seed: int) -> Batches:
        digits = Digits()
        digits.setup("fit")
        images, labels = digits.training.tensors
        chosen = torch.randint(len(images), (count, batch), generator=_generator(seed))
        return [(images[one], labels[one]) for one in chosen]

    make = partial(CNN, channels=width)
    return Task("CNN", f"batch {batch} images of 8x8 a rank", make, batches, cross_entropy)


def held_out_text(windows: int) -> tuple[Tensor, Tensor]:
    """Evenly spread over text that nobody trains on; the same in every run."""
    validation = _text().validation
    kept = torch.linspace(0, len(validation) - 1, windows).round().long()
    return _stacked(Windows(validation.text, validation.starts[kept], _CONTEXT))


def _text() -> StdlibText:
    text = StdlibText(context=_CONTEXT, max_bytes=_TEXT_BYTES, validation_bytes=_HELD_OUT_BYTES)
    text.setup("fit")
    return text


def _stacked(windows: Windows) -> tuple[Tensor, Tensor]:
    befores, afters = zip(*(windows[index] for index in range(len(windows))), strict=True)
    return torch.stack(befores), torch.stack(afters)


TASKS: dict[str, Callable[..., Task]] = {"mlp": mlp, "gpt": gpt, "cnn": cnn}


def add_options(parser: argparse.ArgumentParser, steps: int) -> None:
    """What a benchmark that trains one of them takes; `steps`: the default."""
    add = parser.add_argument
    add("--model", choices=TASKS, default="mlp")
    add("--steps", type=int, default=steps, help="training steps in a row, each time a case has its turn")
    add("--width", type=int, help="units or channels; default: mlp 2048, gpt and cnn 384")
    add("--layers", type=int, help="of the mlp and the gpt; default: 6")


def asked(options: argparse.Namespace) -> Task:
    """The task of those options. A ValueError if it cannot have that width, or layers."""
    if options.model == "cnn" and options.layers is not None:
        raise ValueError("the CNN has two convolutions: leave --layers out")
    given = {"width": options.width, "layers": options.layers}
    return TASKS[options.model](**{name: value for name, value in given.items() if value is not None})
