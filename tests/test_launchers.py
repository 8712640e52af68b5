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
import yaml
from scripts import ROOT
from test_lab import needs_namespaces

from benchmarks import lab
from benchmarks.ranks import Program
from ringstrategy.app.syncer import parse
from ringstrategy.integrations.lightning.decoupled import SECRET_FILE, SYNCER
from ringstrategy.requests.opening import check_secret
from ringstrategy.server.background import address_of
from ringstrategy.server.folder import events

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


@pytest.mark.slow
@pytest.mark.skipif(" " in sys.executable, reason="Ray's workers need a path of Python without a space")
def test_learners_find_a_syncer_that_ray_has_started_again(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    printed = run([sys.executable, str(ROOT / "examples/ray_decoupled.py"), "kill"], tmp_path, RAY)
    [(before, after)] = re.findall(r"the syncer was at (\S+:\d+), and is at (\S+:\d+)", printed)
    assert before != after
    learned(printed, r"learner (\d) of 2: ([\d.]+) right, pushes (.*)")


def learned(printed: str, line: str) -> None:
    """Two learners, whose pushes were merged."""
    found = re.findall(line, printed)
    assert {number for number, *_ in found} == {"0", "1"}, printed[-5_000:]
    assert all(float(right) > 0.8 for _, right, *_ in found)
    assert all(re.search(r"'taken over': [1-9]", pushes) for *_, pushes in found)


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


def slurm(folder: Path, script: str, job: int, **more: str) -> tuple[dict[str, str], dict[str, str]]:
    """What a batch script of the examples asks for, and the environment in which this test runs it on two nodes."""
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", (ROOT / "examples" / script).read_text(), re.M))
    srun = folder / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    environment = {
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_JOB_ID": f"{job}",
        "SLURM_JOB_NAME": asked["job-name"],
        "SLURM_NNODES": "2",
        "SLURM_NTASKS_PER_NODE": "1",  # the two cores here
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_NODELIST": "localhost",
    }
    return asked, environment | more


@pytest.mark.slow
def test_the_batch_script_trains_all_tasks_of_all_nodes(tmp_path: Path) -> None:
    asked, environment = slurm(tmp_path, "slurm.sbatch", 77)
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("2", "2")
    run(["bash", str(ROOT / "examples/slurm.sbatch"), "trainer.max_epochs=1"], tmp_path, environment)
    summary = json.loads((tmp_path / "outputs/slurm-77/summary.json").read_text())
    assert (summary["status"], summary["processes"]) == ("finished", 2)
    assert summary["bytes_sent"] > 0


@pytest.mark.slow
def test_each_node_of_the_batch_script_is_a_learner_and_put_back_it_goes_on(tmp_path: Path) -> None:
    asked, environment = slurm(tmp_path, "slurm_decoupled.sbatch", 78, EPOCHS="6")
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("2", "1")
    command = ["bash", str(ROOT / "examples/slurm_decoupled.sbatch"), str(ROOT / "examples/decoupled_digits.py")]
    folder, found = tmp_path / "outputs/decoupled-78", []
    for _ in range(2):
        printed = run(command, tmp_path, environment)
        learned(printed, r"learner (\d): ([\d.]+) right, Stats.*, pushes (.*)")
        assert len(bytes_sent(printed)) == 2
        assert all(sent > 0 for sent in bytes_sent(printed)), "each learner is a ring of two processes"
        found.append(((folder / "secret").read_text(), (folder / "address").read_text(), len(events(folder / "theta"))))
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    (secret, address, merges), (same_secret, other_address, more) = found
    assert secret == same_secret
    assert address != other_address
    assert more > merges > 0


# Kubernetes: the fields that must agree


def test_the_manifests_agree_with_each_other_and_with_the_commands() -> None:
    folder = ROOT / "examples/kubernetes"
    found = {each["kind"]: each for each in yaml.safe_load_all((folder / "decoupled.yaml").read_text())}
    secret, service, syncer, job = (found[kind] for kind in ("Secret", "Service", "StatefulSet", "Job"))
    with pytest.raises(ValueError, match="at least 16 bytes"):
        check_secret(secret["stringData"]["secret"].encode())  # so nobody trains with it
    for owner in (syncer, job):
        pod = owner["spec"]["template"]["spec"]
        [container], [volume] = pod["containers"], pod["volumes"]
        assert volume["secret"] == {"secretName": secret["metadata"]["name"], "defaultMode": 0o440}
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"] == 1000
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        file = f"{mounts[volume['name']]}/{next(iter(secret['stringData']))}"
        if owner is syncer:
            program, *arguments = container["command"]
            asked = parse(arguments)
            assert (program, asked.secret_file) == ("ringstrategy-syncer", file)
            assert asked.checkpoint.is_relative_to(mounts[owner["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]])
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            bound = {"learners": address_of(asked.bind), "status": address_of(asked.status)}
            assert {name: ("0.0.0.0", port) for name, port in ports.items()} == bound
            assert container["livenessProbe"]["httpGet"] == {"path": "/text", "port": "status"}
            labels = owner["spec"]["template"]["metadata"]["labels"]
            assert owner["spec"]["replicas"] == 1
            assert labels == owner["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
            [port] = service["spec"]["ports"]
            assert ports[port["targetPort"]] == port["port"]
        else:
            told = {each["name"]: each["value"] for each in container["env"]}
            assert told == {SECRET_FILE: file, SYNCER: f"{service['metadata']['name']}:{port['port']}"}
            assert (pod["restartPolicy"], owner["spec"]["completionMode"]) == ("Never", "Indexed")
            assert owner["spec"]["completions"] == owner["spec"]["parallelism"]
            assert (ROOT / container["command"][-1].lstrip("/")).is_file()
        assert container["image"].partition(":")[0] in (folder / "Dockerfile").read_text()
    assert "COPY examples /examples\n" in (folder / "Dockerfile").read_text()


# torchrun on two hosts, as the manifest calls it


@pytest.mark.slow
@needs_namespaces
def test_the_pods_of_the_manifest_train_together(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((ROOT / "examples/kubernetes/ring.yaml").read_text())
    pod = job["spec"]["template"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    [container] = pod["spec"]["containers"]
    name, subdomain = job["metadata"]["name"], pod["spec"]["subdomain"]
    assert subdomain == service["metadata"]["name"]
    with lab.Lab(2, "100mbit") as net:
        here = {
            "$(JOB_COMPLETION_INDEX)": "{}",
            f"{name}-0.{subdomain}": net.address(0),
            "/examples": f"{ROOT}/examples",
        }
        program, *arguments = container["command"]
        assert program == "torchrun"
        for inside, outside in here.items():
            assert sum(inside in argument for argument in arguments) == 1
            arguments = [argument.replace(inside, outside) for argument in arguments]
        script = "cd {}; exec {} > {}.log 2>&1"
        for host in range(2):
            command = shlex.join([*TORCHRUN, *(argument.format(host) for argument in arguments)])
            net.popen(host, ["bash", "-c", script.format(shlex.quote(str(tmp_path)), command, f"host{host}")])
        ended = net.wait()
    printed = [(tmp_path / f"host{host}.log").read_text() for host in range(2)]
    assert ended == [0, 0], printed
    assert "GLOBAL_RANK: 3, MEMBER: 4/4" in printed[1]
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
