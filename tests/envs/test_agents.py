import itertools
from collections import Counter
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import AutoresetMode

from bench.probes import Counting
from impala_async.config.policies import PoliciesSection
from impala_async.envs.agents import AgentEnvs, is_parallel, make_deal
from impala_async.errors import EnvError
from impala_async.schema import ArraySpec

HERE = "tests.envs.test_agents"
AGENTS = ["left", "right", "keeper"]
DEAL = "a_module_of_a_test:deal"


def mapping(*names: str, of: str = "shuffled", agents: list[str] = AGENTS, **more: Any) -> Any:
    section = PoliciesSection(names=names, mapping=of, **more)
    return make_deal(section, agents)


def drawn(deal: Any, num: int = 300) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(deal(rng).tolist()) for _ in range(num)]


def test_policies_are_dealt_in_rounds_until_all_agents_have_one() -> None:
    counts = Counter(drawn(mapping("a", "b", agents=AGENTS[:2])))
    assert counts.keys() == {(0, 1), (1, 0)}
    assert min(counts.values()) > 100
    # Two of one and one of the other, whoever they are.
    counts = Counter(drawn(mapping("a", "b")))
    assert counts.keys() == {(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 1)}
    assert min(counts.values()) > 25
    found = drawn(mapping("a", "b", "c", "d"))
    assert all(len(set(one)) == 3 for one in found)
    assert {number for one in found for number in one} == {0, 1, 2, 3}


def test_draws_follow_from_the_seed_but_not_as_those_of_an_environment_do(
    module: ModuleType,
) -> None:
    numbers: list[float] = []

    def note(agents: list[str], rng: np.random.Generator) -> dict[str, str]:
        numbers.append(rng.random())
        return dict.fromkeys(agents, "a")

    module.deal = note  # type: ignore[attr-defined]
    seen = []
    for seed in (3, 4, 3):
        worlds = [Lives() for _ in range(5)]
        policies = PoliciesSection(names=("a", "b"), mapping=DEAL)
        envs = AgentEnvs(worlds, policies=policies)
        numbers.clear()
        envs.reset(seed)
        seen.append(list(numbers))
        for world, number in zip(worlds, numbers, strict=True):
            assert gym.utils.seeding.np_random(world.seeds[0])[0].random() != number
    assert seen[0] == seen[2] != seen[1]
    assert len(set(seen[0])) == 5


def test_it_knows_who_is_trained() -> None:
    copied = {"copies": {"past": "a"}, "copy_every_updates": 1}
    policies = PoliciesSection(names=("a", "past", "b"), **copied)  # type: ignore[arg-type]
    envs = AgentEnvs([Lives((1, 1, 1), (0, 0, 0))], policies=policies)
    assert envs.obs_spec.leaves[1].choices == (3,)
    players = envs.reset(0)["policy"]
    untrained = envs.step(ones(envs)).untrained
    assert untrained is not None
    assert untrained.tolist() == (players == 1).tolist()


def keeper_is_past(agents: list[str], rng: np.random.Generator) -> dict[str, str]:
    assert agents == AGENTS
    others = str(rng.choice(["main", "past"]))
    return {agent: "past" if agent == "keeper" else others for agent in agents}


def test_an_own_function_says_who_plays() -> None:
    found = drawn(mapping("main", "past", of=f"{HERE}:keeper_is_past"))
    assert set(found) == {(0, 0, 1), (1, 1, 1)}
    with pytest.raises(EnvError, match="Did you mean: `keeper_is_past`"):
        mapping("main", "past", of=f"{HERE}:keeper_is_pasd")


MUST = "must give a dict with a policy (main, past) for each agent (left, right, keeper), it gave"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda agents, rng: dict.fromkeys(agents[:-1], "main"), f"{MUST} {{'left': 'main', 'rig"),
        (lambda agents, rng: dict.fromkeys([*agents, "x"], "main"), f"{MUST} {{'keeper': 'main"),
        (lambda agents, rng: dict.fromkeys(agents, "alice"), f"{MUST} {{'keeper': 'alice'"),
        (lambda agents, rng: ["main"] * len(agents), f"{MUST} ['main', 'main', 'main']"),
        (lambda agents, rng: agents[7], "failed to say who plays whom: IndexError"),
    ],
)
def test_a_wrong_answer_is_told_at_once(module: ModuleType, answer: Any, text: str) -> None:
    module.deal = answer  # type: ignore[attr-defined]
    with pytest.raises(EnvError) as caught:
        mapping("main", "past", of=DEAL)
    assert str(caught.value).startswith(f"policies.mapping: {DEAL} {text}")


