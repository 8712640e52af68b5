"""What Numba compiles beside block codecs (see test_kernels.py): the bits of torch, on any number of threads."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import on_all_ranks
from kinds import CPU, IN_TORCH, KIND, OVERFLOWS, Fed, Guarded, awkward, delivered, hop, random_message, same
from pairs import all_pairs
from torch import Tensor, nn

from ringstrategy import Gossip, LocalSGD, Nesterov
from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Rotated, Sign, TopK
from ringstrategy.kernels import compiled, cpu, cpu_elementwise, jit, operations, reference, threads
from ringstrategy.kernels.threads import free_cores, in_parts, use_threads

if KIND != "cpu":
    pytest.skip("of a CPU", allow_module_level=True)

ROOT = Path(__file__).parents[1]
FED: list[Fed] = [(torch.float32, False), (None, True), (torch.float32, True)]


@pytest.fixture
def on_cores() -> Any:
    """Run something on so many cores."""

    def run(cores: int, work: Any, *given: Any) -> None:
        use_threads(cores)
        try:
            work(*given)
        finally:
            use_threads(1)

    return run


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


# Sparse codecs and casts


SPARSE = [(1, 1), (3, 7), (8, 256), (32, 256), (256, 256), (3, 300), (70, 1000), (5, 1 << 15)]


@pytest.mark.parametrize("codec", [*(TopK(k, block) for k, block in SPARSE), Cast("fp16"), Cast("bf16")], ids=str)
def test_sparse_messages_and_casts_have_the_bytes_of_torch_and_any_bytes_arrive_alike(codec: Codec) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    for numel, dtype, fed, count in all_pairs([0, 1, 7, 256, 257, 1003, 40_000], dtypes, FED, [0, 2]):
        case = numel, dtype, fed if dtype == torch.float32 else (None, True), count, 0
        for found, expected in zip(hop(KIND, codec, *case), hop(IN_TORCH, codec, *case), strict=True):
            assert same(found, expected), case
        wire, there = random_message(codec, numel, numel), awkward(numel, 64, 2, dtype)
        if isinstance(codec, TopK):
            wire[1 : 2 * -(-numel // codec.block) * codec.k : 4] &= 0x3F  # else almost all blocks have a NaN
        for add in (False, True):
            assert same(*(delivered(kind, codec, wire, there, add=add) for kind in (KIND, IN_TORCH))), (case, add)


def test_ties_and_blocks_that_are_not_finite_have_the_documented_places() -> None:
    def encoded(codec: TopK, given: Tensor, lost: Tensor | None = None) -> tuple[Tensor, Tensor]:
        wire = random_message(codec, given.numel(), 1)
        codec.encode(given, wire, lost=lost)
        kept, places = wire.split([2 * len(wire) // 3, len(wire) // 3])
        return kept.view(torch.bfloat16).view(-1, codec.k), places.view(-1, codec.k)

    kept, places = encoded(TopK(4, 8), torch.tensor([1.0, -2, 0, 2, -1, 1, -2, 0, 0, 0]))
    assert places.tolist() == [[0, 1, 3, 6], [0, 1, 2, 3]], "the first of equal ones; two of them beyond the end"
    assert kept.tolist() == [[1, -2, 2, -2], [0, 0, 0, 0]]
    for poison in (math.nan, math.inf, OVERFLOWS):
        given, lost = torch.arange(32.0), torch.full((32,), 7.0)
        given[5] = poison
        kept, places = encoded(TopK(4, 16), given, lost)
        assert kept[0].view(torch.int16).eq(0x7FC0).all()
        assert kept[1].isfinite().all()
        assert lost[:16].eq(7).all()
        assert not lost[16:].eq(7).any()
        assert places.tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_a_cast_loses_is_what_torch_says_for_each_code(dtype: torch.dtype) -> None:
    codes = torch.arange(1 << 16).to(torch.int16).view(dtype)
    exact = codes.float().nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
    for given in (exact, exact * 1.0003, torch.full((1 << 16,), math.inf)):
        found, expected = torch.full_like(given, 3.0), torch.full_like(given, 3.0)
        operations.lose.on(CPU)(given, codes, found)
        operations.lose.in_torch(given, codes, expected)
        assert same(found, expected)
        assert found[~codes.isfinite()].eq(3).all()


# Mixings and steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_mixing_has_the_bits_of_torch(dtype: torch.dtype, on_cores: Any) -> None:
    sums, weights = torch.promote_types(dtype, torch.float32), [0.3, 1 / 7, 0.21]
    for numel, count, cores in ((0, 1, 1), (1, 3, 1), (1023, 2, 3), (1025, 0, 1), (300_007, 3, 1), (300_007, 3, 3)):
        own, *theirs = (awkward(numel, numel or 1, 16 * seed).clamp(-6e4, 6e4).to(dtype) for seed in range(4))
        given, expected = (own, theirs[:count], weights[:count]), torch.full((numel,), math.nan, dtype=sums)
        reference.mix(*given, expected)
        exact = sum((w * (v.double() - own.double()) for v, w in zip(theirs, weights[:count], strict=False)), 0 * own)
        largest = max(each.double().abs().max() for each in (own, *theirs)) if numel else 0.0
        assert ((expected - exact).abs() <= 8 * torch.finfo(sums).eps * largest).all()
        out = Guarded(torch.full((numel,), math.nan, dtype=sums))
        on_cores(cores, operations.mix.on(CPU), *given, out.tensor)
        assert same(out.read(), expected), (numel, cores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_with_momentum_has_the_bits_of_torch(dtype: torch.dtype, on_cores: Any) -> None:
    for numel, cores in ((0, 1), (1, 1), (1023, 3), (300_007, 1), (300_007, 3)):
        given = [awkward(numel, numel or 1, 16 * seed).to(dtype) for seed in range(3)]  # parameters, gradients, momenta
        expected, ours = [tensor.clone() for tensor in given], [Guarded(tensor) for tensor in given]
        numbers, gradients, momenta = (tensor.double() for tensor in given)
        reference.nesterov_(*([tensor] for tensor in expected), 0.3, 0.7)
        exact = numbers - 0.3 * (gradients + 0.7 * (0.7 * momenta + gradients))
        torch.testing.assert_close(expected[0].double(), exact, rtol=1e-6, atol=torch.finfo(dtype).eps * 1e6)
        on_cores(cores, operations.nesterov_.on(CPU), *([each.tensor] for each in ours), 0.3, 0.7)
        for mine, other in zip(ours, expected, strict=True):
            assert same(mine.read(), other), (numel, cores)


# Threads


THREADED = [
    *(TopK(8, 256), TopK(3, 300), Cast("fp16"), Cast("bf16"), BlockInt(8), Sign(), Gaussian(4), BlockFloat8()),
    *(BlockInt(4, 64, rounding="stochastic"), Rotated(Gaussian(4))),
]


@pytest.mark.parametrize("codec", THREADED, ids=str)
def test_many_threads_give_the_same_bytes(codec: Codec, on_cores: Any) -> None:
    given, made = awkward(300_007, 64), []

    def both_ways(wire: Tensor, lost: Tensor, out: Tensor) -> None:
        codec.hop([], given.clone(), wire, residual=lost, lost=lost, seed=3, own_seed=4)
        codec.decode(wire, out, add=True)

    for cores in (1, 3):
        made.append((random_message(codec, 300_007, 1), torch.randn(300_007), awkward(300_007, 64, 2)))
        made[-1][1].fill_(0.25)
        on_cores(cores, both_ways, *made[-1])
    for one, other in zip(*made, strict=True):
        assert same(one, other)


def test_an_error_in_any_thread_comes_out(on_cores: Any) -> None:
    begun = []

    def fail(first: int, last: int) -> None:
        begun.append(first)
        if first:
            raise ValueError("in a thread")

    with pytest.raises(ValueError, match="in a thread"):
        on_cores(3, in_parts, 1, 300_000, fail)
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


COMPILED = """
import sys, warnings
warnings.simplefilter("error")
import torch
from numba.core import caching
bits, trouble = int(sys.argv[1]), sys.argv[2]
def refuse(self, *given):
    raise PermissionError("as of a folder of somebody else, or a full disk")
