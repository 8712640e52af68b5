"""The house: each room imports only from the floors below, no two modules import each other."""

import ast
import re
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
    {"failure", "kernels"},
    {"codecs", "topologies", "transport"},
    {"collectives", "membership"},
    {"buckets"},
    {"cost"},
    {"algorithms"},
    {"names", "session", "simulator"},
    {"examples", "integrations", "horovod", "lightning_fabric", "pytorch_lightning"},
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
    return module.split(".")[1]


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


def test_nothing_is_imported_upward_or_in_a_circle() -> None:
    found = edges()
    upward = [
        f"{module} imports {imported}"
        for module, imported in found
        if imported == "ringstrategy" or FLOOR_OF[room(imported)] > FLOOR_OF[room(module)]
    ]
    assert not upward, upward
    circles = list(networkx.simple_cycles(networkx.DiGraph(found)))
    assert not circles, circles
    rooms = {(room(module), room(imported)) for module, imported in found}
    circles = list(networkx.simple_cycles(networkx.DiGraph((one, other) for one, other in rooms if one != other)))
    assert not circles, circles


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


def test_what_needs_no_framework_imports_none() -> None:
    command = [sys.executable, "-c", IMPORT_EACH, *WITHOUT_FRAMEWORKS]  # each in a process that has imported torch only
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.splitlines() == WITHOUT_FRAMEWORKS


IMPORT_ANEW = """
import sys, ringstrategy, lightning
from lightning.pytorch.strategies import StrategyRegistry
def strategy():
    return lightning.Trainer(strategy="ring_int8_spawn", accelerator="cpu", devices=2, logger=False).strategy
assert isinstance(strategy(), ringstrategy.RingStrategy), strategy()
assert "gossip" in StrategyRegistry
print(strategy().algorithm.codec)
assert ringstrategy.topologies.RingGraph() is not None
for name in [name for name in sys.modules if name.split(".")[0] == "ringstrategy"]:
    del sys.modules[name]
import ringstrategy
print(isinstance(strategy(), ringstrategy.RingStrategy))
"""


@pytest.mark.slow
def test_names_are_registered_if_we_come_first_and_if_we_come_again() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ANEW], capture_output=True, text=True, check=False, cwd="/")
    assert re.search(r"BlockInt\(bits=8.*\nTrue$", done.stdout.strip()), done.stderr


def test_public_names_are_all_there() -> None:
    import ringstrategy

    assert set(ringstrategy.__all__) <= set(dir(ringstrategy))
    assert all(getattr(ringstrategy, name) is not None for name in ringstrategy.__all__)
    with pytest.raises(AttributeError, match="module 'ringstrategy' has no attribute 'AllReduced'"):
        _ = ringstrategy.AllReduced
