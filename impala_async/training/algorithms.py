"""The algorithms: what loss each has, what it reports, and the target network that APPO wants.

One of ours is a loss in `algo/`, a maker in the table here, and its keys in `config/algorithm.py`.
A user's own is named `algorithm.name = "package.module:Name"`; docs/models.md says more. Its loss
and its stats are looked at each time, so that what is wrong is told by its name.

    B columns of a batch, T action rows, S = T+1 observation rows
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impala_async.algo.gae import gae
from impala_async.algo.losses import LossTerms, appo_loss, impact_ratios, impala_loss, ppo_loss
from impala_async.algo.vtrace import Returns, clamped_exp, vtrace
from impala_async.config.algorithm import AlgorithmSection
from impala_async.errors import ConfigError
from impala_async.metrics.names import OWN_PREFIX, is_of_update
from impala_async.models.actor_critic import ActorCritic
from impala_async.policy import Evaluation, Policy
from impala_async.training.batch import only_read
from impala_async.training.checkpoint import check_alike, count_in, entry
from impala_async.training.intrinsic import Intrinsic
from impala_async.user_code import UserCode, import_callable

KEY = "algorithm.name"
SumUp = Callable[[Tensor], Tensor] | None
KL_GROWTH, KL_SHRINKAGE = 1.5, 0.5
# Adapting ends there. From 0 and from infinity there would be no way back.
MIN_KL_COEFF, MAX_KL_COEFF = 1e-6, 1e6


class View(NamedTuple):
    """A batch, or a part of it, as the weights of now see it: the inputs of a loss, time-major.
    Masked rows may hold anything, NaN included."""

    evaluation: Evaluation
    behaviour_log_probs_TB: Tensor
    rewards_TB: Tensor
    discounts_TB: Tensor
    mask_TB: Tensor
    num_valid: Tensor
    target: Evaluation | None = None
    """The target network's, without gradient, where there is one."""
    kl_coeff: float = 0.0
    """The current weight of the KL from it."""
    before_log_probs_TB: Tensor | None = None
    """Those of the actions by the policy from before the batch, where an algorithm wants them. None
    in a single pass, which begins with that policy."""
    intrinsic: Intrinsic | None = None
    """A reward of the user's own, which `rewards_TB` hold already, where there is one."""
    known: Returns | None = None
    """The returns of these rows, where they were computed before."""

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments that every loss takes."""
        known = {} if self.known is None else {"known": self.known}
        return known | {
            "log_probs_TB": self.evaluation.log_probs_TB,
            "behaviour_log_probs_TB": self.behaviour_log_probs_TB,
            "entropies_TB": self.evaluation.entropies_TB,
            "values_SB": self.evaluation.values_SB,
            "rewards_TB": self.rewards_TB,
            "discounts_TB": self.discounts_TB,
            "mask_TB": self.mask_TB,
            "num_valid": self.num_valid,
        }

    def mean(self, numbers_TB: Tensor) -> Tensor:
        """Over valid rows."""
        valid_TB = torch.where(self.mask_TB, numbers_TB.detach().float(), 0.0)
        return valid_TB.sum() / self.num_valid.clamp(min=1)


class Algorithm(NamedTuple):
    """The functions by which an update step learns."""

    loss: Callable[[View, float], LossTerms]
    """Computes the loss from the view of the current weights and from the current entropy cost."""
    stats: Callable[[View], dict[str, Tensor]] = lambda _: {}
    """Numbers to report: those of an update in docs/metrics.md, or your own as user/NAME."""
    has_target: bool = False
    """Whether there is a target network. Its `stats` then have `policy/kl`, the KL from it."""
    wants_before_log_probs: bool = False
    """Whether it makes use of `view.before_log_probs_TB`."""


def _impala(section: AlgorithmSection, sum_up: SumUp) -> Algorithm:
    settings = _settings(section, sum_up, "rho_bar", "c_bar", "pg_rho_bar")
    return Algorithm(lambda view, cost: impala_loss(**view.inputs, entropy_cost=cost, **settings))


def _appo(section: AlgorithmSection, sum_up: SumUp) -> Algorithm:
    settings = _settings(section, sum_up, "rho_bar", "c_bar", "pg_rho_bar", "clip", "is_clip")

    def loss(view: View, entropy_cost: float) -> LossTerms:
        return appo_loss(
            **view.inputs,
            target_log_probs_TB=_target(view).log_probs_TB,
            kl_TB=_kl(view) if section.kl_coeff else None,
            kl_coeff=view.kl_coeff,
            entropy_cost=entropy_cost,
            **settings,
        )

    def stats(view: View) -> dict[str, Tensor]:
        log_probs_TB, mu_TB = view.evaluation.log_probs_TB, view.behaviour_log_probs_TB
        ratios_TB = impact_ratios(log_probs_TB, mu_TB, _target(view).log_probs_TB, section.is_clip)
        return {
            "policy/kl": view.mean(_kl(view)),
            "policy/clip_fraction": view.mean((ratios_TB - 1).abs() > section.clip),
        }

    return Algorithm(loss, stats, has_target=True)


def _ppo(section: AlgorithmSection, sum_up: SumUp) -> Algorithm:
    settings = _settings(section, sum_up, "rho_bar", "c_bar", "clip")
    settings["returns"] = section.returns_kind

    def stats(view: View) -> dict[str, Tensor]:
        log_ratios_TB = view.evaluation.log_probs_TB.detach() - view.behaviour_log_probs_TB
        ratios_TB = clamped_exp(log_ratios_TB)
        return {
            # From the actions taken alone, and never below 0: E[r - 1 - log r] = KL(mu || pi).
            "policy/kl": view.mean(ratios_TB - 1 - log_ratios_TB),
            "policy/clip_fraction": view.mean((ratios_TB - 1).abs() > section.clip),
        }

    def loss(view: View, entropy_cost: float) -> LossTerms:
        return ppo_loss(
            **view.inputs,
            before_log_probs_TB=view.before_log_probs_TB,
            entropy_cost=entropy_cost,
            **settings,
        )

    return Algorithm(loss, stats, wants_before_log_probs=section.looks_before)


def _a2c(section: AlgorithmSection, sum_up: SumUp) -> Algorithm:
    settings = _settings(section, sum_up) | {"clip": None}
    return Algorithm(lambda view, cost: ppo_loss(**view.inputs, entropy_cost=cost, **settings))


def _settings(section: AlgorithmSection, sum_up: SumUp, *keys: str) -> dict[str, Any]:
    """The arguments of a loss besides the rows: those that all have, and these settings."""
    return {
        "value_cost": section.value_cost,
        "reduction": section.reduction,
        "normalize_advantages": section.has_normal_advantages and (sum_up or True),
        "lambda_": section.trace_decay,
        **{key: getattr(section, key) for key in keys},
    }


def returns_of(view: View, section: AlgorithmSection) -> Returns:
    """Those that the section's loss, which is one of ours, computes where none are known."""
    rows: dict[str, Any] = {
        "rewards_TB": view.rewards_TB,
        "discounts_TB": view.discounts_TB,
        "values_SB": view.evaluation.values_SB,
        "mask_TB": view.mask_TB,
        "lambda_": section.trace_decay,
    }
    if section.returns_kind == "gae":
        return gae(**rows)
    if section.name == "appo":
        towards_TB = _target(view).log_probs_TB
    elif view.before_log_probs_TB is not None:
        towards_TB = view.before_log_probs_TB
    else:
        towards_TB = view.evaluation.log_probs_TB
    bars = {key: getattr(section, key) for key in ("rho_bar", "c_bar", "pg_rho_bar")}
    log_rhos_TB = towards_TB.detach() - view.behaviour_log_probs_TB
    return vtrace(**rows, **bars, log_rhos_TB=log_rhos_TB, has_pg_ratio=section.name != "ppo")


