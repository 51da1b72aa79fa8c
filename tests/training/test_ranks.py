"""Two ranks on halves of each batch learn what one learns on the whole."""

import dataclasses
import multiprocessing
import os
import socket
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from impala_async.config.policies import PoliciesSection
from impala_async.config.ranks import place_in
from impala_async.config.run import AlgorithmSection, ModelSection
from impala_async.errors import RankError, ServiceError
from impala_async.learner.meeting import Meeting
from impala_async.policy import Policy, Team
from impala_async.schema import (
    POLICY,
    ActionPart,
    ActionSpec,
    ObsSpec,
    policy_leaf,
    recurrent_state,
)
from impala_async.training.ranks import Ranks
from impala_async.training.step import UpdateStep
from impala_async.training.team_step import TeamStep
from tests.columns import flat_schema
from tests.training.conftest import CORE_SIZE, PLAIN, random_batch

NUM_UPDATES, COLUMNS, HALF = 20, 8, 4
PPO = {"name": "ppo", "clip": 0.1}
CASES = {
    "impala": {},
    "impala, sum": {"reduction": "sum", "lr": 1e-5},
    "impala, all normalised": {"normalize_advantages": True, "normalize_returns": True},
    "appo": {"name": "appo", "kl_coeff": 0.5, "kl_target": 0.01},
    "ppo": PPO | {"normalize_returns": True},
    "ppo, gae": PPO | {"returns": "gae"},
    "a2c": {"name": "a2c", "normalize_advantages": True},
    "minibatches": PPO | {"num_minibatches": 3},
    "minibatches, one has none": PPO | {"num_minibatches": 3, "masked": range(HALF, COLUMNS)},
    "uneven": {"masked": (1, 2, 3), "normalize_advantages": True, "normalize_returns": True},
    "one has no valid row": {"masked": range(HALF), "normalize_returns": True},
    "nobody has a valid row": {"masked": range(COLUMNS)},
    "rows": PPO | {"num_minibatches": 5, "shuffle_rows": True, "normalize_returns": True},
    "rows, one has none": PPO
    | {"num_minibatches": 3, "shuffle_rows": True, "masked": range(HALF, COLUMNS)},
    "rows, parts of one": PPO | {"num_minibatches": 48, "shuffle_rows": True},
    "rows, parts of one, plain": {"num_minibatches": 48, "shuffle_rows": True},
    "rows, appo": {"name": "appo", "kl_coeff": 0.5, "num_minibatches": 20, "shuffle_rows": True},
    "rows, numbers": {"num_minibatches": 40, "shuffle_rows": True, "numbers": 2},
    "rows, nan on one": {"nan": (5,), "num_minibatches": 3, "shuffle_rows": True},
    "rows, nan on all of one": PPO
    | {"nan": range(HALF), "num_minibatches": 2, "shuffle_rows": True},
    "rows, a team": PPO | {"is_team": True, "num_minibatches": 2, "shuffle_rows": True},
    "lstm": PPO | {"core": "lstm", "num_minibatches": 2},
    "a team": PPO | {"is_team": True, "num_minibatches": 2},
    "clipped": {"grad_clip": 0.05, "optimizer": "rmsprop"},
    "nan on one": {"nan": (5,), "normalize_returns": True},
    "too steep on one": {"steep": 5, "reduction": "sum", "lr": 1e-5, "grad_clip": None},
    "nan on all of one": {"nan": range(HALF), "num_minibatches": 2},
}


def make_step(settings, ranks):
    settings = dict(settings)
    core, is_team = settings.pop("core", None), settings.pop("is_team", False)
    schema = flat_schema(3, 4, 6, state=recurrent_state(core, CORE_SIZE))
    if numbers := settings.pop("numbers", None):
        action = ActionSpec((ActionPart("", "continuous", (), (numbers,)),))
        schema = dataclasses.replace(schema, action=action)
    model = {"hidden_sizes": (16, 16), "normalize_obs": True}
    model |= {} if core is None else {"core": core, "core_size": CORE_SIZE}
    section = AlgorithmSection.model_validate(PLAIN | settings)
    if is_team:
        policies = PoliciesSection(names=("a", "b"))
        obs = ObsSpec((*schema.obs.leaves, policy_leaf(policies.names)))
        schema = dataclasses.replace(schema, obs=obs, policies=policies.names)
        team = Team(schema, ModelSection.model_validate(model), policies, seed=0)
        return schema, TeamStep(team, section, policies, seed=0, ranks=ranks)
    policy = Policy(schema, ModelSection.model_validate(model), seed=0)
    return schema, UpdateStep(policy, section, ranks=ranks)


