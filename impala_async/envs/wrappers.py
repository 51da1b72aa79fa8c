"""What is put around single environments: the wrappers of `env.wrappers`, and Atari's own.

Atari is preprocessed as the papers do it (DQN, with the sticky actions of Machado et al., 2018):
84 x 84 grey, the last four frames stacked, each action for four frames of which the last two are
merged, up to 30 no-ops at the start, whole games, rewards as they are. The vector code of ale_py
does the same by itself.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from impala_async.config.env import Wrapper
from impala_async.envs.agents import is_parallel
from impala_async.envs.faults import Blame, close_all, env_name
from impala_async.envs.find import find_callable
from impala_async.errors import EnvError

# What ale_py's vector code would do of its own accord, and what would falsify reported returns.
ATARI_VECTOR = {"reward_clipping": False, "use_fire_reset": False}
ATARI = {
    "frameskip": 4,
    "noop_max": 30,
    "img_height": 84,
    "img_width": 84,
    "grayscale": True,
    "stack_num": 4,
}


def wrap(env: Any, wrappers: Iterable[Wrapper]) -> Any:
    """An environment in its wrappers, the first one innermost; it is closed when one fails."""
    for wrapper in wrappers:
        given = f" with kwargs {wrapper.kwargs}" if wrapper.kwargs else ""
        try:
            entry = find_callable(wrapper.name)
            with Blame(f"env.wrappers: {wrapper.name}", f"to wrap {env_name(env)}{given}"):
                wrapped = entry(env, **wrapper.kwargs)
            if not isinstance(wrapped, gym.Env) and not is_parallel(wrapped):
                raise EnvError(
                    f"env.wrappers: {wrapper.name} made a {type(wrapped).__name__}, which is no "
                    "gymnasium.Env"
                )
        except EnvError:
            close_all([env])
            raise
        env = wrapped
    return env


def is_atari(spec: EnvSpec | None) -> bool:
    return spec is not None and spec.entry_point == "ale_py.env:AtariEnv"


def make_atari(gym_id: str, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    """A single Atari game, preprocessed; kwargs as those of ale_py's vector code."""
    if find_spec("cv2") is None:
        raise EnvError(
            f"{gym_id}: single Atari environments need OpenCV: pip install 'impala-async[atari]', "
            "or set actor.sampler to vector"
        )
    look = {key: kwargs.get(key, value) for key, value in ATARI.items()}
    rest = {key: value for key, value in kwargs.items() if key not in ATARI}
    game = gym.make(gym_id, **{"disable_env_checker": True, **rest, "frameskip": 1})
    screen = AtariPreprocessing(
        game,
        noop_max=look["noop_max"],
        frame_skip=look["frameskip"],
        screen_size=(look["img_width"], look["img_height"]),
        grayscale_obs=look["grayscale"],
    )
    return FrameStackObservation(screen, look["stack_num"], padding_type="zero")
