import logging
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from impala_async.envs.spaces import SpaceOptions, Spaces
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError
from impala_async.schema import ActionPart, ActionSpec, ArraySpec, ObsSpec

BOUNDED = Box(np.array([-1.0, 0.0]), np.array([1.0, 9.0]), dtype=np.float64)
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
    (BOUNDED, [ActionPart("", "continuous", (), (2,))]),
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


def adapter_of(space: Space[Any], *, is_squashed: bool = False) -> Spaces:
    return Spaces(Box(-1, 1, (4,)), space, SpaceOptions(is_squashed=is_squashed))


def parts_of(space: Space[Any], *, is_squashed: bool = False) -> tuple[ActionPart, ...]:
    return adapter_of(space, is_squashed=is_squashed).action_spec.parts


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
    assert list(parts_of(space)) == parts


def test_squashed_are_the_numbers_alone() -> None:
    parts = parts_of(NESTED, is_squashed=True)
    assert [part.kind for part in parts] == ["discrete", "discrete", "discrete", "squashed"]
    assert parts_of(BOUNDED, is_squashed=True) == (ActionPart("", "squashed", (), (2,)),)


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
        (Dict([("a", Dict(b=Discrete(2))), ("a/b", Discrete(2))]), "two parts called 'a/b'"),
    ],
    ids=str,
)
def test_other_spaces_are_refused_by_name(space: Space[Any], named: str) -> None:
    with pytest.raises(EnvError) as caught:
        parts_of(space)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_squashing_wants_numbers_with_bounds() -> None:
    with pytest.raises(EnvError, match=r"env\.squash_actions: .* at 'a' has no bounds"):
        parts_of(Dict(a=HALF_OPEN), is_squashed=True)
    with pytest.raises(EnvError, match=r"env\.squash_actions: .*Discrete\(2\) has no numbers"):
        parts_of(Discrete(2), is_squashed=True)


# -------------------------------------------------------------------------------------- adapter


@each_space
@pytest.mark.parametrize("is_squashed", [False, True])
def test_every_action_is_one_of_the_space(space: Space[Any], is_squashed: bool) -> None:
    try:
        parts = parts_of(space, is_squashed=is_squashed)
    except EnvError:
        assert is_squashed, "nothing to squash"
        return
    adapter = adapter_of(space, is_squashed=is_squashed)
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
    adapter = adapter_of(Discrete(3, start=-1, dtype=np.int8))
    actions = adapter.batch({"": np.array([0, 1, 2], np.int32)})
    assert actions.tolist() == [-1, 0, 1]
    assert actions.dtype == np.int8
    adapter = adapter_of(MultiDiscrete([[2, 3]], start=[[5, -5]]))
    assert adapter.batch({"": np.array([[[0, 2]], [[1, 0]]], np.int32)}).tolist() == [
        [[5, -3]],
        [[6, -5]],
    ]


def test_numbers_are_clipped_to_their_own_bounds() -> None:
    adapter = adapter_of(BOUNDED)
    given = np.array([[-3, -3], [0.25, 4.5], [7, 77]], np.float32)
    clipped = adapter.batch({"": given})
    assert clipped.tolist() == [[-1, 0], [0.25, 4.5], [1, 9]]
    assert clipped.dtype == np.float64
    assert given[0, 0] == -3, "the stored sample stays as it was"
    open_end = adapter_of(HALF_OPEN).batch({"": given})
    assert open_end.tolist() == [[-3, 0], [0.25, 4.5], [1, 77]]


def test_numbers_are_squashed_into_their_own_bounds() -> None:
    adapter = adapter_of(BOUNDED, is_squashed=True)
    given = np.array([[0, 0], [-50, 50], [0.5, -0.5]], np.float32)
    squashed = adapter.batch({"": given})
    assert squashed[:2].tolist() == [[0, 4.5], [-1, 9]]
    np.testing.assert_allclose(squashed[2], [np.tanh(0.5), 4.5 - 4.5 * np.tanh(0.5)])


def test_the_widest_bounds_do_not_overflow() -> None:
    most = np.finfo(np.float32).max
    adapter = adapter_of(Box(-most, most, (1,), np.float32), is_squashed=True)
    squashed = adapter.batch({"": np.array([[0.0], [99.0], [-99.0]], np.float32)})
    assert squashed.tolist() == [[0.0], [most], [-most]]


def test_a_plain_choice_is_a_number_that_can_be_a_key() -> None:
    adapter = adapter_of(Discrete(3))
    names = {0: "left", 1: "stay", 2: "right"}
    given = {"": np.array([2, 0], np.int32)}
    assert [names[action] for action in adapter.each(given)] == ["right", "left"]


BOX = Box(-1, 1, (4,), np.float32)


def legal(mask: Space[Any], action: Space[Any], options: SpaceOptions | None = None) -> str | None:
    """The leaf that is taken for the mask, of an observation that has it beside another."""
    obs = Dict({"look": BOX, "action_mask": mask})
    return Spaces(obs, action, options or SpaceOptions()).action_spec.legal


def flags(*shape: int, dtype: type = np.int8) -> Box:
    return Box(0, 1, shape, dtype)


def test_both_spaces_are_described() -> None:
    spaces = Spaces(BOX, Discrete(3, start=-1))
    assert spaces.obs_spec == ObsSpec((ArraySpec("", (4,), "float32"),))
    assert spaces.action_spec == ActionSpec((ActionPart("", "discrete", (3,)),))
    adapted = spaces.batch({"": np.array([0, 2], np.int32)})
    assert adapted.tolist() == [-1, 1]


