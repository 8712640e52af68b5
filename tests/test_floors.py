"""The house: each room imports only from the floors below, no two modules import each other."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

PACKAGE = Path(__file__).parents[1] / "ringstrategy"
KERNELS = Path(__file__).parents[1] / "triton_kernels"
FLOORS = [  # from the ground; a room is a package or a module of the top level
    {"_version", "errors", "extras"},
    {"kernels"},
    {"codecs", "topologies", "transport"},
    {"collectives"},
    {"buckets"},
    {"cost"},
    {"algorithms"},
    {"names", "session", "simulator"},
    {"integrations", "horovod", "lightning_fabric", "pytorch_lightning"},
    {"app"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
WITHOUT_FRAMEWORKS = [room for rooms in FLOORS[:-2] for room in sorted(rooms)]


def modules() -> dict[str, Path]:
    found = {}
    for root, package in ((PACKAGE, "ringstrategy"), (KERNELS, "ringstrategy.kernels.triton")):
        for path in root.rglob("*.py"):
            parts = [package, *path.relative_to(root).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(module: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that `module` imports, for types or within functions too."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if whole in known or base in known:
                    yield whole if whole in known else base


def room(module: str) -> str:
    """Commands are the app's, wherever they stand, so that `python -m ringstrategy.topologies` works."""
    return "app" if module.endswith(".__main__") else module.split(".")[1]


def edges() -> list[tuple[str, str]]:
    known = modules()
    return [
        (module, imported)
        for module, path in known.items()
        if module != "ringstrategy"  # offers all that is public, and imports it when it is first used
        for imported in imports(module, path, known)
    ]


def test_each_room_has_its_floor() -> None:
    assert {room(module) for module in modules() if module != "ringstrategy"} == set(FLOOR_OF)
    assert len(edges()) > 300


def test_nothing_is_imported_upward() -> None:
    upward = [
        f"{module} imports {imported}"
        for module, imported in edges()
        if imported == "ringstrategy" or FLOOR_OF[room(imported)] > FLOOR_OF[room(module)]
    ]
    assert not upward, upward


def test_no_two_modules_import_each_other() -> None:
    circles = list(networkx.simple_cycles(networkx.DiGraph(edges())))
    assert not circles, circles


def test_no_two_rooms_import_each_other() -> None:
    rooms = {(room(module), room(imported)) for module, imported in edges()}
    graph = networkx.DiGraph((one, other) for one, other in rooms if one != other)
    assert not list(networkx.simple_cycles(graph))


IMPORT_EACH = """
import os, sys, torch
for name in sys.argv[1:]:
    if os.fork() == 0:
        __import__(f"ringstrategy.{name}")
        found = [each for each in ("lightning", "pytorch_lightning", "hydra", "triton") if each in sys.modules]
        print(name, *found, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.mark.timeout(60)
def test_what_needs_no_framework_imports_none() -> None:
    command = [sys.executable, "-c", IMPORT_EACH, *WITHOUT_FRAMEWORKS]  # each in a process that has imported torch only
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.splitlines() == WITHOUT_FRAMEWORKS


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("first", ["ringstrategy", "lightning", "lightning.pytorch.strategies"])
def test_the_names_are_registered_whatever_is_imported_first(first: str) -> None:
    code = f"""
import {first}, lightning, ringstrategy
from lightning.pytorch.strategies import StrategyRegistry
strategy = lightning.Trainer(strategy="ring_int8_spawn", accelerator="cpu", devices=2, logger=False).strategy
assert isinstance(strategy, ringstrategy.RingStrategy), strategy
print(strategy.algorithm.codec, "gossip" in StrategyRegistry)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip().endswith("True")
    assert "BlockInt(bits=8" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_package_that_is_imported_anew_registers_too() -> None:
    code = """
import sys, ringstrategy
assert ringstrategy.topologies.RingGraph() is not None
for name in [name for name in sys.modules if name.split(".")[0] == "ringstrategy"]:
    del sys.modules[name]
import ringstrategy, lightning
strategy = lightning.Trainer(strategy="ring", accelerator="cpu", devices=2, logger=False).strategy
print(isinstance(strategy, ringstrategy.RingStrategy))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert done.stdout.strip().endswith("True"), done.stderr


def test_public_names_are_all_there() -> None:
    import ringstrategy

    assert set(ringstrategy.__all__) <= set(dir(ringstrategy))
    assert all(getattr(ringstrategy, name) is not None for name in ringstrategy.__all__)
    with pytest.raises(AttributeError, match="module 'ringstrategy' has no attribute 'AllReduced'"):
        _ = ringstrategy.AllReduced
