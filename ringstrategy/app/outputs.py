"""Where commands write: found out before they compute for minutes."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path


def make_writable(folder: Path, parser: argparse.ArgumentParser, option: str) -> None:
    """Make the folder if it is not there; where nothing can be written, end with the parser's error on `option`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        parser.error(f"argument {option}: {error}")
