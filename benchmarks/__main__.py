"""`python -m benchmarks NAME [options]`: each command is the module of its name, imported when it is called."""

from __future__ import annotations

import argparse
import ast
import importlib
from collections.abc import Sequence
from pathlib import Path

_NAMES = (
    *("training", "collectives", "codecs", "overhead", "memory"),
    *("time_to_accuracy", "long_race", "fair_race"),
    *("faults", "fuzz", "soak", "requests", "chaos"),
    *("gpu", "kernels", "bucket", "shared_gpu"),
    *("simulation", "campaign", "report", "demo", "lab", "walk"),
)


def _described(name: str) -> str:
    """The first line of the module's docstring, without importing torch for it."""
    here = Path(__file__).parent
    [file] = [file for file in (here / f"{name}.py", here / name / "__init__.py") if file.exists()]
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0].replace("\n", " ")


def main(arguments: Sequence[str] | None = None) -> None:
    """Call the named command with what follows its name."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="What the product's figures are measured with.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:17} {_described(name)}" for name in _NAMES),
    )
    parser.add_argument("name", choices=_NAMES, metavar="NAME", help="one of those below; NAME --help has its options")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments)
    importlib.import_module(f"benchmarks.{asked.name}").main(asked.options)


if __name__ == "__main__":
    main()
