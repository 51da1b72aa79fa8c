import logging
from typing import Any

import numpy as np
import pytest
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from impala_async.envs.spaces import SpaceOptions, Spaces
from impala_async.errors import EnvError
from impala_async.spec import ActionPart, ActionSpec, ArraySpec, ObsSpec

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
    adapted = spaces.adapter().batch({"": np.array([0, 2], np.int32)})
    assert adapted.tolist() == [-1, 1]


def test_squashing_reaches_parts_and_adapter() -> None:
    box = Box(0, 10, (1,), np.float32)
    plain, squashed = Spaces(BOX, box), Spaces(BOX, box, SpaceOptions(is_squashed=True))
    given = {"": np.array([[3.0]], np.float32)}
    assert plain.action_spec.parts[0].kind == "continuous"
    assert plain.adapter().batch(given).tolist() == [[3.0]]
    assert squashed.action_spec.parts[0].kind == "squashed"
    assert squashed.adapter().batch(given)[0, 0] == pytest.approx(5 + 5 * np.tanh(3.0))


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
        (flags(4), Discrete(3), "it has shape (4,), and there are 3 actions"),
        (flags(3, dtype=np.float32), Discrete(3), "but of float32"),
        (MultiDiscrete([2, 2, 2]), Discrete(3), "but of categories"),
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
        (Dict(a=BOX, legal=flags(4)), Discrete(3), ["shape (3,)", "shape (4,)"]),
        (Dict(a=BOX, legal=flags(2)), MultiDiscrete([2, 3]), ["shape (5,)", "shape (2,)"]),
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
        "env.action_mask_key: 'legal' can mask nothing, there are no discrete actions: drop it"
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
