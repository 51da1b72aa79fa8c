"""The knobs of learning: the loss, its coefficients, what becomes of rewards, the optimizer."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from impala_async.config.section import Section, unknown_name

ReturnsName = Literal["vtrace", "gae"]
ALGORITHMS: dict[str, tuple[ReturnsName, ...]] = {
    "impala": ("vtrace",),
    "appo": ("vtrace",),
    "ppo": ("gae", "vtrace"),
    "a2c": ("gae",),
}
"""Each with the returns that it may have, the default first."""
ALGORITHM_KEYS = {
    ("algorithm.returns_kind", "vtrace"): "algorithm.rho_bar algorithm.c_bar",
    ("algorithm.name", "impala", "appo"): "algorithm.pg_rho_bar",
    ("algorithm.name", "appo", "ppo"): "algorithm.clip learner.stop_kl",
    ("algorithm.name", "appo"): "algorithm.is_clip algorithm.tau algorithm.kl_coeff "
    "algorithm.target_update_every_updates",
    ("algorithm.kl_coeff",): "algorithm.kl_target",
    ("algorithm.grad_clip",): "algorithm.grad_clip_by",
    ("algorithm.optimizer", "rmsprop", "rmsprop_tf"): "algorithm.optimizer_options.decay "
    "algorithm.optimizer_options.momentum",
    ("algorithm.optimizer", "adamw"): "algorithm.optimizer_options.weight_decay",
}
"""The rows of `ONLY_WHERE` in config/run.py that are about this section."""


def _check_clip(value: Any) -> Any:
    is_bound = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if not is_bound and value not in (None, "unit", "soft_asymmetric"):
        raise ValueError  # without words: it is told as any value of a wrong type is
    return value


RewardClip = Annotated[
    Annotated[float, Field(gt=0)] | Literal["unit", "soft_asymmetric"] | None,
    BeforeValidator(_check_clip),
]


class OptimizerOptions(Section):
    """The optimizer's own coefficients."""

    eps: float | None = Field(None, gt=0)
    """none: 0.1 for rmsprop_tf, 1e-5 for the others."""
    decay: float = Field(0.99, ge=0, lt=1)
    """rmsprop: decay of the mean square."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """rmsprop: momentum."""
    weight_decay: float = Field(0.01, ge=0, le=1e30)
    """adamw: decoupled weight decay."""


class AlgorithmSection(Section):
    """The loss, its coefficients and the optimizer."""

    name: str = "ppo"
    """ppo, impala, appo (which is IMPACT), a2c, or your own as package.module:Name."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per step."""
    lr: float = Field(1e-3, gt=0, le=1e30)
    """Learning rate at the start."""
    lr_end: float | None = Field(1e-5, ge=0, le=1e30)
    """Rate at the schedule's end; none: flat. This one is flat in a run without an end, too."""
    entropy_cost: float | None = Field(None, ge=0)
    """Weight of the entropy bonus; none: 0.01 where actions have choices, or the bonus an end, else
    0."""
    entropy_cost_end: float | None = Field(None, ge=0)
    """Weight at the schedule's end; none: flat."""
    schedule_env_steps: int | None = Field(None, gt=0)
    """Env steps trained at which the schedules reach their end; none: stop.env_steps."""
    value_cost: float = Field(0.5, ge=0)
    """Weight of half the squared value error: twice `vf_coef` of Stable-Baselines3, or
    `vf_loss_coeff` of RLlib, which weigh the whole."""
    grad_clip: float | None = Field(0.5, gt=0)
    """Largest global gradient norm, or largest entry of a gradient."""
    grad_clip_by: Literal["norm", "value"] = "norm"
    """norm: what is larger is scaled down as a whole. value: each entry is clipped."""
    returns: ReturnsName | None = None
    """ppo has gae or vtrace. none: gae for ppo and a2c, vtrace for the others."""
    rho_bar: float | None = Field(1.0, gt=0)
    """V-trace bar on the TD weights."""
    c_bar: float | None = Field(1.0, gt=0)
    """V-trace bar on the trace weights."""
    pg_rho_bar: float | None = Field(1.0, gt=0)
    """V-trace bar in the policy gradient."""
    lambda_: float | None = Field(None, ge=0, le=1, alias="lambda")
    """Trace decay; none: 0.95 in ppo, appo and a2c and with returns by GAE, else 1."""
    normalize_advantages: bool | None = None
    """Give advantages mean 0 and deviation 1; none: in ppo, appo and a2c, else not."""
    clip: float = Field(0.2, gt=0)
    """ppo, appo: how far from 1 a ratio of policies is followed."""
    num_minibatches: int = Field(1, ge=1)
    """Parts of a batch, of whole columns if shuffle_rows does not say otherwise; each is an update.
    Not set: of about 64 rows, in a2c 256, or of more if there would be too many."""
    shuffle_rows: bool = False
    """Several parts have rows of any columns, at random, masked ones too, and not whole columns, as
    rows of one trajectory are alike. Returns are then computed once a pass. Not for a model with a
    core."""
    is_clip: float = Field(2.0, gt=0)
    """appo: bar on the ratio of the acting to the target policy."""
    tau: float = Field(1.0, gt=0, le=1)
    """appo: how far the target network moves to the current one."""
    target_update_every_updates: int | None = Field(None, ge=1)
    """appo: updates from one move of the target network to the next, where each part of a pass is
    one, in lockstep too; none: it moves when a new batch is begun."""
    kl_coeff: float = Field(0.0, ge=0)
    """appo: weight at the start of the KL from the target; 0: without."""
    kl_target: float | None = Field(0.01, gt=0)
    """appo: KL towards which kl_coeff is adapted, from 1e-6 to 1e6; none: it stays."""
    reward_clip: RewardClip = None
    """Rewards in the loss, never in reported returns: at most this far from 0, for unit 1; or 0.3
    min(tanh r, 0) + 5 max(tanh r, 0); none: as they are."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this (after reward_clip) in the loss, never in reported returns."""
    normalize_returns: bool = True
    """Divide rewards in the loss by the running deviation of the returns; by 0.01 and a tenth of
    their mean at least: make tiny rewards larger with reward_scale."""
    intrinsic_reward: str | None = None
    """Your own, as package.module:Name: added to rewards in the loss, after reward_clip, and never
    to reported returns."""
    reduction: Literal["mean", "sum"] = "mean"
    """Mean over valid rows, or the sum that the IMPALA paper uses."""
    optimizer: Literal["adam", "adamw", "rmsprop", "rmsprop_tf"] = "adam"
    """rmsprop is torch's; rmsprop_tf is TF1's, as the IMPALA paper has it."""
    optimizer_options: OptimizerOptions = OptimizerOptions()
    """The optimizer's own coefficients."""

    @property
    def _may_return(self) -> tuple[ReturnsName, ...]:
        return ALGORITHMS.get(self.name, get_args(ReturnsName))

    @property
    def returns_kind(self) -> ReturnsName:
        return self.returns or self._may_return[0]

    @property
    def may_use_vtrace(self) -> bool:
        """Whether the loss can correct for the policy that acted."""
        return "vtrace" in self._may_return

    def entropy_cost_of(self, num_choices: int) -> float:
        """Its weight at the start, for actions of so many choices."""
        # It holds deviations up: by GAE Walker2d came to 2,295 with it and to 3,421 without.
        usual = 0.01 if num_choices or self.entropy_cost_end is not None else 0.0
        return usual if self.entropy_cost is None else self.entropy_cost

    @property
    def has_schedule(self) -> bool:
        return self.lr_end is not None or self.entropy_cost_end is not None

    @property
    def wants_horizon(self) -> bool:
        """Whether a schedule was asked for. The usual one is left out in a run without an end."""
        usual = (None, AlgorithmSection.model_fields["lr_end"].default)
        return self.lr_end not in usual or self.entropy_cost_end is not None

    @property
    def has_current_target(self) -> bool:
        """Whether the target network is the current one after each update, whatever the passes."""
        return self.tau == 1 and self.target_update_every_updates == 1

    @property
    def has_clip(self) -> bool:
        """Whether a clip of the ratio of policies bounds what several passes can do."""
        return self.name not in ("impala", "a2c")

    @property
    def usual_passes(self) -> int:
        """How often a batch is used where nobody says it: a clip bounds what several passes do."""
        return 8 if self.name in ("ppo", "appo") else 1

    @property
    def usual_part_rows(self) -> int:
        """The rows of a minibatch, about, where nobody says how many minibatches there are."""
        # A2C neither bounds a step nor corrects for those before it.
        return 256 if self.name == "a2c" else 64

    @property
    def _is_like_ppo(self) -> bool:
        return self.name in ("ppo", "appo", "a2c")

    @property
    def trace_decay(self) -> float:
        usual = 0.95 if self._is_like_ppo or self.returns_kind == "gae" else 1.0
        return usual if self.lambda_ is None else self.lambda_

    @property
    def has_normal_advantages(self) -> bool:
        choice = self.normalize_advantages
        return self._is_like_ppo if choice is None else choice

    def looks_at_whole(self, most_passes: int) -> bool:
        """Whether the network is asked about a whole batch, before or beside its parts."""
        is_dealt = self.shuffle_rows and self.num_minibatches > 1
        return self.normalize_returns or is_dealt or (self.looks_before and most_passes > 1)

    @property
    def looks_before(self) -> bool:
        """Whether passes correct by the policy as it was before the first of them."""
        return self.name == "ppo" and self.returns_kind == "vtrace"

    @property
    def epsilon(self) -> float:
        usual, choice = 0.1 if self.optimizer == "rmsprop_tf" else 1e-5, self.optimizer_options.eps
        return usual if choice is None else choice

    def broken_rules(self) -> Iterator[str]:
        yield from unknown_name("name", self.name, ALGORITHMS)
        if self.intrinsic_reward is not None:
            yield from unknown_name("intrinsic_reward", self.intrinsic_reward)
        if self.returns_kind not in self._may_return:
            fix = next(name for name, kinds in ALGORITHMS.items() if self.returns_kind in kinds)
            yield (
                f"returns ({self.returns}) do not go with name ({self.name}), whose returns are "
                f"{self._may_return[0]}: drop it, or set name = {fix}"
            )
        if self.schedule_env_steps is not None and not self.has_schedule:
            yield "schedule_env_steps does nothing without lr_end or entropy_cost_end: set one"
        if self.shuffle_rows and (self.name not in ALGORITHMS or self.intrinsic_reward):
            own = self.intrinsic_reward or self.name
            yield f"shuffle_rows does not go with {own}, which wants whole columns: drop it"
        if self.reward_scale == 0:
            yield f"reward_scale wants a number that is not 0, got {self.reward_scale}"
        if self.kl_coeff > 0 and self.has_current_target:
            yield (
                f"kl_coeff ({self.kl_coeff}) does nothing while target_update_every_updates is 1 "
                "and tau is 1, where the target network is always the current one: raise the "
                "former or lower tau"
            )
