"""Muon for matrices and AdamW for all other parameters, as the one optimizer that Lightning's automatic mode takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer


class MuonAdamW(Optimizer):
    """Steps matrices by `torch.optim.Muon`, all other parameters by `torch.optim.AdamW`.

    Schedulers, checkpoints and the strategies see one optimizer with two groups of parameters. Muon's step is scaled to
    the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so one learning rate serves both. `OneCycleLR` and
    `CyclicLR` need `cycle_momentum=False`.

    References: Jordan, 2024, https://kellerjordan.github.io/posts/muon; Liu et al., 2025, arXiv:2502.16982; inside of
    DiLoCo: Thérien et al., 2025, arXiv:2505.23725.

    Args:
        named_parameters: of the module, `self.named_parameters()`; those without `requires_grad` are left out.
        lr: learning rate of both.
        weight_decay: of both, decoupled.
        momentum: of Muon.
        betas: of AdamW.
        adamw: how words of the names of matrices begin that AdamW steps too: embeddings and the output layer. The words
            of `byte_embedding.weight` are `byte`, `embedding` and `weight`.

    Raises:
        ValueError: no name, or no matrix is left for Muon. TypeError: `adamw` is a string, or FSDP2 has cut a
            parameter; Muon needs whole matrices.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw: Collection[str] = ("embed", "head"),
    ) -> None:
        if isinstance(adamw, str):
            raise TypeError(f"adamw is a collection of words, got {adamw!r}: pass [{adamw!r}]")
        matrices, others = list[Parameter](), list[Parameter]()
        for each in named_parameters:
            if isinstance(each, Tensor):
                raise ValueError("MuonAdamW chooses by names: pass module.named_parameters(), not module.parameters()")
            name, parameter = each
            if isinstance(parameter, DTensor):
                raise TypeError(f"Muon needs whole matrices, and {name} is cut into shards: use AdamW with FSDP2")
            if parameter.requires_grad:
                words = re.split(r"[._]", name)
                by_muon = parameter.ndim == 2 and not any(word.startswith(tuple(adamw)) for word in words)
                (matrices if by_muon else others).append(parameter)
        if not matrices:
            raise ValueError(
                f"no matrix is left for Muon, as {list(adamw)} go to AdamW: pass adamw=[...], or use AdamW"
            )
        self._parts: list[Optimizer] = [
            Muon(matrices, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"),
        ]
        if others:
            self._parts.append(AdamW(others, lr, betas, weight_decay=weight_decay))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both step with the groups and the state of this one."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.clear()  # torch puts some of AdamW's there, and the groups have others
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is built: whose a further group is, nobody could say."""
        if len(self.param_groups) == len(self._parts):
            raise ValueError("MuonAdamW takes all parameters when it is built: make another one")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient. Returns what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
