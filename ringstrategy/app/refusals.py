"""Configuration errors of `ringstrategy-train`: they name the mistake and the right override."""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from inspect import Parameter, signature
from typing import Any, get_args, get_type_hints

from hydra.errors import CompactHydraException, InstantiationException, MissingConfigException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringstrategy.app.overrides import PARTS, shortened

KEYS = ("strategy", "model", "data", "trainer", "seed", "resume", "output_dir", "run", "logger", "callbacks")
GIVEN_TO_TRAINER = ("strategy", "logger", "callbacks")  # by `train`, from the keys of the same names


def check_keys(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """ValueError: `cfg` has a top-level key that nothing reads, so the run would ignore it."""
    for key in cfg:
        if key not in KEYS:
            override = next((each for each in overrides if re.match(rf"\+*{re.escape(str(key))}\b", each)), str(key))
            raise ValueError(_unknown_key(override, cfg))


def check_arguments(cfg: DictConfig) -> None:
    """ValueError: a class is given an argument that it does not take, or the trainer one that `train` overwrites."""
    for key in GIVEN_TO_TRAINER:
        if key in cfg.trainer:
            raise ValueError(f"trainer.{key} would be ignored: use {key} without `trainer.`, see --help")
    for path, node in _nodes_with_target("", OmegaConf.to_container(cfg)):
        if node["_target_"] == "???":
            raise ValueError(f"{path}._target_ is missing: add {path}._target_=my_module.MyClass")
        try:
            parameters = signature(get_object(node["_target_"])).parameters.values()
        except ImportError as error:
            why = " ".join(str(error).splitlines()[1:])
            override = f"{shortened(f'{path}._target_')}={node['_target_']}"
            raise ValueError(
                f"{override} cannot be imported: give a module and a class, as my_module.MyClass. {why}"
            ) from None
        except ValueError:  # a class written in C, such as timedelta
            continue
        if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
            continue
        takes = [parameter.name for parameter in parameters]
        for name in node:
            if name not in takes and not name.startswith("_"):
                raise ValueError(_unknown_argument(path, name, node["_target_"], takes, cfg))
        for name, hint in _hints(node["_target_"]).items():
            if isinstance(node.get(name), str) and set(get_args(hint) or [hint]) <= {int, float, bool, type(None)}:
                raise ValueError(f"{shortened(f'{path}.{name}')}={node[name]}: a number is needed, or true, or false")


def instantiate_strategy(cfg: DictConfig) -> Any:
    """The strategy. ValueError: one of its arguments is wrong, or its parts do not fit each other."""
    try:
        return instantiate(cfg.strategy, _convert_="all")
    except InstantiationException as error:
        if not isinstance(error.__cause__, ValueError | TypeError):
            raise
        raise ValueError(f"{error.__cause__}{_as_overrides(str(error.__cause__), cfg)}") from error


def in_words(error: CompactHydraException | OmegaConfBaseException) -> str:
    """What Hydra refuses, with the right form instead of its advice to append with a +."""
    if isinstance(error, MissingConfigException):
        return _no_option(error)
    refused = re.search(r"Could not override '([^']+)'", str(error))
    advice = re.search(r"use \+(.+)", str(error))
    if refused and advice:
        key, override = refused[1], advice[1]
        for part, path in PARTS.items():
            if key == f"{part}@{path}":
                return _no_part(part, override)
        parent = getattr(error.__cause__, "parent_node", None)  # of the key that is missing
        if isinstance(parent, DictConfig):
            return _no_key(key, override, parent)
    return "\n".join(str(each) for each in (error, error.__cause__) if each is not None)


def _unknown_key(override: str, cfg: DictConfig) -> str:
    key, _, value = override.lstrip("+").partition("=")
    first = re.split(r"[.@]", key)[0]
    words = f"{override}: the configuration has no key {first!r}, so this would have no effect. "
    if first in PARTS:
        strategies = ", ".join(_strategies_with(first))
        return words + f"Write {key}={value} without the +. These strategies have one: {strategies}"
    leaves = dict(_leaves("", OmegaConf.to_container(OmegaConf.masked_copy(cfg, list(KEYS)))))
    near = get_close_matches(key.split(".")[-1], sorted(set(leaves.values())), n=1)
    if paths := [path for path, name in leaves.items() if name in near]:
        return words + f"Did you mean {' or '.join(f'{path}={value}' if value else path for path in paths)}?"
    return words + f"The keys are {', '.join(KEYS)}; ringstrategy-train --help has examples"


def _unknown_argument(path: str, name: str, target: str, takes: Sequence[str], cfg: DictConfig) -> str:
    key = shortened(f"{path}.{name}")
    words = f"{key}: {target} has no argument {name!r}. {_choice(name, takes)}"
    if path.startswith("strategy") and not any(each.lstrip("+").startswith(key) for each in cfg.run.overrides):
        words += f" It comes with strategy={cfg.run.strategy}: use another strategy"
    return words


def _no_option(error: MissingConfigException) -> str:
    words = str(error).split("\nConfig search path:")[0]
    group, _, option = (error.missing_cfg_file or "").partition("/")
    if group == "codec" and f"ring_{option}" in _options("strategy"):
        words += f"\nDid you mean strategy=ring_{option}?"
    elif near := get_close_matches(option, error.options or [], n=1):
        words += f"\nDid you mean {group}={near[0]}?"
    return words


def _no_part(part: str, override: str) -> str:
    strategies = _strategies_with(part)
    form = shortened(override)
    words = f"{form}: the strategy has no {part}. These strategies have one: {', '.join(strategies)}."
    if not form.startswith(f"{part}="):  # an option of one part fits any of them, a setting does not
        return words
    return f"{words} For example: strategy={'ring' if 'ring' in strategies else strategies[0]} {form}"


def _no_key(key: str, override: str, parent: DictConfig) -> str:
    root = parent._get_root()
    assert isinstance(root, DictConfig)
    if key.split(".")[0] not in KEYS:
        return _unknown_key(override, root)
    for part, path in PARTS.items():
        if key.startswith(f"{path}.") and OmegaConf.select(root, path) is None:
            return _no_part(part, override)
    *_, group, name = key.split(".")
    form = shortened(override)
    names = [str(each) for each in parent if not str(each).startswith("_")]
    if group in PARTS and not names:
        return f"{form}: {parent._target_} has nothing to set. Choose another {group} with it: {group}=NAME {form}"
    return (
        f"{form}: {group} has no {name!r}. {_choice(name, names)} "
        f"To pass an argument that the configuration does not list: {shortened('+' + override)}"
    )


def _hints(target: str) -> Mapping[str, Any]:
    """The types of a class's arguments; empty if it declares none, or names types that it has not imported."""
    try:
        return get_type_hints(get_object(target).__init__)
    except (NameError, TypeError):
        return {}


def _choice(name: str, names: Sequence[str]) -> str:
    if near := get_close_matches(name, names, n=1):
        return f"Did you mean {near[0]}?"
    return f"It has {', '.join(names)}." if names else "It has none."


def _as_overrides(cure: str, cfg: DictConfig) -> str:
    """The classes that an error proposes, as the overrides that choose them."""
    used = {node["_target_"].split(".")[-1] for _, node in _nodes_with_target("", OmegaConf.to_container(cfg))}
    proposed = [name for name in re.findall(r"(\w+)\(", cure) if name not in used]
    forms = [form for name in dict.fromkeys(proposed) for form in _overrides_for(name)]
    return f". On the command line: {' or '.join(forms)}" if forms else ""


def _overrides_for(name: str) -> list[str]:
    return [
        f"{part}={option}"
        for part in PARTS
        for option in _options(part)
        if re.search(rf"^_target_: .*\.{name}$", _yaml(part, option), re.MULTILINE)
    ]


def _strategies_with(part: str) -> list[str]:
    return [option for option in _options("strategy") if f"- /{part}@" in _yaml("strategy", option)]


def _options(group: str) -> list[str]:
    names = [path.name for path in files(f"ringstrategy.configs.{group}").iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _yaml(group: str, option: str) -> str:
    return (files(f"ringstrategy.configs.{group}") / f"{option}.yaml").read_text()


def _nodes_with_target(path: str, node: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(node, Mapping) and "_target_" in node:
        yield path, node
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from _nodes_with_target(f"{path}.{key}" if path else str(key), child)


def _leaves(path: str, node: Any) -> Iterator[tuple[str, str]]:
    """Each value's path below `node` and the last name of that path."""
    for key, child in node.items():
        below = f"{path}.{key}" if path else key
        if isinstance(child, Mapping):
            yield from _leaves(below, child)
        elif not key.startswith("_"):
            yield below, key