if trouble == "unwritable":
    caching._CacheLocator.ensure_cache_path = refuse
if trouble == "full":
    caching.IndexDataCacheFile.save = refuse
from ringstrategy.codecs import BlockInt
from ringstrategy.kernels.compiled import block_kernels
codec, values = BlockInt(bits, block=24), torch.randn(1000, generator=torch.Generator().manual_seed(0))
wire = torch.empty(codec.nbytes(1000, torch.float32), dtype=torch.uint8)
codec.encode(values, wire)
print(sum(block_kernels(codec).encode._compiled.stats.cache_hits.values()), wire.sum().item())
"""


def start_compiling(cache: Path, bits: int = 3, trouble: str = "none") -> subprocess.Popen[str]:
    """A process that encodes 1000 values by kernels that are or are not in this cache."""
    told = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", COMPILED, str(bits), trouble]
    return subprocess.Popen(command, cwd=ROOT, env=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Whether the kernel was in the cache, and the sum of the bytes."""
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    found, total = map(int, out.split())
    return found, total


def expected_sum(bits: int = 3) -> int:
    codec, given = BlockInt(bits, block=24), torch.randn(1000, generator=torch.Generator().manual_seed(0))
    wire = random_message(codec, 1000, 1)
    reference.encode(given, (), wire, codec)
    return int(wire.sum())


@pytest.mark.slow
def test_ranks_compile_at_the_same_time_and_the_next_run_finds_it_on_disk(tmp_path: Path) -> None:
    together = [start_compiling(tmp_path, bits) for bits in (3, 3, 5)]
    assert [total for _, total in map(printed, together)] == [expected_sum(bits) for bits in (3, 3, 5)]
    for bits in (3, 5):
        assert printed(start_compiling(tmp_path, bits)) == (1, expected_sum(bits))
    indices = [file for file in tmp_path.rglob("*.nbi") if "encode" in file.name]
    assert len(indices) == 2, "of one index two processes would make one entry"
    for file in tmp_path.rglob("*.nb?"):
        file.write_bytes(file.read_bytes()[:40])
    assert printed(start_compiling(tmp_path)) == (0, expected_sum()), "damaged, it is compiled anew"


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


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["unwritable", "full"])
def test_where_nothing_can_be_written_kernels_are_compiled_in_memory(tmp_path: Path, trouble: str) -> None:
    assert printed(start_compiling(tmp_path, trouble=trouble)) == (0, expected_sum())
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".lock"]
