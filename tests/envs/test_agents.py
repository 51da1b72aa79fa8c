"""Agents are columns, which are idle while others play on; who plays whom."""

from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import AutoresetMode

from bench.probes import Counting
from impala_async.config.policies import PoliciesSection
from impala_async.envs.agents import AgentEnvs, is_parallel, make_deal
from impala_async.errors import EnvError

AGENTS = ["left", "right", "keeper"]
DEAL = "a_module_of_a_test:deal"


def drawn(*names, of="shuffled", agents=AGENTS):
    """The deals that were drawn in three hundred times, and how often each."""
    deal = make_deal(PoliciesSection(names=names, mapping=of), agents)
    rng = np.random.default_rng(0)
    return Counter(tuple(deal(rng).tolist()) for _ in range(300))


def test_policies_are_dealt_in_rounds_until_all_agents_have_one():
    counts = drawn("a", "b", agents=AGENTS[:2])
    assert counts.keys() == {(0, 1), (1, 0)}
    assert min(counts.values()) > 100
    # Two of one and one of the other, whoever they are.
    counts = drawn("a", "b")
    assert counts.keys() == {(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 1)}
    assert min(counts.values()) > 25
    found = drawn("a", "b", "c", "d")
    assert all(len(set(one)) == 3 for one in found)
    assert {number for one in found for number in one} == {0, 1, 2, 3}


def test_an_own_function_says_who_plays(module):
    def keeper_is_past(agents, rng):
        assert agents == AGENTS
        others = str(rng.choice(["main", "past"]))
        return {agent: "past" if agent == "keeper" else others for agent in agents}

    module.deal = keeper_is_past
    assert set(drawn("main", "past", of=DEAL)) == {(0, 0, 1), (1, 1, 1)}
    with pytest.raises(EnvError, match="Did you mean: `deal`"):
        drawn("main", "past", of=f"{DEAL}l")


def test_a_wrong_answer_is_told_at_once(module):
    must = (
        "must give a dict with a policy (main, past) for each agent (left, right, keeper), it gave"
    )
    for answer, text in (
        (lambda agents, rng: dict.fromkeys(agents[:-1], "main"), f"{must} {{'left': 'main', 'rig"),
        (lambda agents, rng: dict.fromkeys([*agents, "x"], "main"), f"{must} {{'keeper': 'main"),
        (lambda agents, rng: dict.fromkeys(agents, "alice"), f"{must} {{'keeper': 'alice'"),
        (lambda agents, rng: ["main"] * len(agents), f"{must} ['main', 'main', 'main']"),
        (lambda agents, rng: agents[7], "failed to say who plays whom: IndexError"),
    ):
        module.deal = answer
        with pytest.raises(EnvError) as caught:
            make_deal(PoliciesSection(names=("main", "past"), mapping=DEAL), AGENTS)
        assert str(caught.value).startswith(f"policies.mapping: {DEAL} {text}")


class Lives:
    """Agents whose episodes have lengths of their own.

    Each shows (index, episode, step); the reward is the step's number from 1, plus 10 for action
    1. `starts`: the step with which an agent comes, 0 being the reset. `change` does something to
    it, and to what it shows, behind each reset and step.
    """

    def __init__(
        self, lengths=(1, 3), starts=None, ends="terminated", space=None, change=lambda *_: None
    ):
        self.possible_agents = [f"agent_{i}" for i in range(len(lengths))]
        self.episode = -1
        self.seeds, self.given = [], []
        self._lengths, self._starts, self._ends = lengths, starts or [0] * len(lengths), ends
        self._space, self._change = space or Discrete(2), change

    def observation_space(self, agent):
        return Box(-1, 99, (3,), np.float32)

    def action_space(self, agent):
        return self._space

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.episode += 1
        self.num_steps = 0
        self.agents = self._coming()
        return self._show(self.agents), {}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.given.append(actions)
        self.num_steps += 1
        acted = list(self.agents)
        ends = {a: self.num_steps == self._lengths[self._index(a)] for a in acted}
        rewards = {a: float(self.num_steps + 10 * (actions[a] == 1)) for a in acted}
        self.agents = [a for a in acted if not ends[a]] + self._coming()
        no = dict.fromkeys(acted, False)
        flags = (ends, no) if self._ends == "terminated" else (no, ends)
        return self._show({*self.agents, *acted}), rewards, *map(dict, flags), {}

    def _coming(self):
        starts = zip(self.possible_agents, self._starts, strict=True)
        return [agent for agent, start in starts if start == self.num_steps]

    def _index(self, agent):
        return self.possible_agents.index(agent)

    def _show(self, agents):
        row = [self.episode, self.num_steps]
        obs = {agent: np.array([self._index(agent), *row], np.float32) for agent in agents}
        self._change(self, obs)
        return obs


