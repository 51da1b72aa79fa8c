from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from impala_async.envs.actions import ActionAdapter, action_parts
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError
from impala_async.spec import ActionPart

BOX = Box(np.array([-1.0, 0.0]), np.array([1.0, 9.0]), dtype=np.float64)
HALF_OPEN = Box(np.float32([-np.inf, 0]), np.float32([1, np.inf]), dtype=np.float32)
NESTED = Dict(
    {
        "move": Tuple((Discrete(3, start=-1), Box(-2, 2, (), np.float32))),
        "buy": Dict({"what": MultiDiscrete([[2, 3], [4, 5]]), "if": MultiBinary(2)}),
    }
)
PARTS: list[tuple[Space[Any], list[ActionPart]]] = [
    (Discrete(3), [ActionPart("", "discrete", (3,))]),
    (Discrete(3, start=-1), [ActionPart("", "discrete", (3,))]),
    (Discrete(3, start=7, dtype=np.int8), [ActionPart("", "discrete", (3,))]),
    (MultiDiscrete([2, 3]), [ActionPart("", "discrete", (2, 3), (2,))]),
    (MultiDiscrete([2, 3], start=[-1, 9]), [ActionPart("", "discrete", (2, 3), (2,))]),
    (
        MultiDiscrete([[2, 3], [4, 5]], np.uint8),
        [ActionPart("", "discrete", (2, 3, 4, 5), (2, 2))],
    ),
    (MultiBinary(3), [ActionPart("", "discrete", (2, 2, 2), (3,))]),
    (MultiBinary((2, 1)), [ActionPart("", "discrete", (2, 2), (2, 1))]),
    (BOX, [ActionPart("", "continuous", (), (2,))]),
    (HALF_OPEN, [ActionPart("", "continuous", (), (2,))]),
    (Box(-1, 1, (), np.float32), [ActionPart("", "continuous", (), ())]),
    (Box(-1, 1, (2, 3), np.float16), [ActionPart("", "continuous", (), (2, 3))]),
    (
        Tuple((Discrete(2), Discrete(4, start=3))),
        [ActionPart("0", "discrete", (2,)), ActionPart("1", "discrete", (4,))],
    ),
    (Dict({"": Discrete(2)}), [ActionPart("", "discrete", (2,))]),
    (
        NESTED,
        [
            ActionPart("buy/if", "discrete", (2, 2), (2,)),
            ActionPart("buy/what", "discrete", (2, 3, 4, 5), (2, 2)),
            ActionPart("move/0", "discrete", (3,)),
            ActionPart("move/1", "continuous", (), ()),
        ],
    ),
]
SPACES = [space for space, _ in PARTS]
each_space = pytest.mark.parametrize("space", SPACES, ids=str)


def random_actions(
    parts: tuple[ActionPart, ...], num_columns: int, rng: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """As a policy chooses them: numbers go far beyond all bounds."""
    actions = {}
    for part in parts:
        shape = (num_columns, *part.shape)
        if part.kind == "discrete":
            choices = np.reshape(part.choices, part.shape)
            actions[part.name] = rng.integers(np.broadcast_to(choices, shape)).astype(np.int32)
        else:
            actions[part.name] = (5 * rng.standard_normal(shape)).astype(np.float32)
    return actions


# -------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(("space", "parts"), PARTS, ids=str)
def test_an_action_space_is_its_parts(space: Space[Any], parts: list[ActionPart]) -> None:
    assert list(action_parts(space, is_squashed=False)) == parts


def test_squashed_are_the_numbers_alone() -> None:
    parts = action_parts(NESTED, is_squashed=True)
    assert [part.kind for part in parts] == ["discrete", "discrete", "discrete", "squashed"]
    assert action_parts(BOX, is_squashed=True) == (ActionPart("", "squashed", (), (2,)),)


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (Text(5), "Text"),
        (Sequence(Discrete(2)), "Sequence"),
        (Box(0, 5, (2,), np.int64), "Box of floats"),
        (Box(0, 1, (2,), np.bool_), "Box of floats"),
        (Dict(a=Tuple((Discrete(2), Text(5)))), "at 'a/1'"),
        (Dict(), "empty"),
        (Tuple(()), "empty"),
        (Box(0, 1, (0,), np.float32), "no numbers"),
        (MultiDiscrete([]), "no items"),
        (Dict([("a", Dict(b=Discrete(2))), ("a/b", Discrete(2))]), "two parts of one name"),
    ],
    ids=str,
)
def test_other_spaces_are_refused_by_name(space: Space[Any], named: str) -> None:
    with pytest.raises(EnvError) as caught:
        action_parts(space, is_squashed=False)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_squashing_wants_numbers_with_bounds() -> None:
    with pytest.raises(EnvError, match=r"env\.squash_actions: .* at 'a' has no bounds"):
        action_parts(Dict(a=HALF_OPEN), is_squashed=True)
    with pytest.raises(EnvError, match=r"env\.squash_actions: .*Discrete\(2\) has no numbers"):
        action_parts(Discrete(2), is_squashed=True)


