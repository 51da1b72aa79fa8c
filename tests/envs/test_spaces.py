import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import batch_space

from impala_async.config.env import EnvSection
from impala_async.envs.describe import random_actions
from impala_async.envs.spaces import Spaces, obs_leaves
from impala_async.envs.vector import SerialEnvs, VectorEnvs
from impala_async.errors import EnvError
from impala_async.schema import ActionPart, ArraySpec, ObsSpec

BOUNDED = Box(np.array([-1.0, 0.0]), np.array([1.0, 9.0]), dtype=np.float64)
HALF_OPEN = Box(np.float32([-np.inf, 0]), np.float32([1, np.inf]), dtype=np.float32)
NESTED = Dict(
    {
        "move": Tuple((Discrete(3, start=-1), Box(-2, 2, (), np.float32))),
        "buy": Dict({"what": MultiDiscrete([[2, 3], [4, 5]]), "if": MultiBinary(2)}),
    }
)


def discrete(*choices, shape=()):
    return [ActionPart("", "discrete", choices, shape)]


def numbers(*shape):
    return [ActionPart("", "continuous", (), shape)]


PARTS = [
    (Discrete(3), discrete(3)),
    (Discrete(3, start=-1), discrete(3)),
    (Discrete(3, start=7, dtype=np.int8), discrete(3)),
    (MultiDiscrete([2, 3]), discrete(2, 3, shape=(2,))),
    (MultiDiscrete([2, 3], start=[-1, 9]), discrete(2, 3, shape=(2,))),
    (MultiDiscrete([[2, 3], [4, 5]], np.uint8), discrete(2, 3, 4, 5, shape=(2, 2))),
    (MultiBinary((2, 1)), discrete(2, 2, shape=(2, 1))),
    (BOUNDED, numbers(2)),
    (HALF_OPEN, numbers(2)),
    (Box(-1, 1, (), np.float32), numbers()),
    (Box(-1, 1, (2, 3), np.float16), numbers(2, 3)),
    (Dict({"": Discrete(2)}), discrete(2)),
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
BOX = Box(-1, 1, (4,), np.float32)


def spaces_of(action, **options):
    return Spaces(BOX, action, EnvSection(id="some:Env", **options))


def test_an_action_space_is_its_parts_of_which_numbers_alone_are_squashed():
    for space, parts in PARTS:
        assert list(spaces_of(space).action_spec.parts) == parts, space
    squashed = spaces_of(NESTED, squash_actions=True).action_spec.parts
    assert [part.kind for part in squashed] == ["discrete", "discrete", "discrete", "squashed"]
    assert spaces_of(Discrete(3)).obs_spec == ObsSpec((ArraySpec("", (4,), "float32"),))


SQUASHED = {"squash_actions": True}
WIDE = Box(np.arange(200.0), np.arange(200.0) + 1, dtype=np.float64)
TWICE = "two parts called 'a/b'"


def test_other_spaces_are_refused_on_one_line():
    for refused, named in (
        (lambda: spaces_of(Text(5)), "action space Text"),
        (lambda: spaces_of(4), "action space: wants a space of gymnasium, got 4 (builtins.int)"),
        (lambda: spaces_of(Box(0, 5, (2,), np.int64)), "one of floats"),
        (lambda: spaces_of(Dict(a=Tuple((Discrete(2), Text(5))))), "at 'a/1'"),
        (lambda: spaces_of(Dict()), "action space Dict() is empty"),
        (lambda: spaces_of(Dict(a=Discrete(2), b=Dict())), "has a Dict or Tuple without parts"),
        (lambda: spaces_of(Tuple((Discrete(2), Tuple(())))), "has a Dict or Tuple without parts"),
        (lambda: spaces_of(Box(0, 1, (0,), np.float32)), "is empty"),
        (lambda: spaces_of(MultiDiscrete([])), "is empty"),
        (lambda: spaces_of(Dict([("a", Dict(b=Discrete(2))), ("a/b", Discrete(2))])), TWICE),
        (lambda: spaces_of(Dict(a=HALF_OPEN), **SQUASHED), "at 'a' has no bounds to squash into"),
        (lambda: spaces_of(Discrete(2), **SQUASHED), "action space Discrete(2) has no numbers"),
        (lambda: spaces_of(Discrete(2**40)), "has 1,099,511,627,776 choices, and a policy gives"),
        (lambda: obs_leaves(Text(5)), "Text"),
        (lambda: obs_leaves(None), "observation space: wants a space of gymnasium, got None"),
        (lambda: obs_leaves(Sequence(WIDE)), "Sequence"),
        (lambda: obs_leaves(Dict(a=Dict(b=Text(3)))), "at 'a/b'"),
        (lambda: obs_leaves(Tuple((BOX, Sequence(Discrete(2))))), "at '1'"),
        (
            lambda: obs_leaves(Dict(a=BOX, b=Text(5))),
            "(env.wrappers), as gymnasium.wrappers:Filter",
        ),
        (lambda: obs_leaves(Tuple(())), "empty"),
        (lambda: obs_leaves(Box(0, 1, (3,), np.uint32)), "bool, float16, float32"),
        (lambda: obs_leaves(Box(0, 1, (3, 0), np.float32)), "(3, 0)"),
        (lambda: obs_leaves(Dict([("a", Dict(b=BOX)), ("a/b", BOX)])), TWICE),
        (lambda: obs_leaves(Dict([("a", Tuple((BOX,))), ("a/0", BOX)])), "two parts called 'a/0'"),
    ):
        with pytest.raises(EnvError) as caught:
            refused()
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 350


class Recording(gym.Env):
    """Keeps the actions that it gets, and refuses those that are not in its space."""

    observation_space = Box(-1, 1, (1,), np.float32)

    def __init__(self, space):
        self.action_space, self.actions = space, []

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.actions.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("is_squashed", [False, True])
@pytest.mark.parametrize("space", [space for space, _ in PARTS], ids=str)
# gymnasium's own vector gives a number, not an array, for a Box without dimensions.
@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
def test_single_and_vector_environments_get_the_same_actions_of_their_space(space, is_squashed):
    section = EnvSection(id="some:Env", squash_actions=is_squashed)
    singles, columns = ([Recording(space) for _ in range(3)] for _ in range(2))
    try:
        serial = SerialEnvs(singles, section)
    except EnvError:
        assert is_squashed, "there is nothing to squash"
        return
    vector = VectorEnvs(SyncVectorEnv([lambda env=env: env for env in columns]), section)
    whole, spaces = batch_space(space, 3), spaces_of(space, squash_actions=is_squashed)
    rng = np.random.default_rng(3)
    serial.reset(0)
    vector.reset(0)
    for _ in range(20):
        # As a policy chooses them: numbers go far beyond all bounds.
        actions = random_actions(serial.action_spec, {}, 3, rng)
        actions |= {name: 5 * part for name, part in actions.items() if part.dtype == np.float32}
        assert whole.contains(spaces.batch(actions))
        serial.step(actions)
        vector.step(actions)
    for mine, theirs in zip(singles, columns, strict=True):
        assert len(mine.actions) == 20
        np.testing.assert_equal(mine.actions, theirs.actions)
        assert len({str(action) for action in mine.actions}) > 1, "kept ones were overwritten"


def test_choices_are_moved_to_the_start_in_the_dtype_of_the_space():
    actions = spaces_of(Discrete(3, start=-1, dtype=np.int8)).batch({"": np.arange(3)})
    assert (actions.tolist(), actions.dtype) == ([-1, 0, 1], np.int8)
    given = {"": np.array([[[0, 2]], [[1, 0]]], np.int32)}
    moved = spaces_of(MultiDiscrete([[2, 3]], start=[[5, -5]])).batch(given)
    assert moved.tolist() == [[[5, -3]], [[6, -5]]]
    # A plain choice is a number that can be a key.
    names = {0: "left", 1: "stay", 2: "right"}
    each = spaces_of(Discrete(3)).each({"": np.array([2, 0], np.int32)})
    assert [names[action] for action in each] == ["right", "left"]


def test_numbers_are_clipped_or_squashed_into_their_own_bounds():
    given = np.array([[-3, -3], [0.25, 4.5], [7, 77]], np.float32)
    clipped = spaces_of(BOUNDED).batch({"": given})
    assert clipped.tolist() == [[-1, 0], [0.25, 4.5], [1, 9]]
    assert clipped.dtype == np.float64
    assert given[0, 0] == -3, "the stored sample stays as it was"
    open_end = spaces_of(HALF_OPEN).batch({"": given})
    assert open_end.tolist() == [[-3, 0], [0.25, 4.5], [1, 77]]
    given = np.array([[0, 0], [-50, 50], [0.5, -0.5]], np.float32)
    squashed = spaces_of(BOUNDED, squash_actions=True).batch({"": given})
    assert squashed[:2].tolist() == [[0, 4.5], [-1, 9]]
    np.testing.assert_allclose(squashed[2], [np.tanh(0.5), 4.5 - 4.5 * np.tanh(0.5)])
    # The widest bounds do not overflow.
    most = np.finfo(np.float32).max
    widest = spaces_of(Box(-most, most, (1,), np.float32), squash_actions=True)
    squashed = widest.batch({"": np.array([[0.0], [99.0], [-99.0]], np.float32)})
    assert squashed.tolist() == [[0.0], [most], [-most]]


# -------------------- leaves of observations

# Every kind, twice nested.
ALL = Dict(
    {
        "box": BOX,
        "bits": MultiBinary((2, 2)),
        "both": Tuple((Discrete(3, start=-1), Dict({"many": MultiDiscrete([[2, 3], [4, 5]])}))),
    }
)
PLAIN = [
    (Box(0, 1, (4,), np.float32), ArraySpec("", (4,), "float32")),
    (Box(0, 255, (84, 84, 4), np.uint8), ArraySpec("", (84, 84, 4), "uint8")),
    (Box(0, 1, (), np.float64), ArraySpec("", (), "float64")),
    (Box(-5, 5, (1,), np.int64), ArraySpec("", (1,), "int64")),
    (Box(0, 1, (2, 2), np.bool_), ArraySpec("", (2, 2), "bool")),
    (Discrete(3, start=-7), ArraySpec("", (), "int64", (3,))),
    (Discrete(3, start=5, dtype=np.int8), ArraySpec("", (), "int8", (3,))),
    (MultiDiscrete([2, 3], start=[-1, 9]), ArraySpec("", (2,), "int64", (2, 3))),
    (MultiDiscrete([[2, 3], [4, 5]], np.int16), ArraySpec("", (2, 2), "int16", (2, 3, 4, 5))),
    (MultiBinary((2, 3)), ArraySpec("", (2, 3), "int8")),
]


def leaves_of(space):
    return [leaf.spec for leaf in obs_leaves(space)]


def test_a_space_is_its_leaves_in_the_order_of_gymnasium():
    for space, spec in PLAIN:
        assert leaves_of(space) == [spec], space
    assert leaves_of(ALL) == [
        ArraySpec("bits", (2, 2), "int8"),
        ArraySpec("both/0", (), "int64", (3,)),
        ArraySpec("both/1/many", (2, 2), "int64", (2, 3, 4, 5)),
        ArraySpec("box", (4,), "float32"),
    ]
    own_order = Dict([("b", BOX), ("a", Tuple((BOX, Tuple((BOX, BOX)))))])
    assert [leaf.name for leaf in leaves_of(own_order)] == ["b", "a/0", "a/1/0", "a/1/1"]


# -------------------- masks and stacks


def flags(*shape, dtype=np.int8):
    return Box(0, 1, shape, dtype)


def legal(obs, action, key="auto"):
    """The leaf that is taken for the mask."""
    return Spaces(obs, action, EnvSection(id="some:Env", action_mask_key=key)).action_spec.legal


def test_a_mask_that_fits_is_found_by_itself_or_by_its_key():
    for mask, action in (
        (flags(3), Discrete(3, start=5)),
        (flags(3, dtype=np.bool_), Discrete(3)),
        (MultiBinary(3), Discrete(3)),
        (flags(5), MultiDiscrete([2, 3])),
        (flags(2, 3), MultiDiscrete([3, 3])),
        (flags(6), MultiBinary(3)),
        (flags(4), Tuple((Discrete(3), BOX, Discrete(1)))),
    ):
        obs = Dict(look=BOX, action_mask=mask)
        assert legal(obs, action) == "action_mask", mask
        assert legal(obs, action, None) is None
        assert legal(Dict(a=BOX, info=Dict(legal=mask)), action, "info/legal") == "info/legal"


def test_one_that_does_not_fit_is_an_input_or_refused(caplog):
    for obs, action, num_actions in (
        (Dict(a=BOX, x=flags(4)), Discrete(3), 3),
        (Dict(a=BOX, x=flags(2)), MultiDiscrete([2, 3]), 5),
        (Dict(a=BOX, x=flags(3, dtype=np.float32)), Discrete(3), 3),
        (Dict(a=BOX, x=MultiDiscrete([2, 2, 2])), Discrete(3), 3),
        (Dict(a=BOX, x=flags(3)), BOX, 0),
        (Dict(x=flags(3)), Discrete(3), 3),
        (Dict(a=BOX), Discrete(3), 3),
        (BOX, Discrete(3), 3),
        (Tuple((BOX, flags(2))), Discrete(2), 2),
    ):
        must = f"must have an integer or a bool for each of {num_actions} discrete actions, and st"
        with pytest.raises(EnvError, match=rf"^env\.action_mask_key: 'x' {must}") as caught:
            legal(obs, action, "x")
        assert "\n" not in str(caught.value)
        if has_one := isinstance(obs, Dict) and "x" in obs.spaces:
            obs = Dict({key.replace("x", "action_mask"): part for key, part in obs.spaces.items()})
        caplog.clear()
        assert legal(obs, action) is None
        assert (f"not for a mask of actions, which {must}" in caplog.text) is has_one
        with pytest.raises(EnvError, match="'action_mask' must have"):
            legal(obs, action, "action_mask")


def test_a_mask_that_lies_deeper_is_an_input_and_that_is_told(caplog):
    space = Dict(a=BOX, info=Dict(action_mask=flags(3)))
    assert legal(space, Discrete(3)) is None
    assert "'info/action_mask' is taken for an input: if it masks actions, set env" in caplog.text
    caplog.clear()
    for key in ("info/action_mask", None):
        assert legal(space, Discrete(3), key) == key
    assert not caplog.text


def test_only_images_of_bytes_are_stacks():
    image, small = Box(0, 255, (4, 8, 8), np.uint8), Box(0, 255, (8, 8), np.uint8)
    numbers = Box(-1, 1, (4, 8, 8))
    both = Dict(a=image, b=small, c=numbers)
    plain, stacked = (EnvSection(id="a:B", frame_stack=given) for given in ("auto", "on"))
    leaves = Spaces(both, Discrete(2), stacked).obs_spec.leaves
    assert [leaf.is_stack for leaf in leaves] == [True, False, False]
    assert not any(leaf.is_stack for leaf in Spaces(both, Discrete(2), plain).obs_spec.leaves)
    masked = Dict(a=image, action_mask=Box(0, 1, (2, 2, 2), np.uint8))
    for key in ("auto", "action_mask"):
        spaces = Spaces(masked, Discrete(8), stacked.model_copy(update={"action_mask_key": key}))
        assert [leaf.is_stack for leaf in spaces.obs_spec.leaves] == [True, False]
        assert spaces.action_spec.legal == "action_mask"
    with pytest.raises(EnvError, match=r"^env\.frame_stack: observation space Dict.* has no stack"):
        Spaces(Dict(b=small, c=numbers), Discrete(2), stacked)
