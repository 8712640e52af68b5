"""Overrides of `ringstrategy-train`: short forms mean the long ones."""

import pytest
from omegaconf import OmegaConf
from test_app import CONFIGS, composed, names

from ringstrategy.overrides import PARTS, lengthened, shortened


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("topology=torus", "topology@strategy.algorithm.topology=torus"),
        ("topology=torus,complete", "topology@strategy.algorithm.topology=torus,complete"),
        ("codec=block_int", "codec@strategy.algorithm.codec=block_int"),
        ("collective=direct", "collective@strategy.algorithm.collective=direct"),
        ("algorithm=powersgd", "algorithm@strategy.algorithm=powersgd"),
        ("codec.bits=4", "strategy.algorithm.codec.bits=4"),
        ("codec.codec.bits=2", "strategy.algorithm.codec.codec.bits=2"),
        ("++codec.bits=4", "++strategy.algorithm.codec.bits=4"),
        ("~topology.rows", "~strategy.algorithm.topology.rows"),
        ("algorithm.bucket_mb=5", "strategy.algorithm.bucket_mb=5"),
    ],
)
def test_a_short_form_is_a_long_one(short, long):
    assert lengthened(short) == long
    assert shortened(long) == short
    assert (lengthened(long), shortened(short)) == (long, short)


@pytest.mark.parametrize(
    "override",
    [
        "-m",
        "strategy=ring",
        "+topology=torus",
        "codecs=3",
        "trainer.codec=3",
        "strategy.timeout.seconds=60",
        "codec@strategy.algorithm.codec.codec=gaussian",
        "strategy.algorithms.codec=3",
        "model.codec.bits=4",
    ],
)
def test_other_arguments_stay(override):
    assert lengthened(override) == shortened(override) == override


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", PARTS)
def test_every_option_of_a_part_is_chosen_by_its_short_form(part):
    strategy = "strategy=gossip" if part == "topology" else "strategy=ring_topk"
    chosen = set()
    for name in names(part):
        cfg = composed(strategy, lengthened(f"{part}={name}"))
        alone = OmegaConf.load(f"{CONFIGS}/{part}/{name}.yaml")
        assert OmegaConf.select(cfg, PARTS[part])._target_ == alone._target_
        chosen.add(str(OmegaConf.select(cfg, PARTS[part])))
    assert len(chosen) == len(names(part))