def train(settings, ranks):
    """Train with this rank's columns of each batch; what is known and told at the end."""
    settings, place = dict(settings), ranks.place
    masked, nan = list(settings.pop("masked", ())), list(settings.pop("nan", ()))
    steep = settings.pop("steep", None)
    schema, step = make_step(settings, ranks)
    own = slice(None) if place.count == 1 else slice(place.number * HALF, (place.number + 1) * HALF)
    results = []
    for number in range(NUM_UPDATES):
        batch = random_batch(schema, COLUMNS, seed=number)
        if POLICY in batch.obs:
            rng = np.random.default_rng(number)
            players = rng.integers(0, 2, batch.obs[POLICY].shape)
            batch.obs[POLICY][:] = torch.from_numpy(players.astype(np.uint8))
        batch.mask_BT[masked] = False
        if number == 3 and nan:
            batch.rewards_BT[nan] = float("nan")
        if number == 3 and steep is not None:  # its loss and its gradient are finite
            batch.rewards_BT[steep, 0] = 1e19
        columns_N = torch.arange(COLUMNS)[own]
        alive_B = torch.ones(len(columns_N), dtype=torch.bool)
        alive_B[0] = number % 4 != 1
        if place.count == 1:
            alive_B[HALF] = number % 4 != 1
        mine = step.begin(batch.take(columns_N))
        # A learner knows the rows of all by the word before.
        (num_rows,) = ranks.totals(int(mine.mask_BT[alive_B].sum()))
        how = {"is_first_pass": number % 2 == 0, "num_rows": int(num_rows) if number % 3 else None}
        results.append(step.run(mine, alive_B, 1000 * number, **how))
    step.ranks.check_equal(step.policy.named_tensors(), "weights") if not isinstance(
        step, TeamStep
    ) else None
    state = step.capture()
    told = [(r.num_updates, r.stats, bool(r.not_finite)) for r in results]
    return state.tensors, state.state, told


def rank(number, port, path):
    """A process of its own."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    place = place_in()
    with Meeting(place).joined() as ranks:
        kinds = []
        ranks.meet(30.0)
        found = {name: train(settings, ranks) for name, settings in CASES.items()}
        torch.save(found, path / f"{number}.pt")
        words = ranks.gather(b"a word" if number else b"")
        (path / f"words-{number}").write_text(repr(words))
        other = {"a": torch.ones(3)} | ({"b": torch.ones(3)} if number else {})
        near = {"a": torch.ones(3) * (1 + number * 1e-7)}
        for tensors in ({"a": torch.ones(3)}, near, other):
            try:
                ranks.check_equal(tensors, "weights")
                kinds.append(None)
            except ServiceError as error:
                kinds.append(str(error))
        torch.save(kinds, path / f"checks-{number}.pt")
        if number == 1:
            os._exit(9)
        try:
            ranks.sum(torch.zeros(1))
        except RankError as error:
            (path / "lost").write_text(str(error))
        os._exit(0)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=rank, args=(n, port, path)) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 9]
    load = lambda name: torch.load(path / name, weights_only=False)  # noqa: E731
    return SimpleNamespace(
        found=[load(f"{n}.pt") for n in range(2)],
        checks=[load(f"checks-{n}.pt") for n in range(2)],
        words=[(path / f"words-{n}").read_text() for n in range(2)],
        lost=(path / "lost").read_text(),
    )


@pytest.mark.parametrize("name", CASES)
def test_two_on_halves_learn_what_one_learns_on_the_whole(name, of_two):
    torch.set_num_threads(1)
    whole, state, told = train(CASES[name], Ranks())
    (first, first_state, first_told), (second, second_state, second_told) = (
        found[name] for found in of_two.found
    )
    assert first_state == second_state
    for group, tensors in whole.items():
        for key, tensor in tensors.items():
            assert torch.equal(first[group][key], second[group][key]), (group, key)
            torch.testing.assert_close(first[group][key], tensor, atol=1e-6, rtol=1e-6)
    for mine, theirs, alone in zip(first_told, second_told, told, strict=True):
        assert mine == theirs
        assert (mine[0], mine[2]) == (alone[0], alone[2])
        assert mine[1] == pytest.approx(alone[1], rel=1e-4, abs=1e-5, nan_ok=True)
    assert state.keys() == first_state.keys()


def test_ranks_that_differ_and_one_that_is_lost_are_told(of_two):
    told = [None, "weights of rank 1 differ from those of rank 0, first in a"]
    more = told[-1].replace("in a", "in b")
    assert of_two.checks[0] == of_two.checks[1] == [*told, more]


def test_all_hear_the_word_of_each(of_two):
    assert of_two.words == ["[b'', b'a word']"] * 2
    assert of_two.lost.startswith("rank 1 has ended")
