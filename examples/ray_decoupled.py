"""An actor of Ray keeps the syncer of Decoupled DiLoCo, and Ray restarts it if it dies; learners are tasks.

python examples/ray_decoupled.py           # the syncer and two learners on this machine
python examples/ray_decoupled.py kill      # the syncer is killed in the middle, and comes back at another port

Pushes and parameters do not go through Ray. With several machines, FOLDER must be on a disk that all of them share.
"""

import os
import secrets
import sys
import tempfile
import threading
from pathlib import Path

import lightning as L
import ray
import torch
from digits import Digits, loaders

from ringstrategy import Decoupled
from ringstrategy.algorithms.parameters.outer import Nesterov
from ringstrategy.requests import Server
from ringstrategy.server.folder import Folder, events
from ringstrategy.server.syncer import Syncer

LEARNERS, NAME = 2, "syncer"


@ray.remote(max_restarts=-1, num_cpus=0)
class Placed:
    """A syncer where Ray has room for it. Each life of it goes on from the folder."""

    def __init__(self, folder: Path) -> None:
        self.syncer = Syncer(Folder(folder / "theta"), parts={"Nesterov": Nesterov})
        threading.Thread(target=self._merge, daemon=True).start()
        secret, here = (folder / "secret").read_bytes(), ray.util.get_node_ip_address()
        self.server = Server((here, 0), secret, self.syncer.answer, gone=self.syncer.gone)

    def _merge(self) -> None:
        try:
            self.syncer.run()
        finally:
            os._exit(1)  # Ray starts another life

    def address(self) -> str:
        """Where it listens in this life."""
        return "{}:{}".format(*self.server.address)


def find() -> str:
    """The address now. While the actor is away this raises, and the learner trains on."""
    return ray.get(ray.get_actor(NAME).address.remote(), timeout=10)


class Ends(L.Callback):
    """After the epoch in which a file says so."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Here and not after `max_epochs`, so that the example sees all that it waits for."""
        trainer.should_stop = self.file.exists()


@ray.remote(max_retries=-1)
def learn(number: int, folder: Path) -> str:
    """What each learner does. Started again, it takes the parameters of all."""
    torch.set_num_threads(1)
    L.seed_everything(number)  # another order of the data for each
    decoupled = Decoupled(2, quorum=1, interval=16, syncer=find, secret_file=folder / "secret", name=f"learner{number}")
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[decoupled, Ends(folder / "end")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, (training, validation) = Digits(), loaders()
    trainer.fit(model, training)
    model.load_state_dict(decoupled.theta(), strict=False)
    right = trainer.validate(model, validation, verbose=False)[0]["right"]
    return f"learner {number} of {LEARNERS}: {right:.3f} right, pushes {decoupled.learner.counts}"


def merged(folder: Path) -> list[int]:
    """How many pushes of each learner are in the parameters."""
    log = events(folder / "theta")
    return [
        sum(push["learner"] == f"learner{number}" for event in log for push in event["pushes"])
        for number in range(LEARNERS)
    ]


def wait_for_merges(folder: Path, learners: list[ray.ObjectRef]) -> None:
    """Until 20 more pushes of each learner are merged."""
    before = merged(folder)
    while any(now < then + 20 for now, then in zip(merged(folder), before, strict=True)):
        ray.get(ray.wait(learners, timeout=0.5)[0])  # raises what a learner fails by


def main() -> None:
    """Place the syncer, train, and say how well."""
    ray.init(num_cpus=LEARNERS, namespace="digits")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # FOLDER
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_text(secrets.token_hex(32))
        actor = Placed.options(name=NAME, lifetime="detached", get_if_exists=True).remote(folder)
        first = find()
        learners = [learn.remote(number, folder) for number in range(LEARNERS)]
        wait_for_merges(folder, learners)
        if sys.argv[1:] == ["kill"]:
            ray.kill(actor, no_restart=False)
            wait_for_merges(folder, learners)
            print(f"the syncer was at {first}, and is at {find()}")
        (folder / "end").touch()
        print(*ray.get(learners), sep="\n")
        ray.kill(actor)  # it is detached: else it would outlive this script
    ray.shutdown()


if __name__ == "__main__":
    main()