def ones(envs):
    return {"": np.ones(envs.num_envs, np.int32)}


def rows(envs, num_steps):
    """The steps: idle, rewards, terminated, truncated, and (episode, step) of each column."""
    found = []
    for _ in range(num_steps):
        step = envs.step(ones(envs))
        flags = [a.astype(int).tolist() for a in (step.idle, step.terminated, step.truncated)]
        shown = [tuple(map(int, row)) for row in step.obs[""][:, 1:]]
        found.append([flags[0], step.rewards.tolist(), *flags[1:], shown])
    return found


def test_agents_are_the_columns_of_their_environments_which_reset_each_in_its_own_time():
    envs = AgentEnvs([Lives((1, 1, 1)), Lives((2, 2, 2))])
    assert (envs.num_envs, envs.name, envs.autoreset) == (6, "Lives", AutoresetMode.NEXT_STEP)
    assert envs.obs_spec.leaves[0].shape == (3,)
    assert envs.action_spec.parts[0].choices == (2,)
    assert envs.reset(0)[""][:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    idle = [row[0][::3] for row in rows(envs, 5)]
    assert idle == [[0, 0], [1, 0], [0, 1], [1, 0], [0, 0]]


class StaysListed(Lives):
    """An agent is listed until all are over; `tells` says whether its flags go on to say so."""

    def __init__(self, lengths, tells=True):
        super().__init__(lengths)
        self.tells = tells

    def step(self, actions):
        alive = {agent: actions[agent] for agent in self.agents if agent not in self.over}
        self.agents = list(alive)
        obs, rewards, terminated, truncated, infos = super().step(alive)
        terminated |= dict.fromkeys(self.over, self.tells)
        truncated |= dict.fromkeys(self.over, False)
        self.over |= {agent for agent in alive if terminated[agent] or truncated[agent]}
        if len(self.over) < len(self.possible_agents):
            self.agents = list(self.possible_agents)
        return obs, rewards, terminated, truncated, infos

    def reset(self, seed=None, options=None):
        self.over = set()
        return super().reset(seed)


EARLY = [
    [[0, 0], [11, 11], [1, 0], [0, 0], [(0, 1), (0, 1)]],
    # The final observation's row, then a row of padding: its observation stays.
    [[1, 0], [0, 12], [0, 0], [0, 0], [(0, 1), (0, 2)]],
    [[1, 0], [0, 13], [0, 1], [0, 0], [(0, 1), (0, 3)]],
    [[1, 1], [0, 0], [0, 0], [0, 0], [(1, 0), (1, 0)]],
    [[0, 0], [11, 11], [1, 0], [0, 0], [(1, 1), (1, 1)]],
]
# Those that show nothing at their end keep their last observation.
SILENT = [[(0, 0), (0, 1)], [(0, 0), (0, 2)], [(0, 0), (0, 2)], [(1, 0), (1, 0)], [(1, 0), (1, 1)]]
LATE = [
    [[0, 1], [11, 0], [0, 0], [0, 0], [(0, 1), (0, 0)]],
    # Its first observation comes with a step in which it did nothing.
    [[0, 1], [12, 0], [0, 0], [0, 0], [(0, 2), (0, 2)]],
    [[0, 0], [13, 13], [0, 1], [0, 0], [(0, 3), (0, 3)]],
    [[0, 1], [14, 0], [1, 0], [0, 0], [(0, 4), (0, 3)]],
    [[1, 1], [0, 0], [0, 0], [0, 0], [(1, 0), (0, 3)]],
]


def show_no_more(env, obs):
    for agent in obs.keys() - env.agents:
        del obs[agent]


def test_one_is_idle_after_its_end_until_all_have_ended_and_before_it_comes():
    for env, expected in (
        (Lives((1, 3)), EARLY),
        (Lives((1, 3), change=show_no_more), [[*EARLY[i][:4], s] for i, s in enumerate(SILENT)]),
        (StaysListed((1, 3)), EARLY),
        (Lives((1, 3), ends="truncated"), [[a, b, d, c, e] for a, b, c, d, e in EARLY]),
        (Lives((4, 3), starts=(0, 2)), LATE),
    ):
        envs = AgentEnvs([env])
        first = envs.reset(0)
        assert first[""].tolist() == [[0, 0, 0], [float(expected is not LATE), 0, 0]]
        assert rows(envs, 5) == expected, vars(env)
        # A reset in the midst of things forgets them. One policy masks only idle rows.
        envs.reset(0)
        step = envs.step(ones(envs))
        assert step.idle.tolist() == expected[0][0]
        assert step.masked is step.fresh is step.idle
        assert step.untrained is None


def test_actions_go_to_those_who_are_there_in_their_own_space():
    env = Lives((1, 2), space=Discrete(2, start=5))
    envs = AgentEnvs([env])
    envs.reset(0)
    for _ in range(2):
        envs.step({"": np.array([0, 1], np.int32)})
    assert env.given == [{"agent_0": 5, "agent_1": 6}, {"agent_1": 6}]
    env = Lives((2, 2), space=Tuple((Discrete(2), Box(0, 1, (1,)))))
    envs = AgentEnvs([env])
    envs.reset(0)
    envs.step({"0": np.array([0, 1], np.int32), "1": np.array([[0.5], [7.0]], np.float32)})
    assert env.action_space("").contains(env.given[0]["agent_1"])
    assert env.given[0]["agent_1"][1].tolist() == [1.0]


def leave(env, obs):
    if env.num_steps:
        env.agents.pop(0)


def come_back(env, obs):
    """`agent_0` is listed again after its end, though not in the step thereafter."""
    if env.num_steps > 2:
        env.agents.insert(0, "agent_0")
        obs["agent_0"] = obs[env.agents[-1]]


def with_spaces(look):
    return type("Odd", (Lives,), {"observation_space": look})()


class Lacking(Lives):
    """One of the dicts that it gives lacks an agent."""

    def __init__(self, number):
        super().__init__((9, 9))
        self.number = number

    def step(self, actions):
        given = super().step(actions)
        del given[self.number]["agent_1"]
        return given


def unsaid():
    env = Lives()
    env.possible_agents = None
    return env


def test_what_does_not_fit_is_refused():
    for env, text in (
        (Lives((1, 9), change=come_back), "agent_0 comes back after its end without a reset"),
        (StaysListed((1, 9), tells=False), "agent_0 comes back after its end"),
        (Lives(()), "Lives has no possible_agents"),
        *(
            (Lacking(number), rf"^Lacking in step: its {name} must have all .* lack agent_1$")
            for number, name in ((1, "rewards"), (2, "terminations"), (3, "truncations"))
        ),
        (Lacking(0), "^Lacking in step: its observations must have all .* lack agent_1$"),
        (unsaid(), "Lives has no possible_agents"),
        (
            with_spaces(lambda _, agent: Box(-1, 99, (3 + (agent == "agent_1"),), np.float32)),
            "observation space of agent_0 is Box.* and that of agent_1 is Box",
        ),
        # As gymnasium has them.
        (with_spaces(Box(-1, 99)), "failed to say what its spaces are: TypeError: 'Box' object is"),
        (Lives((9, 9), change=leave), "agent_0 is gone, neither terminated nor truncated"),
        (Lives(change=lambda env, _: env.agents.clear()), "no agents after a reset"),
        (Lives(change=lambda env, _: env.agents.append("x")), "x is not among its possible_ag"),
    ):

        def play(env=env):
            envs = AgentEnvs([env])
            envs.reset(0)
            rows(envs, 3)

        with pytest.raises(EnvError, match=text) as caught:
            play()
        assert "\n" not in str(caught.value)


def test_parallel_environments_are_told_from_others():
    class InTurns(Lives):
        def agent_iter(self): ...

    class Named(Lives):
        last = None

    assert is_parallel(Lives())
    assert is_parallel(Named())
    assert not any(is_parallel(env) for env in (InTurns(), Counting(), object()))


PAIR = PoliciesSection(names=("main", "past"), copies={"past": "main"}, copy_every_updates=1)


def test_a_leaf_says_who_plays_from_an_episodes_first_row_to_its_last(module):
    """Main plays the first agent in every second episode."""
    turns = []

    def swapped(agents, rng):
        turns.append(None)
        return dict(zip(agents, PAIR.names[:: (-1) ** len(turns)], strict=True))

    module.deal = swapped
    envs = AgentEnvs([Lives((1, 3))], policies=PAIR.model_copy(update={"mapping": DEAL}))
    assert envs.obs_spec.leaves[1].choices == (2,)
    first = envs.reset(0)["policy"].tolist()
    seen = []
    for _ in range(9):
        step = envs.step(ones(envs))
        # An agent that is not trained is as idle as any other: not at all.
        parts = step.obs["policy"], step.untrained, step.idle
        seen.append([part.astype(int).tolist() for part in parts])
        assert step.masked.tolist() == (step.idle | step.untrained).tolist()
    # The step that resets shows the first observation of the next episode, and who plays it.
    players = [first] * 3 + [first[::-1]] * 4 + [first] * 2
    idle = [[0, 0], [1, 0], [1, 0], [1, 1]]
    assert seen == [[row, row, idle[n % 4]] for n, row in enumerate(players)]


def test_a_key_that_is_called_policy_is_in_the_way():
    class Named(Lives):
        def observation_space(self, agent):
            return Dict(policy=super().observation_space(agent), more=Discrete(2))

    with pytest.raises(EnvError, match=r"has a key 'policy' already.*rename it by a wrapper"):
        AgentEnvs([Named()], policies=PAIR)


def test_who_plays_follows_from_the_seed_and_a_part_has_the_players_of_the_whole(module):
    def players(envs, seed, first_env=0):
        seen = [envs.reset(seed, first_env)["policy"].tolist()]
        return seen + [envs.step(ones(envs)).obs["policy"].tolist() for _ in range(20)]

    worlds = [Lives((1, 2)) for _ in range(3)]
    envs = AgentEnvs(worlds, policies=PAIR)
    runs = [players(envs, seed) for seed in (1, 2, 1)]
    assert runs[0] == runs[2] != runs[1]
    part = Lives((1, 2))
    assert players(AgentEnvs([part], policies=PAIR), 1, 2) == [row[4:] for row in runs[0]]
    assert part.seeds[0] == worlds[2].seeds[0]
    assert worlds[0].seeds[1] is None
    assert worlds[0].seeds[0] != worlds[1].seeds[0]

    # Who begins must not tell who plays whom: an environment draws other numbers of its seed.
    def note(agents, rng):
        numbers.append(rng.random())
        return dict.fromkeys(agents, "main")

    numbers, module.deal = [], note
    envs = AgentEnvs(worlds, policies=PAIR.model_copy(update={"mapping": DEAL}))
    numbers.clear()
    envs.reset(1)
    assert len(set(numbers)) == 3
    for world, number in zip(worlds, numbers, strict=True):
        assert gym.utils.seeding.np_random(world.seeds[-1])[0].random() != number
