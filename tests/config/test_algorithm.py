"""What each algorithm makes of its section, and that no key is set where it does nothing."""

import pytest
from pydantic import ValidationError

from impala_async.config.algorithm import AlgorithmSection

ALGORITHMS = ("impala", "appo", "ppo", "a2c")


def section(**settings):
    return AlgorithmSection.model_validate(settings)


def complaint(**settings):
    with pytest.raises(ValidationError) as caught:
        section(**settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "returns", "decay", "is_normal"),
    [
        ("impala", "vtrace", 1.0, False),
        ("appo", "vtrace", 1.0, False),
        ("ppo", "gae", 0.95, True),
        ("a2c", "gae", 0.95, True),
    ],
)
def test_what_an_algorithm_does_unless_told_otherwise(name, returns, decay, is_normal):
    plain = section(name=name)
    assert plain.returns_kind == returns
    assert plain.trace_decay == decay
    assert plain.has_normal_advantages == is_normal
    told = section(name=name, normalize_advantages=not is_normal, **{"lambda": 0.0})
    assert told.has_normal_advantages != is_normal
    assert told.trace_decay == 0
    assert section(name=name, returns=returns) == plain.model_copy(update={"returns": returns})


def test_ppo_may_have_returns_of_v_trace():
    ppo = section(name="ppo", returns="vtrace", rho_bar=2.0, c_bar=None)
    assert (ppo.returns_kind, ppo.trace_decay) == ("vtrace", 1.0)


@pytest.mark.parametrize(
    ("name", "returns", "fix"),
    [("impala", "gae", "ppo"), ("appo", "gae", "ppo"), ("a2c", "vtrace", "impala")],
)
def test_returns_that_do_not_go_with_an_algorithm(name, returns, fix):
    text = complaint(name=name, returns=returns)
    assert f"returns ({returns}) do not go with name ({name})" in text
    assert f"set name = {fix}" in text


# A key, a value that is not its default, and the algorithms that have a use for it.
USES = {
    "rho_bar": (2.0, ("impala", "appo")),
    "c_bar": (None, ("impala", "appo")),
    "pg_rho_bar": (2.0, ("impala", "appo")),
    "clip": (0.3, ("appo", "ppo")),
    "num_minibatches": (2, ("appo", "ppo")),
    "is_clip": (3.0, ("appo",)),
    "tau": (0.5, ("appo",)),
    "target_update_every_updates": (2, ("appo",)),
    "kl_coeff": (1.0, ("appo",)),
}


@pytest.mark.parametrize("key", USES)
def test_a_key_that_does_nothing_in_an_algorithm_is_refused(key):
    value, algorithms = USES[key]
    default = AlgorithmSection.model_fields[key].default
    for name in ALGORITHMS:
        # A resolved config holds all keys, so the defaults must go with everything.
        assert getattr(section(name=name, **{key: default}), key) == default
        if name in algorithms:
            assert getattr(section(name=name, **{key: value}), key) == value
        else:
            text = complaint(name=name, **{key: value})
            assert f"{key} ({value}) does nothing where" in text
            assert "drop it, or set" in text


def test_the_fix_is_named():
    assert "where name is impala: drop it, or set name = appo or ppo" in complaint(clip=0.3)
    text = complaint(name="ppo", rho_bar=2.0)
    assert (
        "rho_bar (2.0) does nothing where returns is gae: drop it, or set returns = vtrace" in text
    )
    text = complaint(name="ppo", returns="vtrace", pg_rho_bar=2.0)
    assert "pg_rho_bar (2.0) does nothing where name is ppo" in text


def test_options_of_other_optimizers_are_refused():
    for key, value, optimizers in (
        ("decay", 0.9, ("rmsprop", "rmsprop_tf")),
        ("momentum", 0.9, ("rmsprop", "rmsprop_tf")),
        ("weight_decay", 0.1, ("adamw",)),
    ):
        for optimizer in ("adam", "adamw", "rmsprop", "rmsprop_tf"):
            if optimizer in optimizers:
                section(optimizer=optimizer, optimizer_options={key: value})
            else:
                text = complaint(optimizer=optimizer, optimizer_options={key: value})
                says = f"optimizer_options.{key} ({value}) does nothing where optimizer is"
                assert f"{says} {optimizer}" in text


def test_each_optimizer_has_its_epsilon():
    found = {o: section(optimizer=o).epsilon for o in ("adam", "adamw", "rmsprop", "rmsprop_tf")}
    assert found == {"adam": 1e-5, "adamw": 1e-5, "rmsprop": 1e-5, "rmsprop_tf": 0.1}
    assert section(optimizer="rmsprop_tf", optimizer_options={"eps": 0.01}).epsilon == 0.01


def test_a_kl_that_weighs_nothing_has_no_target():
    text = complaint(name="appo", kl_target=0.02)
    assert "kl_target (0.02) does nothing where kl_coeff is 0" in text
    section(name="appo", kl_target=0.02, kl_coeff=0.1)


def test_a_kl_from_the_policy_itself_is_refused():
    always_equal = {"name": "appo", "kl_coeff": 1.0, "target_update_every_updates": 1}
    assert "kl_coeff (1.0) does nothing while" in complaint(**always_equal)
    section(**always_equal, tau=0.5)


def test_schedules_and_their_horizon_need_each_other():
    text = complaint(entropy_cost_end=0.001)
    assert "entropy_cost_end (0.001) needs schedule_env_steps: the steps to get there" in text
    text = complaint(schedule_env_steps=7)
    assert "schedule_env_steps (7) does nothing where lr_end is none: drop it, or set" in text
    section(schedule_env_steps=7, entropy_cost_end=0.001)


def test_a_scale_that_leaves_no_reward_is_refused():
    assert "reward_scale wants a number that is not 0, got 0.0" in complaint(reward_scale=0)
    section(reward_scale=-0.5)


def test_a_users_own_may_use_every_key():
    for key, (value, _) in USES.items():
        assert getattr(section(name="a.b:C", **{key: value}), key) == value
    plain = section(name="a.b:C")
    assert (plain.returns_kind, plain.has_normal_advantages) == ("vtrace", False)
    assert section(name="a.b:C", returns="gae").trace_decay == 0.95
    names = "impala, appo, ppo, a2c, or package.module:Name of your own"
    assert f"name must be one of {names}, got 'dqn'" in complaint(name="dqn")
