"""When Numba compiles, and on which threads: test_kernels.py has what kernels compute."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import numba
import numpy as np
import pytest
import torch
from fakes import on_all_ranks
from kinds import CPU, KIND, awkward, on_cores, random_message, same
from numba.core import caching
from torch import nn

from ringstrategy import Gossip, LocalSGD, Nesterov
from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Rotated, Sign, TopK
from ringstrategy.kernels import compiled, cpu, cpu_elementwise, jit, operations, threads
from ringstrategy.kernels.threads import free_cores, in_parts

if KIND != "cpu":
    pytest.skip("of a CPU", allow_module_level=True)

ROOT = Path(__file__).parents[1]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Forgets what is compiled; from its call on nothing may be."""
    for kernel in (cpu.rotate, cpu_elementwise.lose_float16, cpu_elementwise.lose_bfloat16, cpu_elementwise.nesterov):
        monkeypatch.setattr(kernel, "_compiled", None)
    for name in ("block_kernels", "sparse_kernels", "lose_kernel", "rotate_kernel", "mix_kernel", "nesterov_kernel"):
        getattr(compiled, name).cache_clear()

    def refuse(*_: object) -> None:
        raise AssertionError("a step waits for a compiler")

    return lambda: monkeypatch.setattr(jit.Kernel, "_compile", refuse)


# Threads


THREADED = [
    *(TopK(8, 256), TopK(3, 300), Cast("fp16"), Cast("bf16"), BlockInt(8), Sign(), Gaussian(4), BlockFloat8()),
    *(BlockInt(4, 64, rounding="stochastic"), Rotated(Gaussian(4))),
]


@pytest.mark.parametrize("codec", THREADED, ids=str)
def test_many_threads_give_the_same_bytes(codec: Codec) -> None:
    given, made = awkward(300_007, 64), []
    for cores in (1, 3):
        wire, lost, out = random_message(codec, 300_007, 1), torch.full((300_007,), 0.25), awkward(300_007, 64, 2)
        with on_cores(cores):
            codec.hop([], given.clone(), wire, residual=lost, lost=lost, seed=3, own_seed=4)
            codec.decode(wire, out, add=True)
        made.append((wire, lost, out))
    for one, other in zip(*made, strict=True):
        assert same(one, other)


def test_an_error_in_any_thread_comes_out() -> None:
    begun = []

    def fail(first: int, last: int) -> None:
        begun.append(first)
        if first:
            raise ValueError("in a thread")

    with on_cores(3), pytest.raises(ValueError, match="in a thread"):
        in_parts(1, 300_000, fail)
    assert len(begun) == 3


def test_threads_stay_until_the_last_exchange_ends() -> None:
    threads.begin_threads(3)
    threads.begin_threads(3)
    threads.end_threads()
    assert threads._threads == 3
    threads.end_threads()
    assert threads._threads == 1


def test_cores_that_computing_leaves_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(12)), raising=False)
    for busy, expected in ((1, [11, 5, 3, 1]), (5, [7, 1, 1, 1])):
        monkeypatch.setattr("torch.get_num_threads", lambda busy=busy: busy)
        assert [free_cores(ranks) for ranks in (1, 2, 3, 64)] == expected


# When kernels are compiled


FRESH: list[Codec] = [
    *(BlockInt(8), BlockFloat8("e4m3"), Sign(), Rotated(Gaussian(4))),
    *(TopK(8, 256), Cast("fp16"), Cast("bf16")),
]


