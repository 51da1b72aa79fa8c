"""Settings that will probably disappoint are told, with a fix, and no others are."""

from impala_async.config.warnings import warnings_of
from tests.config.made import config_of

PPO = "algorithm.name=ppo"
LOCKSTEP, PARTS = "pace.mode=lockstep", "algorithm.num_minibatches"


def warned(settings, env_steps=0):
    return warnings_of(config_of(settings), env_steps)


def test_a_rate_of_0_before_the_end_and_a_schedule_that_is_over_are_told():
    for settings, trained, says in (
        ("stop.env_steps=1000", 999, None),
        ("stop.env_steps=1001", 0, "goes on to stop.env_steps (1,001) without learning"),
        ("stop.env_steps=3000", 1500, "is over at env step 1,500: raise it to go on from there; "),
        ("", 0, "goes on without learning: raise that, or set algorithm.lr_end over 0"),
        ("stop.mean_return=5", 999, None),
        ("stop.mean_return=5", 1000, "is over at env step 1,000: raise it to go on from there; al"),
        ("algorithm.lr_end=1e-4", 1000, "(1,000) is over at env step 1,000: raise it to go on f"),
        ("stop.updates=5", 0, None),
        ("stop.eval_return=5 evaluate.every_s=9", 0, None),
        ("stop.mean_return=5 stop.env_steps=2000", 0, "to stop.env_steps (2,000)"),
        ("algorithm.lr_end=1e-4", 0, None),
        ("algorithm.lr_end=none algorithm.entropy_cost_end=0", 0, None),
    ):
        scheduled = f"algorithm.lr_end=0 algorithm.schedule_env_steps=1000 {settings}"
        warnings = warned(scheduled, trained)
        assert len(warnings) == (says is not None), settings
        assert not warnings or says in warnings[0]


def test_a_rate_that_rises_is_told():
    """One that is set below the usual end does so, though nobody has asked for it."""
    (told,) = warned("stop.env_steps=1000 algorithm.lr=1e-6")
    assert told.startswith("algorithm.lr rises from 1e-06 to algorithm.lr_end (1e-05): set that")
    for settings in (
        "stop.env_steps=1000 algorithm.lr=1e-6 algorithm.lr_end=none",
        "stop.env_steps=1000 algorithm.lr=1e-5",
        "stop.mean_return=5 algorithm.lr=1e-6",
    ):
        assert not warned(settings)


GAE = "returns by GAE take it for new: set pace.mode to lockstep and pace.lag to 0"
LAGGED = f"{LOCKSTEP} pace.lag=1"
FIVE = "learner.num_passes=5"


def test_a_long_way_from_acting_to_learning_is_warned_of():
    impala = "algorithm.name=impala"
    of_passes = "V-trace copes with about 8: lower learner.num_passes, "
    for settings, lag, says in (
        ("", "", None),
        (impala, "", None),
        (f"{impala} learner.queue_size=7", "9 passes over a batch", of_passes),
        (f"{impala} {FIVE}", "20 passes over a batch", of_passes),
        # Its clip bounds what passes can do, but not how old the policy is that acted.
        (f"{PPO} {FIVE}", "", None),
        (
            f"{PPO} learner.queue_size=7",
            "9 batches",
            "a clip copes with about 8: lower learner.queue_size or learner.m",
        ),
        (f"{PPO} learner.queue_size=6", "", None),
        # However short the queues are: nothing corrects or bounds what these take for new.
        ("algorithm.name=a2c learner.device=cpu", "3 p", GAE),
        # A GPU has room for one more on the host.
        ("algorithm.name=a2c", "4 p", GAE),
        (f"{PPO} {LOCKSTEP} algorithm.num_minibatches=8 learner.num_passes=50", "", None),
        (f"{PPO} {LAGGED}", "", None),
        # Nobody knows what becomes of its ratios.
        ("algorithm.name=a.b:C algorithm.returns=gae", "4 batches", f"{GAE}, or algorithm.ret"),
        (f"algorithm.name=a2c {LAGGED}", "2 p", GAE),
        (f"{impala} {LOCKSTEP} learner.num_passes=8", "", None),
        (
            f"{impala} {LOCKSTEP} learner.num_passes=9",
            "9 passes",
            "learner.num_passes, or pace.lag",
        ),
        (f"{impala} {LAGGED} learner.num_passes=4", "", None),
        (f"{impala} {LAGGED} {FIVE}", "10 passes", of_passes),
        (f"{LAGGED} {FIVE} algorithm.name=appo", "", None),
        # Some of these would be too old for their last passes.
        (f"{FIVE} {PARTS}=4 learner.max_lag=120", "", None),
        (
            f"{FIVE} {PARTS}=4 learner.max_lag=119",
            "120 updates",
            "over learner.max_lag (119): raise that",
        ),
        (f"learner.num_passes=auto {PARTS}=4 learner.max_lag=24", "", None),
        # Weights that act may have been published some time ago.
        (f"{FIVE} {PARTS}=4 learner.max_lag=129 learner.publish_every_updates=10", "", None),
        (
            f"{FIVE} {PARTS}=4 learner.max_lag=128 learner.publish_every_updates=10",
            "129 updates",
            "lower learner.publish_every_updates, learner.queue_size or",
        ),
        (
            f"{impala} {PARTS}=1 learner.publish_every_updates=500",
            "503 passes over a batch",
            "lower learner.publish_every_updates, learner.num_passes, learner.queue_size or",
        ),
    ):
        warnings = warned(settings)
        assert len(warnings) == (says is not None), settings
        if says is not None:
            assert warnings[0].startswith(f"a trajectory may be {lag}")
            assert says in warnings[0]
            assert warnings[0].endswith(says) or says != GAE