def test_squashing_reaches_parts_and_adapter() -> None:
    box = Box(0, 10, (1,), np.float32)
    plain, squashed = Spaces(BOX, box), Spaces(BOX, box, SpaceOptions(is_squashed=True))
    given = {"": np.array([[3.0]], np.float32)}
    assert plain.action_spec.parts[0].kind == "continuous"
    assert plain.batch(given).tolist() == [[3.0]]
    assert squashed.action_spec.parts[0].kind == "squashed"
    assert squashed.batch(given)[0, 0] == pytest.approx(5 + 5 * np.tanh(3.0))


def test_a_space_that_is_not_supported_is_refused_on_either_side() -> None:
    with pytest.raises(EnvError, match="observation space Text"):
        Spaces(Text(3), Discrete(2))
    with pytest.raises(EnvError, match="action space Text"):
        Spaces(BOX, Text(3))


# -------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize(
    ("mask", "action"),
    [
        (flags(3), Discrete(3, start=5)),
        (flags(3, dtype=np.uint8), Discrete(3)),
        (flags(3, dtype=np.bool_), Discrete(3)),
        (MultiBinary(3), Discrete(3)),
        (flags(5), MultiDiscrete([2, 3])),
        (flags(2, 3), MultiDiscrete([3, 3])),
        (flags(6), MultiBinary(3)),
        (flags(4), Tuple((Discrete(3), BOX, Discrete(1)))),
    ],
    ids=str,
)
def test_a_mask_is_found_by_itself_when_it_fits(mask: Space[Any], action: Space[Any]) -> None:
    assert legal(mask, action) == "action_mask"
    assert legal(mask, action, SpaceOptions(mask_key=None)) is None


@pytest.mark.parametrize(
    ("mask", "action", "why"),
    [
        (flags(4), Discrete(3), "it has shape (4,) of int8, and there are 3 actions"),
        (flags(3, dtype=np.float32), Discrete(3), "of float32"),
        (MultiDiscrete([2, 2, 2]), Discrete(3), "of categories"),
        (flags(3), BOX, "there are no discrete actions"),
    ],
    ids=str,
)
def test_one_that_does_not_fit_is_an_input_and_is_told_of(
    mask: Space[Any], action: Space[Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert legal(mask, action) is None
    assert why in caplog.text


def test_an_observation_without_a_mask_is_nothing_to_talk_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for space in (BOX, Dict({"a": BOX}), Tuple((BOX, flags(2)))):
        assert Spaces(space, Discrete(2)).action_spec.legal is None
    assert not caplog.text


def test_a_mask_alone_is_an_input() -> None:
    obs = Dict({"action_mask": flags(2)})
    assert Spaces(obs, Discrete(2)).action_spec.legal is None


@pytest.mark.parametrize(
    ("obs", "action", "texts"),
    [
        (Dict(a=BOX, legal=flags(4)), Discrete(3), ["shape (4,)", "3 actions"]),
        (Dict(a=BOX, legal=flags(2)), MultiDiscrete([2, 3]), ["shape (2,)", "5 actions"]),
        (Dict(a=BOX, legal=flags(3, dtype=np.float32)), Discrete(3), ["float32"]),
        (Dict(a=BOX), Discrete(3), ["it is no key of Dict('a'"]),
        (BOX, Discrete(3), ["it is no key of Box"]),
        (Dict(legal=flags(3)), Discrete(3), ["nothing else"]),
    ],
    ids=str,
)
def test_a_key_of_ones_own_must_fit(obs: Space[Any], action: Space[Any], texts: list[str]) -> None:
    with pytest.raises(EnvError) as caught:
        Spaces(obs, action, SpaceOptions(mask_key="legal"))
    assert str(caught.value).startswith("env.action_mask_key: 'legal' must be")
    assert all(text in str(caught.value) for text in texts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("obs", [Dict(a=BOX, legal=flags(3)), Dict(a=BOX), BOX], ids=str)
def test_a_key_of_ones_own_masks_no_numbers(obs: Space[Any]) -> None:
    with pytest.raises(EnvError) as caught:
        Spaces(obs, BOX, SpaceOptions(mask_key="legal"))
    assert str(caught.value) == (
        "env.action_mask_key: 'legal' must be a key of a Dict observation with an integer or a "
        "bool for each discrete action, but there are no discrete actions"
    )


def test_the_usual_key_must_fit_too_when_it_is_named() -> None:
    obs = Dict({"a": BOX, "action_mask": flags(4)})
    assert Spaces(obs, Discrete(3)).action_spec.legal is None
    with pytest.raises(EnvError, match=r"'action_mask' must be"):
        Spaces(obs, Discrete(3), SpaceOptions(mask_key="action_mask"))


def test_a_key_of_ones_own_may_be_nested() -> None:
    obs = Dict(a=BOX, info=Dict(legal=flags(3)))
    options = SpaceOptions(mask_key="info/legal")
    assert Spaces(obs, Discrete(3), options).action_spec.legal == "info/legal"


def test_only_images_of_bytes_are_stacks() -> None:
    image, small = Box(0, 255, (4, 8, 8), np.uint8), Box(0, 255, (8, 8), np.uint8)
    numbers = Box(-1, 1, (4, 8, 8))
    both = Dict(a=image, b=small, c=numbers)
    spaces = Spaces(both, Discrete(2), SpaceOptions(is_stacked=True))
    assert [leaf.is_stack for leaf in spaces.obs_spec.leaves] == [True, False, False]
    assert not any(leaf.is_stack for leaf in Spaces(both, Discrete(2)).obs_spec.leaves)
    with pytest.raises(EnvError, match=r"^env\.frame_stack: observation space Dict.* has no stack"):
        Spaces(Dict(b=small, c=numbers), Discrete(2), SpaceOptions(is_stacked=True))
