"""A value that its key does not take is refused in a user's words. docs/configuration.md has what
each takes, and a test compares it with the code: default, kind and range."""

import math
import typing

import pytest

from impala_async.config.load import validate_config
from impala_async.config.mistakes import FIELDS, is_section
from impala_async.errors import ConfigError
from tests.config.made import nested

KEYS = {key: field for key, field in FIELDS.items() if not is_section(field.annotation)}
# From outside these are used by their names.
STABLE = """
    seed env.id env.kwargs env.action_mask_key env.probe algorithm.name algorithm.gamma
    algorithm.lr algorithm.entropy_cost algorithm.value_cost algorithm.grad_clip algorithm.rho_bar
    algorithm.c_bar algorithm.pg_rho_bar algorithm.lambda model.name trajectory.rows
    actor.num_envs actor.sampler actor.threads actor.reconnect_s learner.device learner.threads
    learner.batch_columns learner.num_passes learner.minibatch_buffer_size
    learner.init_num_passes learner.queue_size learner.max_lag learner.publish_every_updates
    learner.report_every_s bind.data bind.weights pace.mode pace.lag train.num_actors
    stop.env_steps stop.mean_return stop.wall_s checkpoint.every_s checkpoint.keep
"""


def test_no_name_that_is_used_from_outside_vanishes():
    assert set(STABLE.split()) <= KEYS.keys()


def refused(key, value):
    with pytest.raises(ConfigError) as caught:
        validate_config(nested({"env.id": "X", key: value}))
    return str(caught.value)


def test_every_duration_has_a_largest_value():
    """Beyond it timers of the system overflow."""
    for key in (key for key in KEYS if key.endswith("_s")):
        assert " to 1" in refused(key, 1e12).partition(", got 1")[0]


def odd_values(field):
    """Those of other kinds, and those just out of the range."""
    kinds = [field.annotation, *typing.get_args(field.annotation)]
    deep = {}
    for _ in range(5000):
        deep = {"x": deep}
    yield from (deep, {"x": object()}, 10**5000, "\udcff")
    yield from [] if type(None) in kinds else [None]
    if float in kinds or int in kinds:
        yield from (math.nan, math.inf, True, "x", [])
    yield from [0.5] if int in kinds else []
    yield from ["yes", 2] if bool in kinds else []
    is_list = tuple in map(typing.get_origin, kinds)
    yield from ["x", 5, [[]], [object()]] if is_list else []
    yield from [5, True, ["x"]] if str in kinds and not is_list else []
    for bound in field.metadata:
        for name, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
            if hasattr(bound, name) and abs(getattr(bound, name)) < 1e30:
                yield getattr(bound, name) + step


@pytest.mark.parametrize("key", KEYS)
def test_values_that_no_key_takes_are_told_in_a_users_words(key):
    for value in odd_values(KEYS[key]):
        text = refused(key, value)
        assert text.startswith((f"config: {key}", f"config: {key.rpartition('.')[0]}: ")), value
        # It says what is wanted, and what it got.
        assert "wants" in text
        assert "got" in text or "double quotes" in text
        assert "Input should" not in text
