"""A place is read as torchrun tells it, and shares add up to the whole."""

from pathlib import Path

import pytest

from impala_async.config.load import validate_config
from impala_async.config.ranks import Place, check_alike, in_common, place_in, risks, share_of
from impala_async.errors import ConfigError

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def config_of(**sections):
    settings = {"env": {"id": "CartPole-v1"}, "actor": {"num_envs": 4}, **sections}
    return validate_config(settings, {})


def test_a_process_is_alone_unless_something_says_otherwise():
    assert place_in({}) == Place(0, 1, 0)
    told = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"} | MASTER
    assert place_in(told) == Place(3, 4, 1)
    assert place_in(told | {"LOCAL_WORLD_SIZE": "2"}) == Place(3, 4, 1, 2)
    assert not place_in(told).is_first


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"RANK": "one"}, "RANK: wants a whole number, as torchrun sets it, got 'one'"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE: wants a whole number"),
        ({"WORLD_SIZE": "2"}, "RANK is not set, and WORLD_SIZE is 2: start ranks by torchrun"),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK \(2\) must be below WORLD_SIZE \(2\)"),
    ],
)
def test_variables_that_are_none_are_named(environ, told):
    with pytest.raises(ConfigError, match=told):
        place_in(environ)


def test_other_ranks_have_their_folders_in_that_of_the_run():
    run = Path("runs/a")
    assert [Place(n, 2).folder(run) for n in (0, 1)] == [run, run / "ranks" / "1"]


def test_a_part_of_a_run_is_not_resumed_alone(tmp_path):
    own = Place(1, 2).folder(tmp_path)
    Place(0, 2).check_whole(tmp_path)
    Place().check_whole(tmp_path)
    for place in (Place(), Place(1, 2)):
        with pytest.raises(ConfigError, match=r"is of one rank of the run in .*: name that one"):
            place.check_whole(own)


def test_ranks_that_know_another_folder_are_told(tmp_path):
    rank = Place(1, 2)
    with pytest.raises(ConfigError, match=r"rank 0 has no run in .*: give all ranks the same"):
        rank.check_shared(rank.folder(tmp_path))
    (tmp_path / "config.json").touch()
    rank.check_shared(rank.folder(tmp_path))


def test_a_learner_alone_needs_no_share_of_actors():
    config = config_of(train={"num_actors": 1})
    assert share_of(config, Place(1, 2), has_actors=False).learner.batch_columns == 32
    with pytest.raises(ConfigError, match=r"train.num_actors \(1\) must be a multiple"):
        share_of(config, Place(1, 2))


def test_shares_are_equal_and_ports_and_seeds_are_not():
    config = config_of(
        seed=7,
        learner={"batch_columns": 32},
        train={"num_actors": 4},
        bind={"data": "tcp://0.0.0.0:6000", "weights": "tcp://0.0.0.0:*"},
        evaluate={"every_s": 10.0},
        stop={"eval_return": 100.0, "mean_return": 200.0},
        checkpoint={"keep": 1},
    )
    assert share_of(config, Place()) is config
    first, second = (share_of(config, Place(n, 2, n)) for n in (0, 1))
    for share in (first, second):
        assert (share.learner.batch_columns, share.train.num_actors) == (16, 2)
        # When one is killed while all save, they have another in common.
        assert share.checkpoint.keep == 2
        assert (share.seed, share.algorithm, share.bind.weights) == (
            *(7, config.algorithm, "tcp://0.0.0.0:*"),
        )
    assert [each.bind.data for each in (first, second)] == [
        *("tcp://0.0.0.0:6000", "tcp://0.0.0.0:6002"),
    ]
    # Rank 0 alone evaluates.
    assert [each.evaluate.every_s for each in (first, second)] == [10.0, None]
    assert [each.stop.eval_return for each in (first, second)] == [100.0, None]
    assert {each.stop.mean_return for each in (first, second)} == {200.0}
    seeds = [Place(n, 3).actor_seed(2**31 - 1) for n in range(3)]
    assert len(set(seeds)) == 3
    assert Place().actor_seed(7) == 7
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"learner": {"batch_columns": 33}}, r"learner.batch_columns \(33\) must be a multiple of"),
        ({"train": {"num_actors": 3}}, r"train.num_actors \(3\) must be a multiple of the number"),
        ({"learner": {"batch_columns": 6}}, r"are 3 each, and must be at least actor.num_envs \(4"),
        ({"learner": {"num_passes": "auto"}, "algorithm": {"name": "ppo"}}, "which idle at"),
        ({"algorithm": {"intrinsic_reward": "a.b:C"}}, "intrinsic_reward does not go with 2 ranks"),
        ({"learner": {"device": "cuda:1"}}, r"learner.device \(cuda:1\): 2 ranks have a GPU each"),
    ],
)
def test_settings_that_ranks_cannot_share_are_named(sections, told):
    with pytest.raises(ConfigError, match=told):
        share_of(config_of(**sections), Place(0, 2))


def test_what_ranks_must_have_alike_is_named_where_it_differs():
    address = {"data": "tcp://0.0.0.0:*", "weights": "tcp://0.0.0.0:*"}
    first = in_common(config_of(bind={"host": "a", **address}))
    check_alike([first, in_common(config_of(bind={"host": "b", **address}))])
    with pytest.raises(ConfigError, match=r"^seed is 0 at rank 0, and 7 at rank 2: start all"):
        check_alike([first, first, in_common(config_of(seed=7, train={"num_actors": 8}))])
    older = {**first, "the release of impala-async": "0.0.1"}
    with pytest.raises(ConfigError, match=r'impala-async is ".*" at rank 0, and "0.0.1" at rank 1'):
        check_alike([first, older])


def test_what_may_go_wrong_later_is_told(monkeypatch):
    here, place = Place(0, 2, num_local=2), Place(0, 2)
    shared = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert risks(here, {}) == risks(here, shared) == []
    (told,) = risks(here, shared | {"TORCHELASTIC_MAX_RESTARTS": "3"})
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in told
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    assert risks(here, {}) == risks(Place(), {}) == []
    (told,) = risks(place, {})
    assert "leads to 127.0.1.1: where ranks of other hosts do not" in told
    assert risks(place, {"GLOO_SOCKET_IFNAME": "eth0"}) == []
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.0.0.7")
    assert risks(place, {}) == []