# -------------------------------------------------------------------------------------- adapter


@each_space
@pytest.mark.parametrize("is_squashed", [False, True])
def test_every_action_is_one_of_the_space(space: Space[Any], is_squashed: bool) -> None:
    try:
        parts = action_parts(space, is_squashed=is_squashed)
    except EnvError:
        assert is_squashed, "nothing to squash"
        return
    adapter = ActionAdapter(space, is_squashed=is_squashed)
    whole = batch_space(space, 4)
    rng = np.random.default_rng(2)
    for _ in range(50):
        actions = random_actions(parts, 4, rng)
        assert whole.contains(adapter.batch(actions))
        each = list(adapter.each(actions))
        assert len(each) == 4
        assert all(space.contains(action) for action in each)


class Recording(gym.Env[Any, Any]):
    """Keeps the actions that it gets, and refuses those that are not in its space."""

    def __init__(self, space: Space[Any]) -> None:
        self.observation_space = Box(-1, 1, (1,), np.float32)
        self.action_space = space
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.actions.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


@each_space
# gymnasium's own vector gives a number, not an array, for a Box without dimensions.
@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
def test_serial_and_vector_environments_get_the_same_actions(space: Space[Any]) -> None:
    singles = [Recording(space) for _ in range(3)]
    columns = [Recording(space) for _ in range(3)]
    serial = SerialEnvs(singles)
    vector = VectorEnvs(SyncVectorEnv([lambda env=env: env for env in columns]))  # type: ignore[misc]
    rng = np.random.default_rng(3)
    serial.reset(0)
    vector.reset(0)
    for _ in range(5):
        actions = random_actions(serial.action_spec.parts, 3, rng)
        serial.step(actions)
        vector.step(actions)
    for mine, theirs in zip(singles, columns, strict=True):
        assert len(mine.actions) == 5
        np.testing.assert_equal(mine.actions, theirs.actions)
        assert len({str(action) for action in mine.actions}) > 1, "kept ones were overwritten"


def test_choices_are_moved_to_the_start_in_the_dtype_of_the_space() -> None:
    adapter = ActionAdapter(Discrete(3, start=-1, dtype=np.int8))
    actions = adapter.batch({"": np.array([0, 1, 2], np.int32)})
    assert actions.tolist() == [-1, 0, 1]
    assert actions.dtype == np.int8
    adapter = ActionAdapter(MultiDiscrete([[2, 3]], start=[[5, -5]]))
    assert adapter.batch({"": np.array([[[0, 2]], [[1, 0]]], np.int32)}).tolist() == [
        [[5, -3]],
        [[6, -5]],
    ]


def test_numbers_are_clipped_to_their_own_bounds() -> None:
    adapter = ActionAdapter(BOX)
    given = np.array([[-3, -3], [0.25, 4.5], [7, 77]], np.float32)
    clipped = adapter.batch({"": given})
    assert clipped.tolist() == [[-1, 0], [0.25, 4.5], [1, 9]]
    assert clipped.dtype == np.float64
    assert given[0, 0] == -3, "the stored sample stays as it was"
    open_end = ActionAdapter(HALF_OPEN).batch({"": given})
    assert open_end.tolist() == [[-3, 0], [0.25, 4.5], [1, 77]]


def test_numbers_are_squashed_into_their_own_bounds() -> None:
    adapter = ActionAdapter(BOX, is_squashed=True)
    given = np.array([[0, 0], [-50, 50], [0.5, -0.5]], np.float32)
    squashed = adapter.batch({"": given})
    assert squashed[:2].tolist() == [[0, 4.5], [-1, 9]]
    np.testing.assert_allclose(squashed[2], [np.tanh(0.5), 4.5 - 4.5 * np.tanh(0.5)])


def test_the_widest_bounds_do_not_overflow() -> None:
    most = np.finfo(np.float32).max
    adapter = ActionAdapter(Box(-most, most, (1,), np.float32), is_squashed=True)
    squashed = adapter.batch({"": np.array([[0.0], [99.0], [-99.0]], np.float32)})
    assert squashed.tolist() == [[0.0], [most], [-most]]


def test_a_plain_choice_is_a_number_that_can_be_a_key() -> None:
    adapter = ActionAdapter(Discrete(3))
    names = {0: "left", 1: "stay", 2: "right"}
    given = {"": np.array([2, 0], np.int32)}
    assert [names[action] for action in adapter.each(given)] == ["right", "left"]
