"""`ringstrategy-train`, the Hydra app: compose a run, train it in processes of its own, report.

Each job (a run, or one of a sweep's) is a fresh process in a process group of its own, started the way this program
was started, with `--job FOLDER` instead of the overrides; it reads the composed configuration from FOLDER, and the
ranks that Lightning starts are copies of its command line. Three traps of Lightning under Hydra are thereby not stepped
on: ranks that compose the overrides again (a sweep in every rank, a second folder), environment variables and a process
group left over from a sweep's last job, and processes that outlive a Ctrl-C.
"""

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from types import FrameType
from typing import NoReturn

import hydra
import lightning as L
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringstrategy.app.overrides import lengthened, shortened, swept
from ringstrategy.app.refusals import check_arguments, check_keys, in_words, instantiate_strategy
from ringstrategy.extras import require
from ringstrategy.integrations.lightning.for_lightning import CommunicationMonitor, RingStrategy

JOB_FLAG = "--job"
PROGRAM = "RINGSTRATEGY_TRAIN"  # environment: how this program was called, for launchers whose processes run another
INTERRUPT_SECONDS = 10  # for a job to end by itself after Ctrl-C
HELP_COLUMNS = 80
LAST_LINES = 20  # of a failed job of a sweep, on the screen
LAST_RANK_SECONDS = 60  # for the other ranks to end after rank 0 has


