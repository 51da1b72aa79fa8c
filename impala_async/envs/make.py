"""Environments by name: one in its wrappers, or the batch that a sampler steps.

Atari is preprocessed as the papers do it (DQN, with the sticky actions of Machado et al., 2018).
The vector code of ale_py does the same by itself.
"""

import logging
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import gymnasium as gym
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit

from impala_async.config.actor import SamplerName
from impala_async.config.env import EnvSection
from impala_async.config.policies import ONE_POLICY, PoliciesSection
from impala_async.config.section import Named
from impala_async.envs.agents import AgentEnvs, is_parallel
from impala_async.envs.batch import EnvBatch
from impala_async.envs.faults import Blame, close_all, env_name
from impala_async.envs.find import Factory, find_callable, find_env, makes_vectors, registered
from impala_async.envs.spares import ResetAhead
from impala_async.envs.vector import SerialEnvs, VectorEnvs, WithHistory
from impala_async.errors import EnvError
from impala_async.processes import signals_kept

logger = logging.getLogger(__name__)

KINDS: tuple[tuple[str, Callable[[Any], bool], Callable[..., EnvBatch]], ...] = (
    ("gymnasium.Env", lambda env: isinstance(env, gym.Env), SerialEnvs),
    ("parallel environment of PettingZoo", is_parallel, AgentEnvs),
)
"""Single environments: what each kind is called, how it is told, and the batch that steps it."""
# ale_py's vector code would do these by default, and they would falsify reported returns.
ATARI_VECTOR = {"reward_clipping": False, "use_fire_reset": False}
ATARI = {
    "frameskip": 4,
    "noop_max": 30,
    "img_height": 84,
    "img_width": 84,
    "grayscale": True,
    "stack_num": 4,
}


def build_envs(
    sampler: SamplerName,
    section: EnvSection,
    num_envs: int,
    policies: PoliciesSection = ONE_POLICY,
    *,
    has_spares: bool = True,
) -> EnvBatch:
    """The batch of environments that a sampler steps.

    auto: the environment's own vector code where it can be used, else single ones in turn.
    Samplers with workers: what each of those steps, which is single ones where there are any.
    Without spares: for a look at its spaces, or for an evaluation, which may wait for resets.
    """
    if sampler == "auto":
        return build_usual(section, num_envs, policies, has_spares=has_spares)[1]
    is_vector = sampler == "vector" or (sampler != "serial" and makes_vectors(find_env(section.id)))
    return _build(section, num_envs, policies, is_vector=is_vector, has_spares=has_spares)


def build_usual(
    section: EnvSection,
    num_envs: int,
    policies: PoliciesSection = ONE_POLICY,
    *,
    has_spares: bool = True,
) -> tuple[Literal["serial", "vector"], EnvBatch]:
    """Build what `auto` takes where nothing is measured; return its name and the environments."""
    build = partial(_build, section, num_envs, policies, has_spares=has_spares)
    if _why_no_vector(section) is not None:
        return "serial", build(is_vector=False)
    try:
        return "vector", build(is_vector=True)
    except EnvError as error:
        if makes_vectors(find_env(section.id)):
            raise
        serial = build(is_vector=False)
        logger.warning("%s is stepped serially, its vector code cannot be used: %s",
                       section.id, error)  # fmt: skip
        return "serial", serial


def build_drawn(
    section: EnvSection, policies: PoliciesSection = ONE_POLICY
) -> tuple[EnvBatch, Any]:
    """One single environment that can draw itself, and the batch that steps it."""
    kwargs, made = {**section.kwargs, "render_mode": "rgb_array"}, list[Any]()
    section = section.model_copy(update={"kwargs": kwargs})
    with warnings.catch_warnings():
        # One that does not know the mode is told of by what it gives instead of a picture.
        warnings.simplefilter("ignore", UserWarning)
        if makes_vectors(find_env(section.id)):
            raise EnvError(
                f"{section.id} makes a whole vector of environments: one cannot be drawn"
            )
        envs = _build(section, 1, policies, is_vector=False, has_spares=False, made=made)
    return envs, made[0]