@pytest.mark.filterwarnings("error")  # else what cannot be compiled goes to the reference
@pytest.mark.parametrize("codec", FRESH, ids=str)
def test_after_warming_up_nothing_is_compiled(codec: Codec, no_compiler: Any) -> None:
    codec.warm_up(torch.device("cpu"))
    no_compiler()
    given, lost, wire = torch.randn(2560), torch.zeros(2560), random_message(codec, 2560, 1)
    codec.hop([], given.clone(), wire, residual=lost, lost=lost, seed=1, own_seed=2)
    assert lost.any()
    codec.hop([wire.clone()], given.clone(), wire, seed=1, own_seed=2)
    for add in (False, True):
        codec.deliver(wire, given, seed=1, add=add)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_a_mixing_and_an_outer_step_wait_for_no_compiler(dtype: torch.dtype | None, no_compiler: Any) -> None:
    algorithm = LocalSGD(1, Nesterov(1.0, 0.5)) if dtype is None else Gossip()
    parameter = nn.Parameter(torch.ones(5, dtype=dtype))
    algorithm.setup({"weight": parameter}, on_all_ranks(1, lambda peers: peers)[0])
    algorithm.bind({parameter})
    no_compiler()
    out = parameter.detach()
    if dtype is None:
        operations.nesterov_.on(CPU)([out], [torch.ones(5)], [torch.zeros(5)], 1.0, 0.5)
    else:
        out = torch.full((5,), math.nan)
        operations.mix.on(CPU)(parameter.detach(), [torch.zeros(5, dtype=dtype)], [0.5], out)
    assert out.tolist() == [-0.5] * 5


WITHOUT = """
import sys, warnings
sys.modules["numba"] = None
import torch
from ringstrategy.codecs import BlockInt, Cast, Identity, TopK
from ringstrategy.kernels import operations
assert "numba" not in str(sorted(name for name in sys.modules if sys.modules[name] is not None))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        wire = torch.empty(BlockInt(8).nbytes(1000, torch.float32), dtype=torch.uint8)
        BlockInt(8).encode(torch.randn(1000, generator=torch.Generator().manual_seed(0)), wire)
    for codec in (TopK(), Cast("bf16")):
        small = torch.empty(codec.nbytes(1000, torch.float32), dtype=torch.uint8)
        codec.encode(torch.randn(1000), small, lost=torch.empty(1000))
        codec.decode(small, torch.empty(1000))
    operations.mix.on(small.device)(torch.ones(9), [torch.ones(9)], [1.0], torch.empty(9))
    operations.nesterov_.on(small.device)([torch.ones(9)], [torch.ones(9)], [torch.ones(9)], 0.5, 0.5)
print(len(said), said[0].message, wire.sum().item())
"""


def test_without_numba_one_warning_and_the_same_bytes() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wire = random_message(BlockInt(8), 1000, 1)
    BlockInt(8).encode(torch.randn(1000, generator=torch.Generator().manual_seed(0)), wire)
    assert done.stdout.startswith("1 Numba does not work here (")
    assert "pip install --upgrade numba" in done.stdout
    assert done.stdout.split()[-1] == str(wire.sum().item())


def test_a_kernel_is_kept_on_disk_and_compiled_in_memory_if_that_is_damaged_or_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> int:
        @jit.kernel("for this test")
        def halve(values: Any) -> None:
            for i in range(len(values)):
                values[i] /= 2

        values = np.ones(3)
        halve(values)
        assert values.sum() == 1.5
        return sum(halve._compiled.stats.cache_hits.values())

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert [found(), found()] == [0, 1]
    for file in tmp_path.rglob("*.nb?"):
        file.write_bytes(file.read_bytes()[:40])
    assert found() == 0
    for place, name in ((caching._CacheLocator, "ensure_cache_path"), (caching.IndexDataCacheFile, "save")):
        monkeypatch.setattr(place, name, Mock(side_effect=PermissionError("as of somebody else's, or a full disk")))
        assert found() == 0


def test_a_kernel_on_disk_is_named_by_all_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.registry import cpu_target

    def name(known: object) -> str:
        def kernel() -> None: ...

        jit.Kernel(kernel, known)
        return kernel.__qualname__

    names = {name("a format"), name("a format"), name("another")}
    assert len(names) == 2
    monkeypatch.setattr(jit, "_sources", lambda: "other sources")
    names.add(name("a format"))
    codegen = type(cpu_target.target_context.codegen())
    monkeypatch.setattr(codegen, "magic_tuple", lambda self: ("another processor",))
    names.add(name("a format"))
    assert len(names) == 4


def test_a_kind_that_no_kernel_knows_names_the_cure() -> None:
    form = mock.Mock(arithmetic=BlockInt(8).arithmetic._replace(kind="ternary"), spec=["arithmetic"])
    with pytest.raises(compiled.UnknownKindError, match=r"kind 'ternary', only int, .*: derive the codec from Codec"):
        compiled.block_kernels(form)