def main() -> None:
    """The console script."""
    if sys.argv[1:2] == [JOB_FLAG]:
        train(Path(sys.argv[2]))
        return
    os.environ[PROGRAM] = shlex.join(_program())
    # so ringstrategy.app.report, which needs them, is imported late everywhere in this file
    require("ringstrategy-train", "matplotlib", "pandas", "rich", "sklearn", "tensorboard")
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) == signal.SIG_DFL:  # under nohup the latter is ignored, and stays so
            signal.signal(signum, _exit_on_signal)
    sys.argv[1:] = map(lengthened, sys.argv[1:])
    if {"-m", "--multirun"} & set(sys.argv):
        sys.argv[1:] = map(swept, sys.argv[1:])
    OmegaConf.register_new_resolver("options_by_group", options_by_group)
    full_errors = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises its errors: by itself it prints them, with wrong advice
    try:
        run()
    except (CompactHydraException, OmegaConfBaseException) as error:
        if full_errors:
            raise
        sys.exit(f"ringstrategy-train: {in_words(error)}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


@hydra.main(version_base="1.3", config_path="pkg://ringstrategy.configs", config_name="train")
def run(cfg: DictConfig) -> float:
    """Train one job in processes of its own; return its final metric (else NaN), which some sweepers want.

    A failed run ends this program with the job's exit code. A failed job of a sweep does not stop the others: the
    sweep's table shows it, and makes the exit code 1.
    """
    cfg.run.overrides = [shortened(override) for override in cfg.run.overrides]
    try:
        check_keys(cfg, cfg.run.overrides)
    except ValueError as error:  # would fail every job of a sweep: end all
        sys.exit(f"ringstrategy-train: {error}")
    folder = Path(cfg.output_dir)
    (folder / "summary.json").unlink(missing_ok=True)  # an earlier job's: this one has not ended
    draft = folder / f"config.yaml.{os.getpid()}"
    OmegaConf.save(cfg, draft, resolve=True)
    draft.replace(folder / "config.yaml")  # in one go: under torchrun every rank writes it, and another may be reading
    from ringstrategy.app.report import read_summary, write_summary

    hydra_cfg = HydraConfig.get()
    log = folder / "train.log" if hydra_cfg.mode == RunMode.MULTIRUN else None
    if log:
        from ringstrategy.app.sweep import progress

        sweep = Path(hydra_cfg.runtime.cwd, hydra_cfg.sweep.dir)  # the job may be in a folder of its own
        print(f"{progress(sweep, hydra_cfg.job.num)}: {' '.join(cfg.run.overrides)}", flush=True)
    exit_code = _run_in_own_process_group(_job_command(folder), log)
    if exit_code == 0:
        # the other hosts of a run have no summary; under torchrun rank 0 may be about to write it
        final_metric = read_summary(folder)["final_metric"] if (folder / "summary.json").exists() else None
        return math.nan if final_metric is None else float(final_metric)
    overrides = OmegaConf.to_container(cfg.run.overrides, resolve=True)
    write_summary(
        folder, {"status": "failed", "exit_code": exit_code, "strategy": cfg.run.strategy, "overrides": overrides}
    )
    if not log:
        sys.exit(exit_code)
    print(f"failed with exit code {exit_code}; the end of {log}:", file=sys.stderr)
    print(*log.read_text(errors="replace").splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr)
    return math.nan


def train(folder: Path) -> None:
    """Train what `folder`/config.yaml says, in this process as one rank or as the parent of all of them."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for `model._target_=my_module.MyModel`; as `python -m` does
    from ringstrategy.app.report import RunReport, print_summary, read_summary

    # data in memory needs no worker processes
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")  # Lightning 2.6 under torch 2.13: nothing a user can do
    cfg = OmegaConf.load(folder / "config.yaml")
    assert isinstance(cfg, DictConfig)
    try:
        check_arguments(cfg)
        strategy = instantiate_strategy(cfg)
    except ValueError as error:
        sys.exit(f"ringstrategy-train: {error}")
    L.seed_everything(cfg.seed, workers=True)
    data = instantiate(cfg.data, _convert_="all")
    model = instantiate(cfg.model, _convert_="all")
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values() if callback is not None]
    callbacks.append(RunReport(folder, cfg.run.strategy, cfg.run.overrides))
    if isinstance(strategy, RingStrategy):  # not under torch's DDP, which counts nothing
        callbacks.append(CommunicationMonitor())
    trainer: L.Trainer = instantiate(cfg.trainer, _convert_="all", _partial_=True)(
        strategy=strategy,
        logger=[instantiate(logger) for logger in cfg.logger.values() if logger is not None],
        callbacks=callbacks,
    )
    trainer.fit(model, datamodule=data, ckpt_path=cfg.resume)
    if trainer.is_global_zero:
        print_summary(read_summary(folder))
    _wait_for_ranks(trainer.strategy.launcher)


def options_by_group() -> str:
    """The groups of the configuration and their options, for the help text."""
    loader = GlobalHydra.instance().config_loader()
    groups = [group for group in loader.list_groups("") if group != "hydra"]
    wide = max(map(len, groups)) + 2
    return "\n".join(
        textwrap.fill(
            ", ".join(loader.get_group_options(group)),
            HELP_COLUMNS,
            initial_indent=f"  {group.ljust(wide)}",
            subsequent_indent=" " * (wide + 2),
        )
        for group in groups
    )


def _program() -> list[str]:
    """What Python runs here: `-m module`, or the path of a script."""
    spec = sys.modules["__main__"].__spec__
    return [os.path.abspath(sys.argv[0])] if spec is None else ["-m", spec.name]


def _job_command(folder: Path) -> list[str]:
    """This program's own command line, for one job. Hydra's submitit launcher calls `run` in a program of submitit."""
    return [sys.executable, *shlex.split(os.environ[PROGRAM]), JOB_FLAG, str(folder)]


def _run_in_own_process_group(command: list[str], log: Path | None) -> int:
    """Run to the end and return the exit code. Whatever ends this function, no process of the group is left.

    What the job prints goes to the end of the file `log`; if that is None, to the screen.
    """
    with open(log, "a") if log else contextlib.nullcontext() as output:
        job = subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output)
    try:
        return job.wait()
    except BaseException:  # Ctrl-C reaches only this process: the job has a session of its own
        os.killpg(job.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(INTERRUPT_SECONDS)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):  # the usual case: all have ended
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _wait_for_ranks(launcher: object) -> None:
    """Wait until the ranks that Lightning started as scripts have ended; Lightning itself leaves them behind."""
    for rank, process in enumerate(getattr(launcher, "procs", []), start=1):
        if isinstance(process, subprocess.Popen) and (exit_code := process.wait(LAST_RANK_SECONDS)) != 0:
            sys.exit(f"the process of local rank {rank} ended with exit code {exit_code}")


def _exit_on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)  # as an exception, so that a running job is ended too


if __name__ == "__main__":
    main()
