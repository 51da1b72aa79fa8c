"""Which actions an evaluation plays, and what is set in vain."""

import pytest

from impala_async.config.load import load_config
from impala_async.errors import ConfigError

CARTPOLE = "env.id=CartPole-v1"


def test_the_greedy_return_decides_where_both_are_played():
    for actions, kinds in (
        ("greedy", ("greedy",)),
        ("sampled", ("sampled",)),
        ("both", ("greedy", "sampled")),
    ):
        flags = [CARTPOLE, "evaluate.every_s=60", f"evaluate.actions={actions}"]
        assert load_config(None, flags).evaluate.kinds == kinds


@pytest.mark.parametrize("key", ["stop.eval_return=1", "evaluate.episodes=3"])
def test_without_evaluations_other_keys_do_nothing(key):
    assert load_config(None, [CARTPOLE]).evaluate.every_s is None
    load_config(None, [CARTPOLE, "evaluate.every_s=60", key])
    with pytest.raises(ConfigError, match=r"does nothing without evaluate.every_s: drop it, or se"):
        load_config(None, [CARTPOLE, key])


def test_every_so_many_seconds_is_more_than_none():
    with pytest.raises(ConfigError, match=r"evaluate.every_s: wants a number over 0"):
        load_config(None, [CARTPOLE, "evaluate.every_s=0"])