class Lives:
    """Agents whose episodes have lengths of their own.

    Each shows (index, episode, step); the reward is the step's number from 1, plus 10 for action
    1. `starts`: the step with which an agent comes, 0 being the reset.
    """

    def __init__(
        self,
        lengths: tuple[int, ...] = (1, 3),
        starts: tuple[int, ...] = (0, 0),
        ends: str = "terminated",
        action_space: Space[Any] | None = None,
        shows_last: bool = True,
    ) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(len(lengths))]
        self.agents: list[str] = []
        self.episode = -1
        self.seeds: list[int | None] = []
        self.given: list[dict[str, Any]] = []
        self.num_closed = 0
        self._lengths, self._starts, self._ends = lengths, starts, ends
        self._space = Discrete(2) if action_space is None else action_space
        self._shows_last = shows_last

    def observation_space(self, agent: str) -> Space[Any]:
        return Box(-1, 99, (3,), np.float32)

    def action_space(self, agent: str) -> Space[Any]:
        return self._space

    def reset(
        self, seed: int | None = None, options: Any = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        self.seeds.append(seed)
        self.episode += 1
        self.num_steps = 0
        self.agents = [
            agent
            for agent, start in zip(self.possible_agents, self._starts, strict=True)
            if start == 0
        ]
        return {agent: self._show(agent) for agent in self.agents}, {}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        assert set(actions) == set(self.agents)
        self.given.append(actions)
        self.num_steps += 1
        acted = list(self.agents)
        ends = {a: self.num_steps == self._lengths[self._index(a)] for a in acted}
        rewards = {a: float(self.num_steps + 10 * (actions[a] == 1)) for a in acted}
        self.agents = [a for a in acted if not ends[a]]
        for agent, start in zip(self.possible_agents, self._starts, strict=True):
            if start == self.num_steps:
                self.agents.append(agent)
        shown = {*self.agents, *(acted if self._shows_last else ())}
        flags = [{a: ends[a] and self._ends == kind for a in acted} for kind in ("terminated", "")]
        truncated = {a: ends[a] and self._ends == "truncated" for a in acted}
        return {a: self._show(a) for a in shown}, rewards, flags[0], truncated, {}

    def close(self) -> None:
        self.num_closed += 1

    def _index(self, agent: str) -> int:
        return self.possible_agents.index(agent)

    def _show(self, agent: str) -> Any:
        return np.array([self._index(agent), self.episode, self.num_steps], np.float32)


def ones(envs: AgentEnvs, action: int = 1) -> dict[str, Any]:
    return {"": np.full(envs.num_envs, action, np.int32)}


def rows(envs: AgentEnvs, num_steps: int) -> list[list[Any]]:
    """Of each step: idle, rewards, terminated, truncated, and (episode, step) of each column."""
    found = []
    for _ in range(num_steps):
        step = envs.step(ones(envs))
        assert step.idle is not None
        flags = [a.astype(int).tolist() for a in (step.idle, step.terminated, step.truncated)]
        shown = [tuple(map(int, row)) for row in step.obs[""][:, 1:]]
        found.append([flags[0], step.rewards.tolist(), *flags[1:], shown])
    return found


def test_agents_are_the_columns_of_their_environments() -> None:
    envs = AgentEnvs([Lives((2, 2, 2), (0, 0, 0)), Lives((2, 2, 2), (0, 0, 0))])
    assert (envs.num_envs, envs.name, envs.autoreset) == (6, "Lives", AutoresetMode.NEXT_STEP)
    assert envs.obs_spec.leaves[0].shape == (3,)
    assert envs.action_spec.parts[0].choices == (2,)
    assert envs.reset(0)[""][:, 0].tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_one_that_ends_early_is_idle_until_all_have_ended(ends: str) -> None:
    envs = AgentEnvs([Lives((1, 3), ends=ends)])
    envs.reset(0)
    no, first, last = [0, 0], [1, 0], [0, 1]
    flags = [[no, no], [first, no], [last, no]]
    if ends == "truncated":
        flags = [[b, a] for a, b in flags]
    assert rows(envs, 5) == [
        [[0, 0], [11, 11], *flags[1], [(0, 1), (0, 1)]],
        # The final observation's row, then a row of padding: its observation stays.
        [[1, 0], [0, 12], *flags[0], [(0, 1), (0, 2)]],
        [[1, 0], [0, 13], *flags[2], [(0, 1), (0, 3)]],
        [[1, 1], [0, 0], *flags[0], [(1, 0), (1, 0)]],
        [[0, 0], [11, 11], *flags[1], [(1, 1), (1, 1)]],
    ]
    # A reset in the midst of things forgets them.
    envs.reset(0)
    assert rows(envs, 1)[0][0] == [0, 0]


def test_environments_reset_each_in_its_own_time() -> None:
    envs = AgentEnvs([Lives((1, 1)), Lives((2, 2))])
    envs.reset(0)
    idle = [row[0] for row in rows(envs, 5)]
    assert idle == [[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]


def test_one_that_comes_later_is_idle_until_it_is_there() -> None:
    envs = AgentEnvs([Lives((4, 3), starts=(0, 2))])
    first = envs.reset(0)
    assert first[""].tolist() == [[0, 0, 0], [0, 0, 0]], "nothing of it was seen yet"
    assert rows(envs, 5) == [
        [[0, 1], [11, 0], [0, 0], [0, 0], [(0, 1), (0, 0)]],
        # Its first observation comes with a step in which it did nothing.
        [[0, 1], [12, 0], [0, 0], [0, 0], [(0, 2), (0, 2)]],
        [[0, 0], [13, 13], [0, 1], [0, 0], [(0, 3), (0, 3)]],
        [[0, 1], [14, 0], [1, 0], [0, 0], [(0, 4), (0, 3)]],
        [[1, 1], [0, 0], [0, 0], [0, 0], [(1, 0), (0, 3)]],
    ]


def test_one_that_shows_nothing_at_its_end_keeps_its_last_observation() -> None:
    envs = AgentEnvs([Lives((2, 3), shows_last=False)])
    envs.reset(0)
    assert [row[4][0] for row in rows(envs, 3)] == [(0, 1), (0, 1), (0, 1)]


def test_actions_go_to_those_who_are_there_in_their_own_space() -> None:
    env = Lives((1, 2), action_space=Discrete(2, start=5))
    envs = AgentEnvs([env])
    envs.reset(0)
    for _ in range(2):
        envs.step({"": np.array([0, 1], np.int32)})
    assert env.given == [{"agent_0": 5, "agent_1": 6}, {"agent_1": 6}]
    env = Lives((2, 2), action_space=Tuple((Discrete(2), Box(0, 1, (1,)))))
    envs = AgentEnvs([env])
    envs.reset(0)
    numbers = np.array([[0.5], [7.0]], np.float32)
    envs.step({"0": np.array([0, 1], np.int32), "1": numbers})
    assert env.action_space("").contains(env.given[0]["agent_1"])
    assert env.given[0]["agent_1"][1].tolist() == [1.0]


def use(env: Lives) -> None:
    envs = AgentEnvs([env])
    envs.reset(0)
    rows(envs, 3)


class Different(Lives):
    def observation_space(self, agent: str) -> Space[Any]:
        return Box(-1, 99, (3 + (agent == "agent_1"),), np.float32)


class Attributed(Lives):
    """Has its spaces as gymnasium has them."""

    observation_space = Box(-1, 99, (3,), np.float32)


class Leaving(Lives):
    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        result = super().step(actions)
        self.agents = self.agents[1:]
        return result


class Nobody(Lives):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = []
        return {}, {}


class Stranger(Lives):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, infos = super().reset(seed)
        self.agents.append("stranger")
        return obs, infos


class Returning(Lives):
    """`agent_0` is listed again after its end, though not in the step thereafter."""

    def step(self, actions):
        result = super().step(actions)
        if self.num_steps > 2:
            self.agents = ["agent_0", *self.agents]
            result[0]["agent_0"] = result[0][self.agents[-1]]
        return result


class NeverOver(Lives):
    """The flags of an agent say only in the step of its end that it is over."""

    def step(self, actions):
        self.agents = list(self.possible_agents)
        obs, rewards, terminated, truncated, infos = super().step(actions)
        self.agents = list(self.possible_agents)
        for flags in (terminated, truncated):
            for agent in self.agents:
                flags.setdefault(agent, False)
        return obs, rewards, terminated, truncated, infos


class StaysListed(Lives):
    """An agent is listed until all are over, and its flags say so."""

    def step(self, actions):
        alive = {agent: actions[agent] for agent in self.agents if agent not in self.over}
        self.agents = list(alive)
        obs, rewards, terminated, truncated, infos = super().step(alive)
        self.over |= {agent for agent in terminated if terminated[agent] or truncated[agent]}
        if len(self.over) < len(self.possible_agents):
            self.agents = list(self.possible_agents)
            terminated |= dict.fromkeys(self.over, True)
        return obs, rewards, terminated, truncated, infos

    def reset(self, seed=None, options=None):
        self.over = set()
        return super().reset(seed)


def test_one_that_stays_listed_after_its_end_does_not_come_back():
    plain, listed = AgentEnvs([Lives((1, 3))]), AgentEnvs([StaysListed((1, 3))])
    for envs in (plain, listed):
        envs.reset(0)
    assert rows(plain, 9) == rows(listed, 9)


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (Returning((1, 9)), "agent_0 comes back after its end, and may do so only after a reset"),
        (NeverOver((1, 9)), "agent_0 comes back after its end"),
        (Lives(()), "Lives has no possible_agents"),
        (Different(), r"observation space of agent_0 is Box.* and that of agent_1 is Box"),
        (Attributed(), "failed to say what its spaces are: TypeError: 'Box' object is not call"),
        (Leaving((9, 9)), "agent_0 is gone, neither terminated nor truncated"),
        (Nobody(), "no agents after a reset"),
        (Stranger(), "stranger is not among its possible_agents"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_does_not_fit_is_refused(env: Lives, text: str) -> None:
    with pytest.raises(EnvError, match=text) as caught:
        use(env)
    assert "\n" not in str(caught.value)


def test_all_environments_that_can_be_are_closed() -> None:
    class Open:
        def __init__(self) -> None:
            self._env = Lives()

        def __getattr__(self, name: str) -> Any:
            if name == "close":
                raise AttributeError(name)
            return getattr(self._env, name)

    worlds = [Lives(), Lives()]
    AgentEnvs([worlds[0], Open(), worlds[1]]).close()
    assert [world.num_closed for world in worlds] == [1, 1]


def test_parallel_environments_are_told_from_others() -> None:
    class InTurns(Lives):
        def last(self) -> None: ...

    assert is_parallel(Lives())
    assert not is_parallel(InTurns())
    assert not is_parallel(Counting())
    assert not is_parallel(object())


# -------------------- several policies

PAIR = PoliciesSection(names=("main", "past"), copies={"past": "main"}, copy_every_updates=1)


def swapped(agents: list[str], rng: np.random.Generator) -> dict[str, str]:
    """Main plays the first agent in every second episode."""
    turn = next(TURNS) % 2
    return dict(zip(agents, ("main", "past") if turn else ("past", "main"), strict=True))


TURNS = itertools.count()
SWAPPED = "tests.envs.test_agents:swapped"


def test_a_leaf_says_who_plays_from_an_episodes_first_row_to_its_last() -> None:
    envs = AgentEnvs([Lives((1, 3))], policies=PAIR.model_copy(update={"mapping": SWAPPED}))
    assert [leaf.name for leaf in envs.obs_spec.leaves] == ["", "policy"]
    assert envs.obs_spec.leaves[1] == ArraySpec("policy", (), "uint8", (2,))
    first = envs.reset(0)["policy"].tolist()
    seen = []
    for _ in range(9):
        step = envs.step(ones(envs))
        assert step.idle is not None
        assert step.untrained is not None
        # What is not trained is as idle as anybody: not at all.
        seen.append((step.obs["policy"].tolist(), step.untrained.tolist(), step.idle.tolist()))
        assert step.masked is not None
        assert step.masked.tolist() == (step.idle | step.untrained).tolist()
    other = first[::-1]
    # The step that resets shows the first observation of the next episode, and who plays it.
    players = [first] * 3 + [other] * 4 + [first] * 2
    idle = [[False] * 2, [True, False], [True, False], [True] * 2]
    assert [row[0] for row in seen] == players
    assert [row[1] for row in seen] == [[bool(n) for n in row] for row in players]
    assert [row[2] for row in seen] == (idle * 3)[:9]


def test_where_there_is_one_policy_only_idle_rows_are_masked() -> None:
    envs = AgentEnvs([Lives((1, 3))])
    envs.reset(0)
    step = envs.step(ones(envs))
    assert step.untrained is None
    assert step.masked is step.idle


def test_a_key_that_is_called_policy_is_in_the_way() -> None:
    class Named(Lives):
        def observation_space(self, agent: str) -> Space[Any]:
            return Dict(policy=super().observation_space(agent), more=Discrete(2))

    with pytest.raises(EnvError, match=r"has a key 'policy' already.*rename it by a wrapper"):
        AgentEnvs([Named()], policies=PAIR)


def test_who_plays_follows_from_the_seed_and_a_part_has_the_players_of_the_whole() -> None:
    def players(envs: AgentEnvs, seed: int, first_env: int = 0) -> list[Any]:
        seen = [envs.reset(seed, first_env)["policy"].tolist()]
        return seen + [envs.step(ones(envs)).obs["policy"].tolist() for _ in range(20)]

    worlds = [Lives((1, 2)) for _ in range(3)]
    envs = AgentEnvs(worlds, policies=PAIR)
    runs = [players(envs, seed) for seed in (1, 2, 1)]
    assert runs[0] == runs[2] != runs[1]
    part = Lives((1, 2))
    assert players(AgentEnvs([part], policies=PAIR), 1, 2) == [row[4:] for row in runs[0]]
    assert part.seeds[0] == worlds[2].seeds[0]
    assert worlds[0].seeds[:2] == [worlds[0].seeds[0], None]
    assert worlds[0].seeds[0] != worlds[1].seeds[0]
