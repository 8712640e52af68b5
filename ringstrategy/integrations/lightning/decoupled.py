"""The callback that makes a Trainer a learner of Decoupled DiLoCo, whatever its strategy is."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from ringstrategy.algorithms.parameters.outer import Nesterov, Outer, described_outer
from ringstrategy.algorithms.parameters.periodic import Periodic
from ringstrategy.algorithms.parameters.schedule import cut_fragments
from ringstrategy.codecs import BlockInt, Cast, Codec
from ringstrategy.integrations.lightning.strategy import RingStrategyMixin
from ringstrategy.requests.opening import check_secret
from ringstrategy.server.background import IN_FILE, MAILBOX, Background, Find, finder, newest, secret_of
from ringstrategy.server.learner import Learner, blend_, meets
from ringstrategy.server.merges import Merge, mean
from ringstrategy.server.plan import PARTS, built, described, digest_of, planned

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = object

SYNCER, SECRET_FILE = "RINGSTRATEGY_SYNCER", "RINGSTRATEGY_SECRET_FILE"
_WHOLE = ("SingleDeviceStrategy", "DDPStrategy")  # and what derives from them: each process has all parameters
_IDLE = 60  # seconds without learners after which a hosted syncer ends
_PATIENCE = 30.0  # seconds for the first parameters, while the syncer answers


class DecoupledMixin(Callback):
    """Train as a learner of Decoupled DiLoCo (arXiv 2604.21428): give progress to a syncer, and take what came of all.

    Each learner is a Trainer of its own, with any strategy whose processes hold all parameters (one device, `ddp`,
    `ring`). Learners form no group: they join, die and come back at any time, and train on while the syncer
    (`ringstrategy-syncer`) is away. Learners of one syncer need the same model and the same arguments here.

    Exchanged are the floating-point parameters that require a gradient when the fit begins. Buffers, the state of
    optimizers and learning rates are each learner's own. After `fit` the model has this learner's own parameters, which
    `theta` replaces. The state of this callback is in the Trainer's checkpoints.

    Args:
        fragments: cut the model into so many parts of whole layers, which are exchanged in turns.
        quorum: learners whose progress a merge needs at least, of those that live. None: all. Fewer: merges come more
            often, and the progress of slower learners is dropped more often.
        grace: seconds that a merge waits for other learners after that. "auto": an eighth of the time that the quorum
            took since the last merge.
        interval: optimizer steps from push to push of a fragment. More: fewer bytes, and learners drift further apart.
        overlap: steps from a push until parameters that have come are used. More: more time for the network.
        blend: the share of Theta in parameters then, 0 < blend <= 1; the rest is the learner's own.
        outer: makes the optimizer of Theta: `Nesterov`, or a `functools.partial` of one of torch.optim.
        late: "drop": progress that comes after its merge does not count. The learner keeps 1 - blend of it.
        merge: `ringstrategy.server.merges.mean`, or the paper's `radial_directional`, whose steps are longer.
        codec: of progress. What it loses is added to the next progress.
        broadcast: the codec of Theta on its way to learners.
        syncer: its host:port; or "mailbox:URL", a folder or bucket that both reach; or a file that has the address, as
            "file:PATH" or a Path; or a function that returns it, called in this learner's first process. A file is read
            again, and a function called again, at each try while the syncer is away; what the function raises counts as
            away. Default: the environment variable RINGSTRATEGY_SYNCER.
        secret_file: holds the syncer's secret; default: the environment variable RINGSTRATEGY_SECRET_FILE.
        name: of this learner. None: a random one, which its checkpoints keep.
        certificate: encrypt, and verify the syncer by this file of certificates.
        hosts: start the syncer here, with this folder, unless one listens at the address. It is a process of its own,
            which outlives this learner, and ends a minute after the last one. The file `printed` has what it prints.

    Attributes:
        learner: of this process, while it trains, if it is the first one of its Trainer. See `Learner.counts`.
    """

    def __init__(  # noqa: PLR0913
        self,
        fragments: int = 4,
        quorum: int | None = None,
        grace: float | Literal["auto"] = "auto",
        interval: int = 64,
        overlap: int = 2,
        blend: float = 0.5,
        outer: Outer = Nesterov(0.4, 0.8),  # noqa: B008
        late: Literal["drop"] = "drop",
        merge: Merge = mean,
        codec: Codec = BlockInt(8),  # noqa: B008
        broadcast: Codec = Cast("bfloat16"),  # noqa: B008
        *,
        syncer: str | Path | Callable[[], str] | None = None,
        secret_file: str | Path | None = None,
        name: str | None = None,
        certificate: str | Path | None = None,
        hosts: str | Path | None = None,
    ) -> None:
        for option, value in (
            ("fragments", fragments),
            ("quorum", 1 if quorum is None else quorum),
            ("interval", interval),
            ("overlap", overlap),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{option} is a whole number >= 1, got {value!r}")
        if fragments > interval or overlap > interval:
            raise ValueError(f"fragments={fragments} and overlap={overlap} are at most interval={interval}")
        if grace != "auto" and (type(grace) not in (int, float) or not 0 <= grace < float("inf")):
            raise ValueError(f"grace is seconds >= 0, or 'auto', got {grace!r}")
        if isinstance(blend, bool) or not isinstance(blend, int | float) or not 0 < blend <= 1:
            raise ValueError(f"blend is the share of Theta, 0 < blend <= 1, got {blend!r}")
        if late != "drop":
            raise ValueError(f"late is 'drop', got {late!r}: added in full, late progress makes training diverge")
        for option, part in (("codec", codec), ("broadcast", broadcast)):
            if not isinstance(part, Codec):
                raise TypeError(f"{option} is a codec such as BlockInt(8) or Identity(), got {part!r}")
        described_outer(outer)
        self.fragments, self.interval, self.overlap, self.blend = fragments, interval, overlap, float(blend)
        self.codec, self.broadcast = codec, broadcast
        self._merging: dict[str, Any] = {
            "outer": outer,
            "merge": merge,
            "quorum": quorum,
            "grace": grace if grace == "auto" else float(grace),
        }
        parts = {**PARTS, "Nesterov": Nesterov}
        for made in (outer, merge, codec, broadcast):
            if described(built(described(made), parts)) != described(made):
                raise TypeError(f"{made!r} is none that the syncer has: take a part of ringstrategy, or of torch.optim")
        self.syncer, self.secret_file, self.name, self.certificate = syncer, secret_file, name, certificate
        self.hosts = hosts
        self.learner: Learner | None = None
        self._background: Background | None = None
        self._cut: list[dict[str, Tensor]] = []
        self._plan: dict[str, Any] = {}
        self._state: dict[str, Any] | None = None
        self._steps = self._seen = 0
        self._samples = 0.0

    # What Lightning calls

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be right, and compile what encodes."""
        strategy = trainer.strategy
        kinds = {each.__name__ for each in type(strategy).__mro__}
        if kinds.isdisjoint(_WHOLE) or "DeepSpeedStrategy" in kinds:
            raise ValueError(
                f"Decoupled needs all parameters in each process, and {type(strategy).__name__} may cut them: take "
                "strategy='ring', 'ddp' or a single device within a learner"
            )
        if isinstance(strategy, RingStrategyMixin):
            if isinstance(strategy.algorithm, Periodic):
                raise ValueError(
                    f"the processes of a learner hold the same parameters, and with {strategy.algorithm} they differ: "
                    "take strategy='ring' within a learner"
                )
            if strategy.on_peer_loss != "raise" or strategy.algorithm.uneven != "error":
                raise ValueError(
                    "within a learner all processes make the same steps: leave out on_peer_loss and uneven. If one is "
                    "lost, start the learner again from its checkpoint; the other learners train on"
                )
        if stage == "fit":
            self._where()
            for codec in (self.codec, self.broadcast) if trainer.is_global_zero else ():
                codec.warm_up(torch.device("cpu"))  # else a step would wait for it

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join, and take the parameters of all, if the syncer is there. Else begin with what there is."""
        trained = _trained(pl_module)
        if not trained:
            raise ValueError("Decoupled found no parameter that requires a gradient: unfreeze some before the fit")
        self._cut = [dict(fragment) for fragment in cut_fragments(trained, self.fragments)]
        self._plan = planned(self._cut, codec=self.codec, broadcast=self.broadcast, **self._merging)
        self._seen, self._samples = trainer.global_step, 0.0
        state, self._state = self._state, None  # another fit does not resume
        self._steps = 0 if state is None else state["step"]
        self._meet(trainer, partial(self._begin, state))

    def _begin(self, state: dict[str, Any] | None) -> None:
        """In the first process."""
        self.learner = Learner(
            self._cut,
            self._plan,
            codec=self.codec,
            broadcast=self.broadcast,
            interval=self.interval,
            overlap=self.overlap,
            blend=self.blend,
            name=self.name,
        )
        if state is not None:
            self.learner.load_state_dict(state)
        if self.hosts is not None:
            self._host(Path(self.hosts))
        self._background = Background(self.learner, *self._where())
        self._background.wait(_PATIENCE, insist=self.hosts is not None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step, make progress ready, and take what has come."""
        self._samples += _samples(batch) * trainer.world_size
        if trainer.global_step == self._seen:
            return  # gradients are accumulated
        self._steps, self._seen, samples, self._samples = self._steps + 1, trainer.global_step, self._samples, 0.0
        if self.learner is not None:
            self.learner.after_step(samples)
        if self._background is not None:
            self._background.wake()
        meet = meets(self._steps, self.interval, self.overlap, len(self._cut))
        if meet and len(_trained(pl_module)) != sum(map(len, self._cut)):
            raise ValueError(
                "other parameters require a gradient than when the fit began, and would differ between learners: let "
                "all that will train require one then, or leave out callbacks that unfreeze"
            )
        if meet or trainer.world_size == 1:
            self._meet(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give what is ready, and part with the syncer."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Part with the syncer."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """In the Trainer's checkpoint: see `Learner.state_dict`."""
        return {} if self.learner is None else self.learner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with it when training starts."""
        self._state = state_dict

    # What users call

    def theta(self) -> dict[str, Tensor]:
        """The parameters of all learners, newest version, by name: `model.load_state_dict(theta, strict=False)`.

        During or after a fit, in the Trainer's first process. Waits for the network: ConnectionError if the syncer is
        away.
        """
        if not self._cut:
            raise RuntimeError("theta is known after a fit has begun: the model's parameters have no names before")
        find, secret, tls = self._where()
        return newest(self._cut, digest_of(self._plan), self.broadcast, find(), secret, tls)

    # Within

    def _meet(self, trainer: Trainer, first: Callable[[], None] = lambda: None) -> None:
        """All processes of this learner take what the first one has, or raise what it raises.

        Args:
            trainer: theirs.
            first: what the first one does before.
        """
        error, due = None, list[tuple[int, Tensor, float]]()
        if trainer.is_global_zero:
            try:
                first()
                assert self.learner is not None
                assert self._background is not None
                self._background.check()
                due = self.learner.due()
            except Exception as failure:
                error = failure
        if trainer.world_size > 1:
            words = None if error is None else f"the learner's first process: {error!r}"
            words, due = trainer.strategy.broadcast(
                (words, [(number, each.cpu(), share) for number, each, share in due])
            )
            error = error or (RuntimeError(words) if words else None)
        if error is not None:
            raise error
        for number, theta, share in due:
            if self.learner is not None:
                self.learner.take(number)
            else:
                blend_(list(self._cut[number].values()), theta, share)

    def _host(self, folder: Path) -> None:
        """Start a syncer, which ends by itself at once if there is one."""
        folder.mkdir(parents=True, exist_ok=True)
        syncer, file = self._given()
        assert isinstance(syncer, str)
        command = [sys.executable, "-m", "ringstrategy.app.syncer", "--bind", syncer, "--secret-file", file]
        command += ["--checkpoint", str(folder), "--idle", str(_IDLE)]
        with (folder / "printed").open("a") as printed:
            self._hosted = subprocess.Popen(
                command, stdout=printed, stderr=printed, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def _close(self) -> None:
        background, self._background = self._background, None
        if background is not None:
            background.close()

    def _where(self) -> tuple[Find, bytes, ssl.SSLContext | None]:
        """What finds the address, secret, encryption. ValueError with the cure if one is missing or wrong."""
        syncer, file = self._given()
        if self.hosts is not None and (not isinstance(syncer, str) or syncer.startswith((IN_FILE, MAILBOX))):
            raise ValueError(f"hosts= starts a syncer at an address: give syncer='host:port', not {syncer!r}")
        if self.certificate and isinstance(syncer, str) and syncer.startswith(MAILBOX):
            raise ValueError("certificate= encrypts connections, and a mailbox has none: take a storage that encrypts")
        tls = ssl.create_default_context(cafile=str(self.certificate)) if self.certificate else None
        return finder(syncer), check_secret(secret_of(file)), tls

    def _given(self) -> tuple[str | Path | Callable[[], str], str]:
        syncer, file = self.syncer or os.environ.get(SYNCER), self.secret_file or os.environ.get(SECRET_FILE)
        if not syncer or not file:
            missing = f"syncer= or {SYNCER}" if not syncer else f"secret_file= or {SECRET_FILE}"
            raise ValueError(
                f"Decoupled does not know its syncer: set {missing}, and start `ringstrategy-syncer --bind HOST:PORT "
                "--secret-file FILE --checkpoint FOLDER`"
            )
        return syncer, str(file)


def _trained(module: Module) -> dict[str, Parameter]:
    """What learners exchange."""
    return {
        name: each
        for name, each in module.named_parameters()
        if each.requires_grad and each.is_floating_point() and each.numel()
    }


def _samples(batch: Any) -> float:
    """The length of the first tensor in it."""
    return next((float(len(leaf)) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1.0)