def test_keys_that_do_nothing_in_this_shape_are_warned_of():
    same = "algorithm.name=appo algorithm.target_update_every_updates=1"
    one = f"{PARTS}=1 learner.num_passes=1"
    for settings, says in (
        (f"{PPO} learner.stop_kl=0.02 learner.num_passes=2", None),
        (f"{PPO} learner.stop_kl=0.02 learner.num_passes=1", "learner.stop_kl is looked at betwe"),
        (f"{same} learner.stop_kl=0.02", "learner.stop_kl does nothing while algorithm.target_up"),
        (f"{same} algorithm.tau=0.5 learner.stop_kl=0.02", None),
        (f"algorithm.name=appo algorithm.kl_coeff=1.0 {one}", "algorithm.kl_coeff (1.0) does no"),
        (f"algorithm.name=appo algorithm.kl_coeff=1.0 {one} algorithm.tau=0.5", None),
        (f"algorithm.name=appo algorithm.kl_coeff=1.0 {one} learner.num_passes=auto", None),
        (f"{one} learner.minibatch_buffer_size=2", "learner.minibatch_buffer_size (2) mixes"),
        (f"{LOCKSTEP} actor.num_workers=2", "actor.num_workers does nothing in lockstep with"),
        (f"{LOCKSTEP} actor.num_workers=2 actor.sampler=parallel", None),
    ):
        warnings = warned(settings)
        assert [w.startswith(says) for w in warnings] == ([] if says is None else [True]), settings


def test_a_share_of_one_learner_is_warned_of():
    config = config_of("pace.mode=lockstep pace.cut_share=0.5")
    assert any("pace.cut_share does nothing" in told for told in warnings_of(config))
    assert not any("cut_share" in told for told in warnings_of(config, num_ranks=2))


def test_passes_that_a2c_cannot_correct_are_warned_of():
    for mode in ("lockstep", "async"):
        found = warned(f"pace.mode={mode} algorithm.name=a2c learner.num_passes=8")
        assert found[-1].startswith("learner.num_passes (8): a2c has no ratio")
        assert found[-1].endswith("set learner.num_passes to 1, or algorithm.name to ppo")
        for fine in ("algorithm.name=a2c", f"{PPO} learner.num_passes=8"):
            warnings = warned(f"pace.mode={mode} {fine}")
            assert not any("has no ratio" in warning for warning in warnings)


def test_rows_that_are_shuffled_for_nothing_are_warned_of():
    """One part may follow from other keys."""
    for settings in (f"{PARTS}=1", "learner.batch_columns=4 actor.num_envs=2"):
        (told,) = warned(f"algorithm.shuffle_rows=true {settings}")
        assert told.startswith("algorithm.shuffle_rows deals rows to several minibatches, and here")