@signals_kept()
def _build(
    section: EnvSection,
    num_envs: int,
    policies: PoliciesSection,
    *,
    is_vector: bool,
    has_spares: bool,
    made: list[Any] | None = None,
) -> EnvBatch:
    """`made` takes the environments themselves, for whoever wants more than to step them."""
    made = [] if made is None else made
    build: Callable[..., EnvBatch] = VectorEnvs
    num_spares = section.num_spares if has_spares and not is_vector else 0
    if section.kwargs.get("life_loss_info") and is_atari(find_env(section.id)):
        # The game goes on behind such an end, and its next step would be taken for a reset.
        raise EnvError(
            f"{section.id}: env.kwargs.life_loss_info ends an episode that goes on: use "
            "episodic_life, which ends it with a life"
        )
    try:
        if is_vector:
            made.append(_make_vector_env(section, num_envs))
        else:
            made.extend(make_env(section) for _ in range(num_envs * (1 + num_spares)))
            build = batch_of(made[0], section.id)
            _check_singles(made, section)
        stepped = made
        if num_spares:
            stepped = [ResetAhead(made[place::num_envs]) for place in range(num_envs)]
        if policies.names:
            if build is not AgentEnvs:
                raise EnvError(
                    f"policies.names: {section.id} has a single agent, and only the agents of a "
                    "parallel environment of PettingZoo can have several: drop the section policies"
                )
            build = partial(build, policies=policies)
        is_ours = section.preprocess == "auto" and not section.wrappers
        if section.frame_stack == "auto" and is_ours and is_atari(find_env(section.id)):
            section = section.model_copy(update={"frame_stack": "on"})
        envs = build(stepped[0] if is_vector else stepped, section)
        if section.last_action or section.last_reward:
            return WithHistory(envs, has_action=section.last_action, has_reward=section.last_reward)
        return envs
    except EnvError:
        with suppress(EnvError):  # what failed first is to be told
            close_all(made, section.id)
        raise


def _check_singles(made: list[Any], section: EnvSection) -> None:
    with Blame(section.id, "to say what it wraps"):
        innermost = {id(getattr(env, "unwrapped", env)) for env in made}
    if len(innermost) < len(made):
        raise EnvError(f"{section.id} made one environment twice: wants a new one each time")
    if not section.num_spares:
        return
    if not isinstance(made[0], gym.Env):
        raise EnvError(f"env.num_spares: {section.id} is no gymnasium.Env, which alone has spares")
    with Blame(section.id, "to say what its spaces are"):
        are_alike = all(env.action_space == made[0].action_space for env in made)
    if not are_alike:
        raise EnvError(f"{section.id}: a spare environment has another action space")


def make_env(section: EnvSection) -> Any:
    """One environment in its wrappers, of one of the `KINDS`; EnvError says why there is none."""
    if makes_vectors(find_env(section.id)):
        raise EnvError(
            f"{section.id} makes a whole vector of environments, and cannot be stepped serially, "
            "nor have env.wrappers or env.num_spares: drop these, and set actor.sampler to vector "
            "or auto"
        )
    found = find_env(section.id)
    with Blame(section.id, f"to be made{_with(section.kwargs)}"):
        if callable(found):
            env = found(**section.kwargs)
        elif section.preprocess == "auto" and is_atari(found):
            env = _make_atari(found, section.kwargs)
        else:
            # The checker wraps every step for good, and what it would find is checked here anyway.
            env = gym.make(found, **{"disable_env_checker": True, **section.kwargs})
    batch_of(env, section.id)
    return wrap(env, section.wrappers)


def wrap(env: Any, wrappers: Iterable[Named]) -> Any:
    """An environment in its wrappers, the first one innermost; it is closed when one fails."""
    for wrapper in wrappers:
        whose = f"env.wrappers: {wrapper.name}"
        try:
            entry = find_callable("env.wrappers", wrapper.name)
            with Blame(whose, f"to wrap {env_name(env)}{_with(wrapper.kwargs)}"):
                wrapped = entry(env, **wrapper.kwargs)
            batch_of(wrapped, whose)
        except EnvError:
            with suppress(EnvError):
                close_all([env])
            raise
        env = wrapped
    return env


