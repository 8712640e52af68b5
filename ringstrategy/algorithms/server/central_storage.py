"""All ranks of one host train one copy of the parameters, of which each steps a slice."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from ringstrategy.algorithms.server.served import Served
from ringstrategy.algorithms.server.shards import options_of, shown
from ringstrategy.algorithms.server.sliced import Sliced
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.transport.agree import agree, all_gather_floats
from ringstrategy.transport.base import Peers, Word


class CentralStorage(Served[Sliced]):
    """Keep the parameters once in the memory of a host, as TensorFlow's CentralStorageStrategy does.

    It is `ddp` for many ranks on one host without a GPU: each step is by the mean of all ranks' gradients. Parameters
    and optimizer state are there once for all ranks, not once a rank; gradients are there once a rank. No gradient is
    sent: each rank sums one slice of all ranks' gradients, and steps it. Ranks wait for each other twice a step, three
    times with `clip_norm`.

    What a rank writes into a parameter between steps, all ranks see. So a callback that puts other weights into the
    module for a while, such as their moving average, does not work.

    After `close` each rank has parameters of its own. A rank that ends or is killed leaves nothing behind.

    Args:
        clip_norm: clip the mean gradient by its norm over all parameters of an optimizer, in the place of
            `Trainer(gradient_clip_val=...)`. None: do not.
        bucket_mb: of gradients that are copied together while backward runs; see `Synchronous`.

    Attributes:
        shares_memory: what one rank writes into a parameter, all ranks have.
    """

    shares_memory = True

    def __init__(self, clip_norm: float | None = None, bucket_mb: float = 25.0) -> None:
        super().__init__(clip_norm, bucket_mb)

    def __repr__(self) -> str:
        """The arguments in which ranks must not differ."""
        return f"CentralStorage(clip_norm={self.clip_norm}, bucket_mb={self.bucket_mb})"

    # From setup to close

    @override
    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        if len(set(peers.hosts)) > 1:
            raise ValueError(
                f"CentralStorage shares the memory of one host, and the ranks are on {len(set(peers.hosts))}: use a "
                "strategy for several hosts, such as 'ring' or ParameterServer()"
            )
        on_devices = [name for name, parameter in parameters.items() if parameter.device.type != "cpu"]
        if on_devices:
            raise ValueError(
                f"CentralStorage shares memory of CPUs, and parameter {on_devices[0]} is on "
                f"{parameters[on_devices[0]].device}: pass accelerator='cpu', or use a strategy such as 'ring'"
            )
        super().setup(parameters, peers, sparse=sparse)

    @property
    @override
    def _shares(self) -> int:
        assert self._peers is not None
        return self._peers.size

    @override
    def _check(self, named: Mapping[str, Parameter]) -> None:
        dtypes = sorted({str(parameter.dtype) for parameter in named.values()})
        if len(dtypes) > 1 or not next(iter(named.values())).is_floating_point():
            raise ValueError(
                f"CentralStorage needs all parameters of an optimizer in one dtype of floating point, got "
                f"{' and '.join(dtypes)}: convert the module, as module.float() does, or use a strategy such as 'ring'"
            )

    @override
    def _take_over(self, optimizer: Optimizer, buckets: list[DenseBucket]) -> Sliced:
        assert self._peers is not None
        return Sliced(len(self._stepped), optimizer, buckets, self._peers, "CentralStorage")

    @override
    def start(self) -> None:
        if not self._fresh or self._peers is None or not self._stepped:
            return
        for stepped in self._stepped:
            if stepped.is_shared:
                stepped.check_views()
            else:
                stepped.write()
        self._meet("the parameters of rank 0")
        self._fresh = False
        for stepped in self._stepped:
            if not stepped.is_shared:
                stepped.enter()
            if not stepped.has_state:
                stepped.load_state()
                self._drop_state(stepped)
        self._meet("the parameters are shared")  # a state that is fetched is whole

    def close(self) -> None:
        """Give the parameters memory of their own, and the optimizers the state. No collective."""
        with ExitStack() as ends:
            ends.callback(super().close)
            for stepped in self._stepped:
                ends.callback(partial(stepped.leave, takes_state=not self._fresh and stepped.has_state))

    # A step

    @override
    def _push(self, stepped: Sliced, place: int) -> None:
        """Nothing: a bucket gathers where all ranks see it."""

    @override
    def _make_step(self, stepped: Sliced) -> None:
        peers = self._peers
        assert peers is not None
        if self._fresh:
            raise RuntimeError(
                "the optimizer has got other state since the batch began: load checkpoints between two batches"
            )
        stepped.check_views()
        stepped.fill()
        stepped.drop_gradients()
        options = list(options_of(stepped.optimizer))
        begin = time.perf_counter()
        self._meet("\n".join(self._described(stepped, options)))
        square, scale = stepped.add(), 1.0
        if self.clip_norm is not None:
            scale = self._clips(math.sqrt(math.fsum(square for [square] in all_gather_floats(peers, [square]))))
        stepped.step(options, scale)
        self._meet(f"the end of step {self._step}")
        peers.stats.communication_seconds += time.perf_counter() - begin
        peers.stats.exchanges += 1
        increment_version(list(stepped.bucket_of))  # a graph that has kept old values must not be used

    def _described(self, stepped: Sliced, options: Collection[Mapping[str, Any]]) -> Iterator[str]:
        """In what ranks must not differ."""
        yield f"step of optimizer {stepped.number}: {self._step}"
        for number, group in enumerate(options):
            for name, value in group.items():
                yield f"optimizer {stepped.number}, group {number}: {name}={shown(value)}"

    def _meet(self, text: str) -> None:
        """Wait for all ranks. PlanMismatchError on all, unless they are here too; PeerLostError if one is lost."""
        assert self._peers is not None
        control, word = self._peers.control, Word(text, lambda: text)
        self._peers.finish([control.submit(lambda: agree(control, word), self._where)])

    @override
    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        """Nothing: parameters are final when the optimizer has called its hooks before the step."""

    # State

    @override
    def _fetch_state(self, stepped: Sliced, *_: Any) -> None:
        if not self._fresh and self._peers is not None:
            stepped.fetch_state()

    @override
    def _loaded(self, stepped: Sliced, *_: Any) -> None:
        stepped.has_state = False
        self.forget()
