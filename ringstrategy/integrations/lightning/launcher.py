"""Bring back what processes that Lightning has spawned or forked know, before they end."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ringstrategy.integrations.lightning.package import Package

if TYPE_CHECKING:
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
else:
    _MultiProcessingLauncher = _SubprocessScriptLauncher = object


class BringingLauncherMixin(_MultiProcessingLauncher):
    """Also hands what a strategy of ours knows from local rank 0 to the process that called `fit`."""

    _strategy: Any

    def _wrapping_function(self, process_idx: int, *args: Any) -> None:
        """What each process does: see `_MultiProcessingLauncher`."""
        try:
            super()._wrapping_function(process_idx, *args)
        except SystemExit as stopped:  # SIGTERM: the process ends as after success, and Lightning waits for a result
            _, _, _, _, results, *_ = args
            if process_idx == 0:
                results.put(stopped)
            raise

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        if isinstance(worker_output, SystemExit):
            raise worker_output
        super()._recover_results_in_main_process(worker_output, trainer)

    @override
    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        # as bytes, since Lightning looks for tensors in what is brought back, and refuses frozen dataclasses there
        return {**super().get_extra_results(trainer), "ringstrategy": pickle.dumps(self._strategy._outcome())}

    @override
    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        self._strategy._take_outcome(pickle.loads(extra.pop("ringstrategy")))
        super().update_main_process_results(trainer, extra)


class OutlivingLauncherMixin(_SubprocessScriptLauncher):
    """Starts the other ranks of this host as `ddp`, but the end of one does not end all once they train together."""

    package: Package
    _observer: _ChildProcessObserver | None = None

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            self._observer = self.package.ChildProcessObserver(os.getpid(), self.procs)
            self._observer.start()
        return function(*args, **kwargs)

    def let_go(self) -> None:
        """From now on ranks notice themselves that one was lost."""
        if self._observer is not None:
            self._observer._child_processes = []  # of none, all have ended well