def batch_of(env: Any, whose: str) -> Callable[..., EnvBatch]:
    """The batch that steps such environments; EnvError for what is none, and `whose` it is."""
    for _, fits, batch in KINDS:
        if fits(env):
            return batch
    nots = " and ".join(f"no {what}" for what, *_ in KINDS)
    raise EnvError(f"{whose} made a {type(env).__name__}, which is {nots}")


def is_atari(found: str | Factory) -> bool:
    spec = registered(found) if isinstance(found, str) else None
    return spec is not None and spec.entry_point == "ale_py.env:AtariEnv"


def _make_atari(gym_id: str, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    if find_spec("cv2") is None:
        raise EnvError(
            f"{gym_id}: single Atari environments need OpenCV: pip install 'impala-async[atari]', "
            "or set actor.sampler to vector"
        )
    look = {key: kwargs.get(key, value) for key, value in ATARI.items()}
    rest = {key: value for key, value in kwargs.items() if key not in ATARI}
    limit = None
    if rest.get("max_episode_steps") != -1:
        # gymnasium would count the frames, with the no-ops, and not the steps.
        limit = rest.pop("max_episode_steps", None)
    screen = AtariPreprocessing(
        gym.make(gym_id, **{"disable_env_checker": True, **rest, "frameskip": 1}),
        noop_max=look["noop_max"],
        frame_skip=look["frameskip"],
        screen_size=(look["img_width"], look["img_height"]),
        grayscale_obs=look["grayscale"],
    )
    stacked = FrameStackObservation(screen, look["stack_num"], padding_type="zero")
    return stacked if limit is None else TimeLimit(stacked, limit)


def _make_vector_env(section: EnvSection, num_envs: int) -> VectorEnv[Any, Any, Any]:
    why_not = _why_no_vector(section)
    if why_not is not None:
        is_vector = makes_vectors(find_env(section.id))
        fix = "drop these" if is_vector else "set actor.sampler to serial or auto"
        raise EnvError(f"{section.id} {why_not}: {fix}")
    found = find_env(section.id)
    kwargs = {"num_envs": num_envs, **section.kwargs}
    with Blame(section.id, f"to be made{_with(section.kwargs)}"), warnings.catch_warnings():
        if callable(found):
            env = found(**kwargs)
        else:
            if is_atari(found):
                kwargs = ATARI_VECTOR | kwargs
            # Missing metadata: `VectorEnvs` refuses it, and says how to mend it.
            warnings.filterwarnings("ignore", "(?s).*AutoresetMode", UserWarning)
            env = gym.make_vec(found, vectorization_mode="vector_entry_point", **kwargs)
    # One that forgets to say how many there are has no such number.
    if not isinstance(env, VectorEnv) or getattr(env, "num_envs", None) != num_envs:
        with suppress(EnvError):
            close_all([env], section.id)
        made = f"{type(env).__name__} of {getattr(env, 'num_envs', 'no number of')} environments"
        raise EnvError(
            f"{section.id} made a {made}, and must make a gymnasium.vector.VectorEnv of {num_envs}"
        )
    return env


def _why_no_vector(section: EnvSection) -> str | None:
    found = find_env(section.id)
    if section.wrappers:
        return "has env.wrappers, which go around single environments"
    if section.num_spares:
        return "has env.num_spares, which are single environments"
    if callable(found):
        return None if makes_vectors(found) else "makes single environments"
    spec = registered(found)
    if spec is None or spec.vector_entry_point is None:
        return "has no vector code of its own (no vector_entry_point)"
    if section.kwargs.get("max_episode_steps") == -1:
        return "has max_episode_steps = -1 for none, as gymnasium.make alone understands it"
    if is_atari(found) and "max_episode_steps" in section.kwargs:
        return "has vector code that counts frames alone, and env.kwargs has max_episode_steps"
    if section.kwargs.get("render_mode") == "human":
        return "has vector code that shows nothing, and env.kwargs.render_mode is human"
    if is_atari(found) and section.preprocess == "off":
        return "has vector code that preprocesses, and env.preprocess is off"
    return None


def _with(kwargs: dict[str, Any]) -> str:
    return f" with kwargs {kwargs}" if kwargs else ""
