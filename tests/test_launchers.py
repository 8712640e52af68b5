"""Other launchers start the ranks: Ray, Spark, submitit, Hydra, torchrun on two hosts, Accelerate.

Each runs its example as a user does, and leaves no process behind.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from scripts import ROOT
from test_lab import needs_namespaces

from benchmarks import lab
from benchmarks.ranks import Program

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")


def run(command: list[str], cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """What it and its processes print. It must end well, not hang, and leave no process behind."""
    program = Program(cwd, command, **(environment or {}))
    try:
        code = program.wait()
    finally:
        program.close()
        print(program.printed[-20_000:], program.errors[-20_000:])  # for pytest to show
    assert code == 0
    return program.printed + program.errors


def bytes_sent(printed: str) -> list[int]:
    return [int(sent) for sent in re.findall(r"Stats\(bytes_sent=(\d+)", printed)]


# Ray

# Ray gives its workers niceness 15: beside other tests they would hardly run, and not be there when Ray stops waiting.
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}
RAY |= {"RAY_DEDUP_LOGS": "0"}


@pytest.mark.slow
@pytest.mark.skipif(" " in sys.executable, reason="Ray's workers need a path of Python without a space")
def test_ray_starts_all_again_if_a_worker_dies(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    printed = run([sys.executable, str(ROOT / "examples/ray_digits.py"), "kill"], tmp_path, RAY)
    assert "PeerLostError: lost rank 1" in printed
    resumed = set(re.findall(r"worker (\d) goes on after epoch ([01]), with the residuals of 2 ranks\n", printed))
    assert {worker for worker, _ in resumed} == {"0", "1"}
    assert len({epoch for _, epoch in resumed}) == 1
    assert set(re.findall(r"worker (\d) of 2: ", printed)) == {"0", "1"}
    assert all(sent > 0 for sent in bytes_sent(printed))
    last = re.search(r"\{'right': ([\d.]+), 'epoch': 3, 'step': 92\}", printed)
    assert last is not None, printed[-5_000:]
    assert float(last[1]) > 0.8


# submitit and Spark


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("submitit", ["slurm_digits.py"]),
        pytest.param("pyspark", ["spark_digits.py"], marks=needs_java),
        pytest.param("pyspark", ["spark_digits.py", "executors"], marks=[needs_java, pytest.mark.nightly]),
    ],
    ids=["submitit", "spark", "spark's executors"],
)
def test_two_processes_learn_digits(package: str, command: list[str], tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"the extra with {package} is not installed")
    printed = run([sys.executable, str(ROOT / "examples" / command[0]), *command[1:]], tmp_path)
    trained = re.findall(r"(?:task|rank) (\d) of 2: ([\d.]+) right", printed)
    assert len(set(trained)) == (2 if package == "submitit" else 1), printed[-5_000:]  # Spark returns one rank's
    assert all(float(right) > 0.8 for _, right in trained)
    assert all(sent > 0 for sent in bytes_sent(printed))


# Slurm, played by this test: there is none here

SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
nodes, tasks = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
ranks = []
for rank in range(nodes * tasks):
    place = {"PROCID": rank, "NODEID": rank // tasks, "LOCALID": rank % tasks}
    environment = os.environ | {f"SLURM_{name}": str(number) for name, number in place.items()}
    ranks.append(subprocess.Popen(command, env=environment))
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


@pytest.mark.slow
def test_the_batch_script_trains_all_tasks_of_all_nodes(tmp_path: Path) -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", (ROOT / "examples/slurm.sbatch").read_text(), re.M))
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("2", "2")
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    environment = {
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": asked["job-name"],
        "SLURM_NNODES": "2",
        "SLURM_NTASKS_PER_NODE": "1",  # the two cores here
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_NODELIST": "localhost",
    }
    run(["bash", str(ROOT / "examples/slurm.sbatch"), "trainer.max_epochs=1"], tmp_path, environment)
    summary = json.loads((tmp_path / "outputs/slurm-77/summary.json").read_text())
    assert (summary["status"], summary["processes"]) == ("finished", 2)
    assert summary["bytes_sent"] > 0


# torchrun on two hosts


@pytest.mark.slow
@needs_namespaces
def test_torchrun_on_two_hosts(tmp_path: Path) -> None:
    with lab.Lab(2, "100mbit") as net:
        where = [f"--master-addr={net.address(0)}", "--master-port=29500"]
        script = "cd {}; exec {} > {}.log 2>&1"
        for host in range(2):
            which = ["--nnodes=2", "--nproc-per-node=1", *where, f"--node-rank={host}"]
            command = shlex.join([*TORCHRUN, *which, str(ROOT / "examples/digits.py")])
            net.popen(host, ["bash", "-c", script.format(shlex.quote(str(tmp_path)), command, f"host{host}")])
        ended = net.wait()
    printed = [(tmp_path / f"host{host}.log").read_text() for host in range(2)]
    assert ended == [0, 0], printed
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in printed[1]
    (sent,) = bytes_sent(printed[0])
    assert sent > 0


# Hydra's launcher for submitit


@pytest.mark.slow
def test_hydra_has_submitit_run_the_jobs_of_a_sweep(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra `slurm` is not installed")
    program = Path(sys.executable).with_name("ringstrategy-train")
    sweep = ["-m", "hydra/launcher=submitit_local", "hydra.sweep.dir=sweep", "strategy=ring,ring_int8"]
    run([str(program), *sweep, "trainer.max_epochs=1"], tmp_path)
    rows = json.loads((tmp_path / "sweep/sweep.json").read_text())
    assert [(row["strategy"], row["status"]) for row in rows] == [("ring", "finished"), ("ring_int8", "finished")]
    exact, quantized = (json.loads((tmp_path / f"sweep/{job}/summary.json").read_text()) for job in range(2))
    assert exact["processes"] == quantized["processes"] == 2
    assert 0 < 3 * quantized["bytes_sent"] < exact["bytes_sent"]


# Accelerate's own test programs, unchanged, over a process group of ours

ACCELERATE = """
import runpy, sys
import torch.distributed as dist
import ringstrategy
dist.init_process_group("ring_int8")
runpy.run_path(sys.argv[1], run_name="__main__")
print(f"{ringstrategy.__name__}: trained in {dist.get_backend() if dist.is_initialized() else 'ring_int8'}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", ["test_script", "test_sync"])
def test_accelerates_own_programs(script: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    theirs = Path(accelerate.__file__).parent / "test_utils" / "scripts" / f"{script}.py"
    (tmp_path / "program.py").write_text(ACCELERATE)
    command = [*TORCHRUN, "--nproc-per-node=2", "program.py", str(theirs)]
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "HOME": str(tmp_path)}
    printed = run(command, tmp_path, environment)
    assert printed.count("ringstrategy: trained in ring_int8") == 2
    assert "MULTI_CPU" in printed or script != "test_script"
