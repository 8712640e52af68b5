"""Short forms of `ringstrategy-train`'s overrides: `topology=torus` instead of the path where Hydra keeps it."""

import re
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

PARTS = {  # of a strategy, and where the configuration holds them
    "codec": "strategy.algorithm.codec",
    "collective": "strategy.algorithm.collective",
    "outer": "strategy.algorithm.outer",
    "topology": "strategy.algorithm.topology",
    "algorithm": "strategy.algorithm",  # last: the other paths begin with it
}
PLACES = {"optimizer": "model.optimizer", **PARTS}


def lengthened(argument: str) -> str:
    """`topology=torus` becomes `topology@strategy.algorithm.topology=torus`, `codec.bits=4` likewise.

    Any other argument stays as it is, `+topology=torus` too.
    """
    for part, path in PLACES.items():
        if argument.startswith(f"{part}="):
            return f"{part}@{path}{argument.removeprefix(part)}"
        if match := re.match(rf"([+~]*){part}(?=\.)", argument):
            return f"{match[1]}{path}{argument[match.end() :]}"
    return argument


def shortened(override: str) -> str:
    """The inverse of `lengthened`."""
    for part, path in PLACES.items():
        if override.startswith(f"{part}@{path}="):
            return f"{part}{override.removeprefix(f'{part}@{path}')}"
        if match := re.match(rf"([+~]*){re.escape(path)}(?=\.)", override):
            return f"{match[1]}{part}{override[match.end() :]}"
    return override


def swept(argument: str) -> str:
    """For `-m`: one value of a strategy's setting as a list of one, `strategy.algorithm.interval=choice(4)`.

    Before its jobs Hydra composes a sweep without its lists. Without `strategy=gossip,push_sum` that is the default
    strategy, which lacks the settings of those two.
    """
    key, equals, value = argument.partition("=")
    if not equals or not re.match(r"\+*(\w+@)?strategy\.", key):
        return argument
    try:
        parsed = OverridesParser.create().parse_override(argument)
    except HydraException:  # Hydra parses it again, and says why
        return argument
    return argument if parsed.is_sweep_override() else f"{key}=choice({value})"


def planned(sweep: Path) -> list[tuple[str, list[str]]]:
    """Of each job of the sweep in this folder, the strategy's name and the overrides.

    They are those of `multirun.yaml`, which Hydra writes when a sweep of all combinations begins. Empty without one: a
    sweeper such as Optuna's chooses jobs as it goes.
    """
    try:
        hydra = yaml.safe_load((sweep / "multirun.yaml").read_text())["hydra"]
        default = hydra["runtime"]["choices"]["strategy"]
        if not hydra["sweeper"]["_target_"].endswith(".BasicSweeper"):
            return []
        params = [f"{key}={value}" for key, value in (hydra["sweeper"]["params"] or {}).items()]
        overrides = OverridesParser.create().parse_overrides([*params, *hydra["overrides"]["task"]])
        [jobs] = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    except (OSError, KeyError, TypeError, yaml.YAMLError, HydraException):
        return []  # no such file, or one of another program; `model=glob(*)` needs the configuration
    found = []
    for job in jobs:
        own = [shortened(text) for text in job if not re.match(r"hydra[./]", text)]  # as a job records them
        names = [text.removeprefix("strategy=") for text in own if text.startswith("strategy=")]
        found.append(((names or [default])[-1], own))
    return found
