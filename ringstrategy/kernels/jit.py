"""How Numba compiles the kernels for CPUs."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numba
from llvmlite import ir
from numba.core.registry import cpu_target
from numba.extending import intrinsic

_log = logging.getLogger(__name__)
_LOCKED_SECONDS = 120.0  # by another process: several times what compiling takes, also on a busy machine


def inline(function: Callable[..., Any]) -> Any:
    """Compiled as a part of the kernels that call it."""
    return numba.njit(forceinline=True, error_model="numpy")(function)


def kernel(*known: object) -> Callable[[Callable[..., Any]], Kernel]:
    """Compile a function for what it knows from the function around it, such as a format."""
    return lambda function: Kernel(function, known)


class Kernel:
    """A function that is compiled when it is first called, and kept on disk where that is possible.

    Numba gives all functions of one name and line one index, which processes that save at the same time can spoil for
    each other, and knows nothing of other files that a kernel is made of. So here the name on disk depends on all that
    the kernel depends on. Of processes that need a kernel at the same time one compiles it, and the others wait for its
    file. Whatever is wrong with the disk (full, read-only, damaged), it is then compiled in memory.

    Args:
        function: the first call is one without values.
        known: what it is compiled for, beside the processor; its `repr` says it all.
    """

    def __init__(self, function: Callable[..., Any], known: object) -> None:
        self._function = function
        processor = cpu_target.target_context.codegen().magic_tuple()
        everything = repr((_sources(), processor, known)).encode()
        function.__qualname__ += "_" + hashlib.sha256(everything).hexdigest()[:16]
        self._compiled: Any = None

    def __call__(self, *given: Any) -> None:
        """Run it; without the GIL."""
        if self._compiled is None:
            self._compile(given)
        else:
            self._compiled(*given)

    def _compile(self, given: Sequence[Any]) -> None:
        try:
            compiled = _compiled(self._function, cache=True)
            with _locked(Path(compiled._cache.cache_path) / f"{self._function.__qualname__}.lock"):
                compiled(*given)
        except Exception as error:  # of a cache any can come; if it is not the cache's, it comes again
            compiled = _compiled(self._function, cache=False)
            compiled(*given)
            _log.info("compiled codecs cannot be kept on disk for the next time: %s", str(error).splitlines()[0])
        self._compiled = compiled


def _compiled(function: Callable[..., Any], *, cache: bool) -> Any:
    return numba.njit(nogil=True, error_model="numpy", cache=cache)(function)


class Kernels(NamedTuple):
    """Of one format; each is compiled when it is first called."""

    encode: Callable[..., None]
    decode: Callable[..., None]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among a host's processes. A disk without locks, or a process that stopped, keeps nobody out for good."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path.open("a"))
            deadline = time.monotonic() + _LOCKED_SECONDS
            while not _lock(file) and time.monotonic() < deadline:
                time.sleep(0.1)
        yield


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed, or the process ends
    except (BlockingIOError, PermissionError):  # POSIX allows both
        return False
    return True


@functools.cache
def _sources() -> str:
    """A digest of all that kernels are made of."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _to_real(typing, bits):
    """The float32 of these bits, int32 or uint32."""
    del typing

    def generate(context, builder, signature, arguments):
        del context, signature
        return builder.bitcast(arguments[0], ir.FloatType())

    return numba.types.float32(bits), generate


real: Any = intrinsic(_to_real)


def _to_lowest(typing, mask):
    """The place of the lowest bit that is set in a uint64; 64 if none is."""
    del typing

    def generate(context, builder, signature, arguments):
        del context, signature
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return numba.types.uint64(mask), generate


lowest: Any = intrinsic(_to_lowest)


def _to_pointer(typing, address):
    """To the byte at an address."""
    del typing

    def generate(context, builder, signature, arguments):
        del context, signature
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return numba.types.CPointer(numba.types.uint8)(address), generate


pointer: Any = intrinsic(_to_pointer)