def _target(view: View) -> Evaluation:
    assert view.target is not None, "appo has a target network"
    return view.target


def _kl(view: View) -> Tensor:
    """[T, B]"""
    return _target(view).joint_BT.kl(view.evaluation.joint_BT).t()


class Target:
    """The target network of APPO (IMPACT), and the weight of the KL from it."""

    def __init__(self, policy: Policy, section: AlgorithmSection) -> None:
        self.model = policy.copy_model()
        self.kl_coeff = section.kl_coeff
        self._section = section
        # The settings that, with the course of the run, determine the coefficient.
        self._kl_settings = [section.kl_coeff, section.kl_target]
        self._age = 0
        self._kl = 0.0
        self._has_moved = False

    def note_update(self, live: ActorCritic, kl: float) -> None:
        """An update is taken, at a mean KL from the target before it of `kl`."""
        # One that is not finite has no place in a checkpoint; what cannot be told is too far apart.
        self._age, self._kl = self._age + 1, kl if math.isfinite(kl) else MAX_KL_COEFF
        every = self._section.target_update_every_updates
        if every is not None and self._age >= every:
            self._move(live)
            self._has_moved = True

    def begin_batch(self, live: ActorCritic) -> None:
        if self._section.target_update_every_updates is None and self._age:
            self._move(live)

    @torch.no_grad()
    def _move(self, live: ActorCritic) -> None:
        self._age = 0
        # By the last KL: right behind a move the two are equal, and a KL would only ever lower it.
        self.kl_coeff = adapted(self.kl_coeff, self._kl, self._section.kl_target)
        for weight, goal in zip(self.model.parameters(), live.parameters(), strict=True):
            weight.lerp_(goal, self._section.tau)
        self._take_statistics(live)

    def end_batch(self, live: ActorCritic) -> None:
        """Follow the statistics of observations that the batch has changed, if it has moved."""
        if self._has_moved:
            self._has_moved = False
            self._take_statistics(live)

    def _take_statistics(self, live: ActorCritic) -> None:
        """They are no weights: the newest are the best."""
        for statistic, newest in zip(self.model.buffers(), live.buffers(), strict=True):
            statistic.copy_(newest)

    def state(self) -> dict[str, Any]:
        numbers = {"kl_coeff": self.kl_coeff, "kl": self._kl, "age": self._age}
        return {**numbers, "kl_settings": self._kl_settings}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; where the settings of the KL have changed, they hold."""
        check_alike(tensors, self.model.state_dict())
        self.model.load_state_dict(dict(tensors))
        if entry(state, "kl_settings", list) == self._kl_settings:
            self.kl_coeff = float(entry(state, "kl_coeff", float))
        self._age, self._kl = count_in(state, "age"), float(entry(state, "kl", float))


def adapted(kl_coeff: float, kl: float, kl_target: float | None) -> float:
    """Larger where the policies are too far apart, smaller where they need not be so near."""
    # One that was set outside of the range of adapting is not brought into it against its way.
    if kl_target is None:
        return kl_coeff
    if kl > 2 * kl_target:
        return max(kl_coeff, min(kl_coeff * KL_GROWTH, MAX_KL_COEFF))
    if kl < 0.5 * kl_target:
        return min(kl_coeff, max(kl_coeff * KL_SHRINKAGE, MIN_KL_COEFF))
    return kl_coeff


MAKERS: dict[str, Callable[[AlgorithmSection, SumUp], Algorithm]] = {
    "impala": _impala,
    "appo": _appo,
    "ppo": _ppo,
    "a2c": _a2c,
}


def make_algorithm(section: AlgorithmSection, sum_up: SumUp = None) -> Algorithm:
    """The one that the section names; raises ConfigError where a user's own cannot be made. Where
    other ranks have rows of the same batch, `sum_up` adds what is theirs."""
    name = section.name
    if name in MAKERS:
        return MAKERS[name](section, sum_up)
    make = import_callable(f"{KEY}: {name}", name)
    with UserCode(f"{KEY}: {name}", "when it was made"):
        made = make(section)
    if not isinstance(made, Algorithm):
        raise _wrong(name, f"must make {Algorithm.__module__}.Algorithm, not {_kind(made)}")

    def loss(view: View, entropy_cost: float) -> LossTerms:
        terms = _call(name, "in its loss", made.loss, view, entropy_cost)
        return _checked(name, terms, view)

    def stats(view: View) -> dict[str, Tensor]:
        found: dict[str, Tensor] = _call(name, "in its stats", made.stats, view)
        if not isinstance(found, dict):
            raise _wrong(name, f"must give stats as a dict, not {_kind(found)}")
        for stat, value in found.items():
            if not is_of_update(str(stat)) or not isinstance(value, Tensor) or value.dim():
                what = f"{stat!r} as a tensor without dimensions, as view.mean gives it"
                named = f"named as a metric of an update or like {OWN_PREFIX}name"
                raise _wrong(name, f"must report {what}, {named}")
        if made.has_target and "policy/kl" not in found:
            raise _wrong(name, "has a target network, so its stats must hold policy/kl")
        return found

    return made._replace(loss=loss, stats=stats)


def _checked(name: str, terms: object, view: View) -> LossTerms:
    if not isinstance(terms, LossTerms):
        raise _wrong(name, f"must give LossTerms as loss_terms does, not {_kind(terms)}")
    for field, term in terms._asdict().items():
        shape = list(view.mask_TB.shape) if field == "targets_TB" else []
        found = list(term.shape) if isinstance(term, Tensor) else _kind(term)
        if found != shape:
            raise _wrong(name, f"must give {field} as a tensor of shape {shape}, not {found}")
    if torch.is_grad_enabled() and not terms.total.requires_grad:
        raise _wrong(name, "has no gradient: its total must follow from view.evaluation")
    return terms


def _call(name: str, where: str, function: Callable[..., Any], view: View, *more: float) -> Any:
    """A mistake in a user's function is told by the name, as is a change to the batch's memory."""
    what, fields = f"{KEY}: {name}", view._asdict().items()
    kept = {f"view.{field}": value for field, value in fields if isinstance(value, Tensor)}
    with only_read(what, kept), UserCode(what, where):
        return function(view, *more)


def _wrong(name: str, what: str) -> ConfigError:
    return ConfigError(f"{KEY}: {name} {what}")


def _kind(value: object) -> str:
    return type(value).__name__
