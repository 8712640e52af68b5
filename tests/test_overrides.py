"""Overrides of `ringstrategy-train`: short forms mean the long ones; what is wrong is refused with the right form."""

import re
import signal
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf

from ringstrategy.app import train
from ringstrategy.app.overrides import PARTS, lengthened, shortened, swept
from ringstrategy.app.refusals import check_arguments, check_keys, in_words, instantiate_strategy

CONFIGS = Path(str(files("ringstrategy.configs")))
GOSSIP = "gossip, gossip_exponential, gossip_int8, push_sum"


def names(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def _hydra():
    """Reads each file once."""
    with initialize_config_module("ringstrategy.configs", version_base="1.3"):
        yield


def composed(*overrides):
    return compose("train", ["output_dir=unused", *overrides])


def words_about(*overrides):
    """The error that `ringstrategy-train` ends with, or None if it would train."""
    try:
        cfg = composed(*map(lengthened, overrides))
    except CompactHydraException as error:
        return in_words(error)
    cfg.run.overrides = [shortened(lengthened(override)) for override in overrides]
    cfg.run.strategy = next((each[9:] for each in overrides if each.startswith("strategy=")), "ring")
    try:
        check_keys(cfg, cfg.run.overrides)
        check_arguments(cfg)
        instantiate_strategy(cfg)
    except ValueError as error:
        return str(error)
    return None


def test_a_short_form_is_a_long_one_and_other_arguments_stay():
    for short, long in {
        "topology=torus": "topology@strategy.algorithm.topology=torus",
        "algorithm=powersgd": "algorithm@strategy.algorithm=powersgd",
        "codec.bits=4": "strategy.algorithm.codec.bits=4",
        "++codec.bits=4": "++strategy.algorithm.codec.bits=4",
        "~topology.rows": "~strategy.algorithm.topology.rows",
        "algorithm.bucket_mb=5": "strategy.algorithm.bucket_mb=5",
    }.items():
        assert lengthened(short) == long
        assert shortened(long) == short
        assert (lengthened(long), shortened(short)) == (long, short)
    for other in (
        *("-m", "strategy=ring", "+topology=torus", "codecs=3", "trainer.codec=3", "strategy.algorithms.codec=3"),
        "codec@strategy.algorithm.codec.codec=gaussian",
    ):
        assert lengthened(other) == shortened(other) == other


def test_in_a_sweep_one_value_is_a_list_of_one():
    for override, listed in {
        "strategy.algorithm.interval=4": "strategy.algorithm.interval=choice(4)",
        "topology@strategy.algorithm.topology=torus": "topology@strategy.algorithm.topology=choice(torus)",
        "+strategy.algorithm.names=['a,b', c]": "+strategy.algorithm.names=choice(['a,b', c])",
    }.items():
        assert swept(override) == swept(listed) == listed
    same = ["-m", "strategy=ring", "strategy=ring,gossip", "seed=1", "~strategy.timeout"]
    for override in [*same, *(f"strategy.algorithm.interval={value}" for value in ("[4", "4,8", "range(1,4)"))]:
        assert swept(override) == override


@pytest.mark.parametrize("part", PARTS)
def test_every_option_of_a_part_is_chosen_by_its_short_form(part):
    strategy = {"topology": "strategy=gossip", "outer": "strategy=diloco"}.get(part, "strategy=ring_topk")
    chosen = set()
    for name in names(part):
        cfg = composed(strategy, lengthened(f"{part}={name}"))
        alone = OmegaConf.load(f"{CONFIGS}/{part}/{name}.yaml")
        assert OmegaConf.select(cfg, PARTS[part])._target_ == alone._target_
        chosen.add(str(OmegaConf.select(cfg, PARTS[part])))
    assert len(chosen) == len(names(part))


def test_what_fits_is_not_refused():
    own = {"model": ["model._target_=torch.nn.Identity"], "data": ["data._target_=torch.nn.Identity"]}
    for group, missing in own.items():
        for name in names(group):
            assert words_about(f"{group}={name}", *(missing if name == "own" else [])) is None, name
    assert words_about("strategy=ring", "codec=block_int", "codec.bits=4", "collective=direct") is None
    assert words_about("strategy=ring_topk", "codec.k=4", "+trainer.fast_dev_run=true") is None
    assert words_about("strategy=gossip", "topology@strategy.algorithm.topology=torus", "topology.rows=2") is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # nothing would read these
        (["+topology=complete"], rf"Write topology=complete without the \+. These strategies have one: {GOSSIP}$"),
        (["+max_epoch=3"], r"no key 'max_epoch', .*no effect. Did you mean trainer.max_epochs=3\?$"),
        (["+trainer.strategy=ddp"], "trainer.strategy would be ignored: use strategy without `trainer.`"),
        # a part that the strategy has not, a name that does not exist, a text where a number belongs
        (["strategy=ring", "topology=torus"], f"has no topology. .* one: {GOSSIP}. .* strategy=gossip topology=torus$"),
        (["strategy=rong"], r"(?s)Available options in 'strategy':.*Did you mean strategy=ring\?$"),
        (["trainer.max_steps=abc"], "^trainer.max_steps=abc: a number is needed"),
        (["strategy=ring_int8", "codec.bit=4"], r"codec has no 'bit'. Did you mean bits\? .*: \+codec.bit=4$"),
        # an argument that no class takes
        (["+trainer.max_epoch=3"], r"lightning.Trainer has no argument 'max_epoch'. Did you mean max_epochs\?$"),
        (["strategy=ring_auto", "algorithm.allow=[{_target_:ringstrategy.BlockInt,bit:4}]"], "Did you mean bits"),
        (["+strategy.codec=3"], r"belongs to the algorithm: RingStrategy\(AllReduce\(codec=...\)\)"),
        # parts that do not fit each other
        (["codec=top_k"], r"^TopK\(.*\) cannot be added hop by hop; .*\. On the command line: collective=direct$"),
        (["seed=["], "hydra.cc"),  # what Hydra says well
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_refused_with_the_right_form(overrides, words):
    said = words_about(*overrides)
    assert re.search(words, said), said
    assert "append" not in said  # Hydra's advice, which made runs that ignored the override


def _ends_with(folder, overrides):
    """What `ringstrategy-train` says at its end, in this process."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}
    sys.argv = ["ringstrategy-train", *overrides, f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
    try:
        with pytest.raises(SystemExit) as caught:
            train.main()
    finally:
        OmegaConf.clear_resolver("options_by_group")
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    return caught.value.code


@pytest.mark.parametrize("sweeps", [[], ["-m", "seed=1,2"]])
def test_a_refusal_is_short_and_trains_nothing(ranks, tmp_path, sweeps):
    [said] = ranks(1, _ends_with, str(tmp_path), [*sweeps, "+topology=complete"])
    assert "Write topology=complete without the +" in said
    assert said.startswith("ringstrategy-train: ")
    assert "HYDRA_FULL_ERROR" not in said
    assert not list(tmp_path.rglob("config.yaml.*")) + list(tmp_path.rglob("summary.json"))
