"""Each algorithm reads its section, and refuses settings that do not go together."""

import pytest
from pydantic import ValidationError

from impala_async.config.algorithm import AlgorithmSection


def section(**settings):
    return AlgorithmSection.model_validate(settings)


def test_what_an_algorithm_does_unless_told_otherwise():
    for name, returns, others, has_clip in (
        ("impala", "vtrace", [], False),
        ("appo", "vtrace", [], True),
        ("ppo", "gae", ["vtrace"], True),
        ("a2c", "gae", [], False),
        ("a.b:C", "vtrace", ["gae"], True),
    ):
        plain = section(name=name)
        is_normal = name in ("ppo", "appo", "a2c")
        assert plain.returns_kind == returns
        assert plain.trace_decay == (0.95 if is_normal else 1.0)
        assert plain.has_normal_advantages == is_normal
        assert plain.has_clip == has_clip
        assert plain.may_use_vtrace == (name != "a2c")
        told = section(name=name, normalize_advantages=not is_normal, **{"lambda": 0.0})
        assert (told.has_normal_advantages, told.trace_decay) == (not is_normal, 0)
        for kind in ("gae", "vtrace"):
            if kind in (returns, *others):
                assert section(name=name, returns=kind).returns_kind == kind
            else:
                fix = "ppo" if kind == "gae" else "impala"
                says = rf"returns \({kind}\) do not go with name \({name}\).*set name = {fix}"
                with pytest.raises(ValidationError, match=says):
                    section(name=name, returns=kind)


def test_what_does_not_go_together_and_what_does():
    for broken, says, mend in (
        ({"lr_end": None, "schedule_env_steps": 7}, "without lr_end or", {"lr_end": 0}),
        ({"reward_scale": 0}, "wants a number that is not 0, got 0.0", {"reward_scale": -0.5}),
        ({"kl_coeff": 1.0, "target_update_every_updates": 1}, "does nothing wh", {"tau": 0.5}),
        ({"name": "dqn"}, "one of impala, appo, ppo, a2c, or package.module", {"name": "a.b:C"}),
    ):
        with pytest.raises(ValidationError, match=says):
            section(**broken)
        section(**broken | mend)


def test_each_optimizer_has_its_epsilon():
    found = {o: section(optimizer=o).epsilon for o in ("adam", "adamw", "rmsprop", "rmsprop_tf")}
    assert found == {"adam": 1e-5, "adamw": 1e-5, "rmsprop": 1e-5, "rmsprop_tf": 0.1}
    assert section(optimizer="rmsprop_tf", optimizer_options={"eps": 0.01}).epsilon == 0.01
