"""A loaded policy does with raw observations what the checkpoint's own does in `evaluate`."""

import copy
import json
import multiprocessing
import pickle
import subprocess
import sys
from multiprocessing import resource_tracker

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from impala_async import load_policy
from impala_async.config.run import RunConfig
from impala_async.envs.make import make_env
from impala_async.envs.saved_spaces import save_spaces
from impala_async.envs.vector import spread_seed
from impala_async.errors import CheckpointError, ConfigError, EnvError, SpacesError
from impala_async.evaluate import main
from impala_async.evaluation.play import build_players
from impala_async.runs.folder import SPACES, RunFolder
from impala_async.training.checkpoint import open_checkpoint, save_checkpoint
from impala_async.weights import Version
from tests.torches import wants_torch

HERE = __name__
NUM_OBS = 1000


class Drawn(gym.Env):
    """Draws observations from its space; an episode ends at one step of eight."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        is_over = bool(self.np_random.random() < 1 / 8)
        return self.observation_space.sample(), float(self.np_random.normal()), is_over, False, {}


class Screens(Drawn):
    def __init__(self):
        super().__init__(Box(0, 255, (12, 12, 2), np.uint8), Discrete(4))


class Kinds(Drawn):
    def __init__(self):
        digits = MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [-2, 0]])
        seen = Tuple([Discrete(3, start=-1), Dict(z=MultiBinary(4), a=digits)])
        levers = Tuple([MultiDiscrete([2, 3], start=[5, -5]), MultiBinary(2)])
        super().__init__(seen, Dict(b=levers, a=Box(-0.2, 0.1, (2,), np.float64)))


class Stores(Drawn):
    """Numbers of every kind beside an image that has more, and one that is too small to be seen."""

    def __init__(self):
        parts = {
            "eye": Box(0, 255, (10, 10, 1), np.uint8),
            "map": Box(0, 255, (5, 2, 4), np.uint8),
            "money": Box(0, 1 << 40, (2,), np.int64),
            "speed": Box(-1.0, 1.0, (2,), np.float64),
            "stock": Box(-100, 100, (3, 2), np.int8),
            "keys": MultiBinary(4),
            "open": Box(0, 1, (), np.bool_),
        }
        super().__init__(Dict(parts), Discrete(3))


HISTORY = {"last_action": True, "last_reward": True}
CASES = {
    "mlp": ({"id": "CartPole-v1"}, {"normalize_obs": False}),
    "cnn": ({"id": f"{HERE}:Screens"}, {"name": "small_cnn"}),
    "lstm": ({"id": f"{HERE}:Screens", **HISTORY}, {"core": "lstm", "core_size": 9}),
    "gru": ({"id": "CartPole-v1"}, {"core": "gru", "core_size": 9, "normalize_obs": True}),
    "masks": ({"id": "tests.actor.worlds:Masked"}, {"normalize_obs": True}),
    "box": ({"id": "Pendulum-v1"}, {"state_dependent_std": True}),
    "squashed": ({"id": "Pendulum-v1", "squash_actions": True}, {}),
    "dict": ({"id": "examples.nested_spaces:SortingArm"}, {}),
    "numbers": ({"id": f"{HERE}:Stores"}, {}),
    "kinds": ({"id": f"{HERE}:Kinds", **HISTORY}, {"core": "lstm", "core_size": 5}),
}
TEAM = {"names": ("main", "other"), "mapping": "tests.test_evaluate:in_order"}


def begin(path, env, model=None, policies=None):
    """A run with a checkpoint of weights that differ from those it begins with, and its policy."""
    settings = {"env": env, "model": model or {}, "policies": policies or {}}
    config = RunConfig.model_validate({**settings, "actor": {"sampler": "serial"}, "seed": 3})
    envs, policy = build_players(config, 1)
    envs.close()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in policy.named_tensors().items():
            if name.endswith("policy_head.bias"):
                continue  # or one action would always be the best
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
            if name.endswith("variance"):
                tensor.abs_()
    folder = RunFolder(path / "run")
    folder.begin(config)
    folder.let_go()
    folder.keep_spaces(save_spaces(envs.spaces))
    save_checkpoint(folder.checkpoints, Version(1, 5), {"model": policy.named_tensors()}, {})
    return folder, policy


def players(folder):
    """The environments and the policy of `evaluate`, with the weights of the checkpoint."""
    envs, policy = build_players(folder.load_config(), 1)
    policy.load_tensors(open_checkpoint(folder.checkpoints / "ckpt-1-5").tensors["model"])
    return envs, policy


def flat(action):
    if isinstance(action, dict):
        return [number for key in sorted(action) for number in flat(action[key])]
    if isinstance(action, tuple):
        return [number for part in action for number in flat(part)]
    return np.asarray(action).reshape(-1).tolist()


@pytest.mark.parametrize("case", CASES)
def test_it_chooses_as_evaluate_does(tmp_path, case):
    folder, _ = begin(tmp_path, *CASES[case])
    envs, own = players(folder)
    policy, env = load_policy(folder.path), make_env(folder.load_config().env)
    obs, state = envs.reset(3), own.first_state(1)
    (raw, _), memory, reward = env.reset(seed=spread_seed(3)), None, 0.0
    num_ends, seen, largest = 0, set(), 0.0
    for _ in range(NUM_OBS):
        actions, log_probs, state = own.act(obs, state)
        acted = policy.act(raw, memory, last_reward=reward)
        assert flat(acted.action) == flat(next(iter(envs.spaces.each(actions))))
        largest = max(largest, abs(acted.log_prob - float(log_probs[0])))
        seen.add(tuple(flat(acted.action)))
        obs, memory = envs.step(actions).obs, acted.state
        raw, reward, terminated, truncated, _ = env.step(acted.action)
        if terminated or truncated:
            num_ends += 1
            obs, state = envs.step(actions).obs, own.first_state(1)
            (raw, _), memory, reward = env.reset(), None, 0.0
    assert largest < 1e-5
    assert num_ends >= 4
    assert len(seen) > 1
    assert policy.checkpoint == folder.checkpoints / "ckpt-1-5"
    assert policy.action_space == env.action_space
    assert policy.observation_space == env.observation_space


@pytest.mark.parametrize("case", ["lstm", "dict", "kinds"])
def test_a_batch_is_as_its_observations_one_by_one(tmp_path, case):
    folder, _ = begin(tmp_path, *CASES[case])
    policy, section = load_policy(folder.path), folder.load_config().env
    envs = gym.vector.SyncVectorEnv([lambda: make_env(section)] * 3)
    obs, _ = envs.reset(seed=1)
    state, rewards = None, np.zeros(3)
    for number in range(20):
        batch = policy.act(obs, state, last_reward=rewards)
        for column, one in enumerate(gym.vector.utils.iterate(envs.observation_space, obs)):
            kept = None if state is None else {name: a[column] for name, a in state.items()}
            acted = policy.act(one, kept, last_reward=rewards[column])
            chosen = list(gym.vector.utils.iterate(envs.action_space, batch.action))[column]
            np.testing.assert_allclose(flat(chosen), flat(acted.action), atol=1e-6)
            assert batch.log_prob[column] == pytest.approx(acted.log_prob, abs=1e-5)
        obs, rewards, *_ = envs.step(batch.action)
        state = batch.state
        if number == 9:
            # Zeros are the memory before an episode.
            for part in state.values():
                part[1] = 0
            rewards[1] = 0
            one = list(gym.vector.utils.iterate(envs.observation_space, obs))[1]
            begun = policy.act(obs, state, last_reward=rewards).log_prob[1]
            assert policy.act(one).log_prob == pytest.approx(begun, abs=1e-5)


def test_views_are_taken_as_they_are_shown(tmp_path):
    folder, _ = begin(tmp_path, *CASES["lstm"])
    policy = load_policy(folder.path)
    obs = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 2), np.uint8)
    for view in (obs[::-1], obs[:, :, ::-1], np.broadcast_to(obs[0], obs.shape)):
        state = policy.act(view).state
        for part in state.values():
            part.flags.writeable = False
        again = policy.act(view, state, last_reward=np.zeros(5))
        whole = policy.act(view.copy(), state, last_reward=np.zeros(5))
        np.testing.assert_array_equal(again.log_prob, whole.log_prob)


def test_threads_that_share_a_policy_each_get_their_own_answers(tmp_path, monkeypatch):
    policy = load_policy(begin(tmp_path, *CASES["mlp"])[0].path)
    seen = [np.float32([0, side, 0, side]) for side in (-3, 3)]
    alone = [policy.act(obs).log_prob for obs in seen]
    assert alone[0] != alone[1]
    inner = policy._policy.act

    def overtaken(*given):
        """Another thread acts before this one has computed."""
        monkeypatch.setattr(policy._policy, "act", inner)
        assert policy.act(seen[1]).log_prob == alone[1]
        return inner(*given)

    monkeypatch.setattr(policy._policy, "act", overtaken)
    assert policy.act(seen[0]).log_prob == alone[0]


def test_samples_are_those_of_a_seed_and_as_likely_as_they_say(tmp_path):
    folder, _ = begin(tmp_path, *CASES["mlp"])
    obs = np.tile(np.float32([0.1, -0.2, 0.3, 0.4]), (4000, 1))
    first, again, other = (
        load_policy(folder.path, seed=seed).act(obs, is_greedy=False) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.action, again.action)
    assert (first.action != other.action).any()
    share, likely = np.mean(first.action == 1), np.exp(first.log_prob[first.action == 1][0])
    assert 0.02 < likely < 0.98
    assert share == pytest.approx(likely, abs=0.04)
    greedy = load_policy(folder.path).act(obs)
    assert set(greedy.action) == {int(likely > 0.5)}


@pytest.mark.parametrize("case", CASES)
def test_a_copy_goes_on_as_its_original_does(tmp_path, case):
    """As when it is handed to a process of multiprocessing."""
    folder, _ = begin(tmp_path, *CASES[case])
    policy = load_policy(folder.path)
    space = policy.observation_space
    seen = [space.sample() for _ in range(20)]
    if case == "masks":
        (obs, _), seen = make_env(folder.load_config().env).reset(seed=1), []
        seen += 20 * [obs]
    policy.act(seen[0], is_greedy=False)  # its generator is no longer a new one
    copies = [copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))]
    wanted = [policy.act(obs, is_greedy=False) for obs in seen]
    for other in copies:
        for obs, first in zip(seen, wanted, strict=True):
            acted = other.act(obs, is_greedy=False)
            assert flat(acted.action) == flat(first.action)
            assert acted.log_prob == first.log_prob


def act_elsewhere(policy, obs, answers):
    answers.put(policy.act(obs, is_greedy=False).log_prob)


@pytest.fixture
def no_tracker_after():
    """Spawning leaves a process that tracks semaphores, for as long as this one lives."""
    yield
    resource_tracker._resource_tracker._stop()


@pytest.mark.usefixtures("no_tracker_after")
def test_a_process_that_is_handed_a_policy_acts_as_it_does_and_leaves_it_as_it_was(tmp_path):
    folder, _ = begin(tmp_path, *CASES["mlp"])
    policy, twin = load_policy(folder.path), load_policy(folder.path)
    obs, spawn = policy.observation_space.sample(), multiprocessing.get_context("spawn")
    answers = spawn.SimpleQueue()
    process = spawn.Process(target=act_elsewhere, args=(policy, obs, answers))
    process.start()
    process.join()
    wanted = twin.act(obs, is_greedy=False)
    assert process.exitcode == 0
    assert answers.get() == wanted.log_prob
    # Memory that torch has freed would have other content by now.
    others = [np.full(size, 7, np.float32) for size in (2, 64, 128, 256, 4096) for _ in range(300)]
    assert policy.act(obs, is_greedy=False) == wanted
    del others


def test_a_copied_policy_takes_over_weights(tmp_path):
    _, policy = begin(tmp_path, *CASES["mlp"])
    obs, generator = {"": np.float32([[0.1, -0.2, 0.3, 0.4]])}, torch.Generator()
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        before = other.act(obs, {}, generator).log_probs, other.act(obs, {}).log_probs
        for tensor in other.tensors:
            tensor.zero_()
        assert other.act(obs, {}, generator).log_probs == pytest.approx(np.log(0.5))
        assert other.act(obs, {}).log_probs == pytest.approx(np.log(0.5))
        assert before[1] != pytest.approx(np.log(0.5))


def test_a_member_of_a_team_plays_by_its_name(tmp_path):
    folder, team = begin(
        tmp_path, {"id": "tests.envs.test_agents:Lives", "last_action": True}, policies=TEAM
    )
    obs = {"": np.float32([[1, 2, 3]]), "last_action": np.zeros(1, np.int32)}
    log_probs = {}
    for name, member in team.members.items():
        log_probs[name] = float(member.act(obs, {}).log_probs[0])
        acted = load_policy(folder.path, policy=name).act(obs[""][0])
        assert acted.log_prob == pytest.approx(log_probs[name], abs=1e-6)
    assert log_probs["main"] != log_probs["other"]
    for asked, says in (
        (None, "policy: wants one of this team: main, other; got none"),
        ("third", "policy: wants one of main, other, got 'third'"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_policy(folder.path, policy=asked)
        assert str(caught.value) == says


# -------------------- bad input, one line each


def refused(kind, call, *args, **how):
    with pytest.raises(kind) as caught:
        call(*args, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_observation_that_is_not_of_the_space_names_its_leaf(tmp_path):
    folder, _ = begin(tmp_path, *CASES["dict"])
    policy = load_policy(folder.path)
    arm, parcel = {"at": np.zeros(2, np.float32)}, {"at": np.zeros(2, np.float32), "kind": 1}
    good = {"arm": arm, "parcel": parcel}
    policy.act(good)

    def at(place):
        return {**good, "arm": {"at": place}}

    for obs, says in (
        ({"arm": arm}, "parcel/at: the space promises it, but it is not there"),
        (
            {**good, "arm": {"at": np.zeros(3)}},
            "arm/at: the space promises shape (2,), it has (3,)",
        ),
        (at(["a", "b"]), "arm/at: the space promises float32, it is <U1"),
        (
            {**good, "arm": {"at": [0.5, [1]]}},
            "arm/at: the space promises shape (2,), it is ragged",
        ),
        ({**good, "parcel": {**parcel, "kind": 9}}, "parcel/kind: the space promises 0 to"),
        (at([0, np.nan]), "arm/at: wants moderate numbers, it is not finite"),
        (at([0, 1e30]), "arm/at: wants moderate numbers, it is beyond"),
        (np.zeros(4), "arm/at: the space promises it, but it is not there"),
        (None, "arm/at: the space promises it, but it is not there"),
    ):
        assert says in refused(EnvError, policy.act, obs)


def test_a_mask_without_a_legal_action_is_told(tmp_path):
    folder, _ = begin(tmp_path, *CASES["masks"])
    policy = load_policy(folder.path)
    obs = policy.observation_space.sample()
    mask = next(name for name, box in policy.observation_space.items() if box.dtype == np.int8)
    policy.act({**obs, mask: np.eye(1, *obs[mask].shape, dtype=np.int8)[0]})
    none = {**obs, mask: np.zeros_like(obs[mask])}
    for given in (none, {name: np.stack([part, part]) for name, part in none.items()}):
        assert "has a mask of legal actions" in refused(EnvError, policy.act, given)


def test_an_action_of_a_network_that_comes_to_nan_is_none(tmp_path):
    folder, _ = begin(tmp_path, *CASES["masks"])
    policy = load_policy(folder.path)
    policy._policy.model.policy_head.bias.data.fill_(torch.nan)
    assert "comes to NaN" in refused(SpacesError, policy.act, policy.observation_space.sample())


def test_a_state_or_reward_that_is_not_the_policy_s_is_told(tmp_path):
    folder, _ = begin(tmp_path, *CASES["lstm"])
    policy, obs = load_policy(folder.path), np.zeros((12, 12, 2), np.uint8)
    state = policy.act(obs).state
    assert {name: part.shape for name, part in state.items()} == {
        "hidden": (9,),
        "cell": (9,),
        "last_action": (),
    }
    for given, reward, says in (
        ({}, 0, "state: wants hidden, cell, last_action, got none"),
        ({**state, "more": 0}, 0, "got hidden, cell, last_action, more"),
        (3, 0, "state: wants that of the step before, or None, got int"),
        ({**state, "cell": state["cell"][:3]}, 0, "state: cell: wants shape (9,), got (3,)"),
        *(
            ({**state, name: value}, 0, f"state: {name}: wants that of the step before, got ")
            for name, value in (
                ("cell", np.full(9, np.nan)),
                ("cell", "text"),
                ("last_action", 99),
                ("last_action", -1),
                ("last_action", 1.7),
                ("last_action", "a"),
            )
        ),
        (state, "x", "last_reward: wants a number, got 'x'"),
        (state, None, "last_reward: this run sees it (env.last_reward): wants it, got none"),
        (state, [1, 2], "last_reward: wants 1 of them, got 2"),
        (state, np.nan, "last_reward: wants moderate numbers, got nan"),
        (None, 2, "last_reward: wants 0 without a state, which begins an episode, got 2; pass"),
    ):
        assert says in refused(ConfigError, policy.act, obs, given, last_reward=reward)
    says = "is_greedy: wants True or False, got 'no'"
    assert refused(ConfigError, policy.act, obs, is_greedy="no") == says
    batch = policy.act(np.stack([obs, obs])).state
    assert says_shape(refused(SpacesError, policy.act, obs, batch, last_reward=0))


def says_shape(text):
    return text == "state: hidden: wants shape (9,), got (2, 9)"


def test_what_holds_no_policy_is_told(tmp_path, caplog):
    folder, policy = begin(tmp_path, *CASES["mlp"])
    other, _ = begin(tmp_path / "other", *CASES["masks"])
    tensors = {"model": policy.named_tensors()}
    save_checkpoint(other.checkpoints, Version(1, 9), tensors, {})
    RunFolder(tmp_path / "empty").begin(folder.load_config())
    RunFolder(tmp_path / "empty").keep_spaces(folder.read_json(SPACES))
    damaged = save_checkpoint(folder.checkpoints, Version(1, 6), tensors, {})
    (damaged / "model.safetensors").write_bytes(b"{")
    (tmp_path / "none").mkdir()
    for path, says in (
        (tmp_path / "no_such", "there is no such folder"),
        (tmp_path / "none", "wants the folder of a run, its checkpoints or its best, or one"),
        (tmp_path / "empty", "holds no whole checkpoint yet"),
        (damaged, "is no file of"),
        (other.path, "did the environment change, or the release? it has no 'norm"),
    ):
        assert says in refused(CheckpointError, load_policy, path)
    # A damaged newest one is passed over, as everywhere.
    assert load_policy(folder.path).checkpoint.name == "ckpt-1-5"
    assert "skipping a damaged checkpoint" in caplog.text
    for device in ("cuda:99", "no such", None):
        assert f"device: wants cpu, cuda or auto, got {device!r}: " in refused(
            ConfigError, load_policy, folder.path, device=device
        )
    assert load_policy(folder.path, device="auto").act(np.zeros(4, np.float32))
    assert refused(ConfigError, load_policy, None) == "path: wants a path, got None"
    for seed in (None, -1, True, 1 << 63):
        says = f"seed: wants a whole number from 0 up, of 63 bits, got {seed!r}"
        assert refused(ConfigError, load_policy, folder.path, seed=seed) == says
    assert refused(ConfigError, load_policy, folder.path, policy="main") == (
        "policy: wants none, as there is one, got 'main'"
    )


def test_a_network_that_the_checkpoint_does_not_have_is_not_built(tmp_path):
    """Damaged settings may ask for more than there is memory."""
    folder, _ = begin(tmp_path, *CASES["mlp"])
    path = folder.path / "config.json"
    content = json.loads(path.read_text())
    content["config"]["model"]["hidden_sizes"] = [200_000, 200_000]
    path.write_text(json.dumps(content))
    assert "does not fit the model and the spaces" in refused(
        CheckpointError, load_policy, folder.path
    )


def test_an_older_run_says_how_to_go_on_and_that_helps(tmp_path, capsys):
    folder, _ = begin(tmp_path, *CASES["masks"])
    (folder.path / SPACES).unlink()
    says = refused(CheckpointError, load_policy, folder.path)
    command = f"python -m impala_async.evaluate {folder.path}"
    assert f"{command} writes it, where the environment can be made" in says
    assert main([str(folder.path), "--episodes", "1"]) == 0
    assert load_policy(folder.path).action_space == Discrete(3)
    (folder.path / SPACES).write_text('{"observation": {"kind": "Box"}}')
    assert "spaces.json: observation: describes no space: KeyError: 'shape'" in refused(
        CheckpointError, load_policy, folder.path
    )
    capsys.readouterr()


COLD = """
import sys
import impala_async
import numpy as np
policy = impala_async.load_policy(sys.argv[1])
policy.act(np.zeros(4, np.float32))
policy.act(np.zeros(4, np.float32), is_greedy=False)
assert "torch" in sys.modules
for name in ("torch._dynamo", "torch._inductor", "sympy", "zmq", "matplotlib", "rich"):
    assert name not in sys.modules, name
"""


@wants_torch(2, 11)
def test_it_loads_without_the_compiler_of_torch(tmp_path):
    folder, _ = begin(tmp_path, *CASES["mlp"])
    subprocess.run([sys.executable, "-c", COLD, str(folder.path)], check=True)
