"""A Lightning trainer that is measured and says nothing."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L


def quiet_trainer(**how: Any) -> L.Trainer:
    """On this machine's CPU, unless `how` says otherwise; nothing is printed, logged or saved."""
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    silent: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**(silent | how))
