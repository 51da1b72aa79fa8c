"""The algorithms: what loss each has, what it reports, and whether it wants a target network.

A user's own is named `algorithm.name = "package.module:Name"`. It is made from the `algorithm`
section, by a function that gives an `Algorithm`; docs/models.md says more. Its loss and its stats
are looked at each time, so that what is wrong is told by its name. One of ours is a loss in
`algo/`, a maker in the table here, and its keys in `config/algorithm.py`.

    B columns of a batch, T action rows, S = T+1 observation rows
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impala_async.algo.losses import a2c_loss, appo_loss, impact_ratios, impala_loss, ppo_loss
from impala_async.algo.terms import LossTerms
from impala_async.algo.vtrace import clamped_exp
from impala_async.config.algorithm import AlgorithmSection
from impala_async.errors import ConfigError
from impala_async.metrics.names import OWN_PREFIX, is_of_update
from impala_async.policy import Evaluation
from impala_async.training.target import TargetView
from impala_async.user_code import NamedInSetting, import_callable

KEY = "algorithm.name"


class Rows(NamedTuple):
    """The inputs of a loss besides the evaluation, as time-major views of a batch.

    Masked rows may hold anything, NaN included: a loss selects before it computes.
    """

    behaviour_log_probs_TB: Tensor
    rewards_TB: Tensor
    discounts_TB: Tensor
    mask_TB: Tensor
    num_valid: Tensor


class View(NamedTuple):
    """A batch, or a part of it, as the weights of now see it."""

    evaluation: Evaluation
    rows: Rows
    target: TargetView | None

    @property
    def values(self) -> dict[str, Any]:
        """The inputs from which returns of every kind are computed."""
        return {
            "rewards_TB": self.rows.rewards_TB,
            "discounts_TB": self.rows.discounts_TB,
            "values_SB": self.evaluation.values_SB,
            "mask_TB": self.rows.mask_TB,
        }

    @property
    def policy(self) -> dict[str, Any]:
        """The inputs that every loss needs besides `values`."""
        return {
            "log_probs_TB": self.evaluation.log_probs_TB,
            "entropies_TB": self.evaluation.entropies_TB,
            "num_valid": self.rows.num_valid,
        }

    @property
    def behaviour(self) -> dict[str, Any]:
        return {"behaviour_log_probs_TB": self.rows.behaviour_log_probs_TB}

    def log_ratios(self, log_probs_TB: Tensor) -> Tensor:
        """Return the log-ratios of these probabilities to those of the behaviour policy."""
        return log_probs_TB.detach() - self.rows.behaviour_log_probs_TB

    def mean(self, numbers_TB: Tensor) -> Tensor:
        """Over valid rows."""
        valid_TB = torch.where(self.rows.mask_TB, numbers_TB.detach().float(), 0.0)
        return valid_TB.sum() / self.rows.num_valid.clamp(min=1)


class Algorithm(NamedTuple):
    """The functions by which an update step learns.

    Their control flow may not depend on the values in a tensor.
    """

    loss: Callable[[View, Tensor | float], LossTerms]
    """Computes the loss from the view of the current weights and from the current entropy cost."""
    stats: Callable[[View], dict[str, Tensor]] = lambda _: {}
    """Numbers to report: those of an update in docs/metrics.md, or your own as user/NAME."""
    has_target: bool = False
    """Whether there is a target network. Its `stats` then have `policy/kl`, the KL from it."""


def _impala(section: AlgorithmSection) -> Algorithm:
    weights, bars = _weights(section), _bars(section)

    def loss(view: View, entropy_cost: Tensor | float) -> LossTerms:
        inputs = view.values | view.policy | view.behaviour
        return impala_loss(**inputs, entropy_cost=entropy_cost, **weights, **bars)

    return Algorithm(loss)


def _appo(section: AlgorithmSection) -> Algorithm:
    weights, bars = _weights(section), _bars(section)
    clip, is_clip = section.clip, section.is_clip

    def loss(view: View, entropy_cost: Tensor | float) -> LossTerms:
        target = _target(view)
        return appo_loss(
            **(view.values | view.policy | view.behaviour),
            target_log_probs_TB=target.evaluation.log_probs_TB,
            kl_TB=_kl(view, target) if target.kl_coeff else None,
            kl_coeff=target.kl_coeff,
            entropy_cost=entropy_cost,
            clip=clip,
            is_clip=is_clip,
            **weights,
            **bars,
        )

    def stats(view: View) -> dict[str, Tensor]:
        target, rows = _target(view), view.rows
        ratios_TB = impact_ratios(
            view.evaluation.log_probs_TB,
            rows.behaviour_log_probs_TB,
            target.evaluation.log_probs_TB,
            is_clip,
        )
        return {
            "policy/kl": view.mean(_kl(view, target)),
            "policy/clip_fraction": view.mean((ratios_TB - 1).abs() > clip),
        }

    return Algorithm(loss, stats, has_target=True)


def _ppo(section: AlgorithmSection) -> Algorithm:
    weights, kind, clip = _weights(section), section.returns_kind, section.clip
    settings: dict[str, Any] = {"rho_bar": section.rho_bar, "c_bar": section.c_bar}
    settings["lambda_"] = section.trace_decay

    def loss(view: View, entropy_cost: Tensor | float) -> LossTerms:
        return ppo_loss(
            **(view.values | view.policy | view.behaviour),
            entropy_cost=entropy_cost,
            returns=kind,
            clip=clip,
            **weights,
            **settings,
        )

    def stats(view: View) -> dict[str, Tensor]:
        log_ratios_TB = view.log_ratios(view.evaluation.log_probs_TB)
        ratios_TB = clamped_exp(log_ratios_TB)
        return {
            # From the actions taken alone, and never below 0: E[r - 1 - log r] = KL(mu || pi).
            "policy/kl": view.mean(ratios_TB - 1 - log_ratios_TB),
            "policy/clip_fraction": view.mean((ratios_TB - 1).abs() > clip),
        }

    return Algorithm(loss, stats)


def _a2c(section: AlgorithmSection) -> Algorithm:
    weights, decay = _weights(section), section.trace_decay

    def loss(view: View, entropy_cost: Tensor | float) -> LossTerms:
        inputs = view.values | view.policy
        return a2c_loss(**inputs, entropy_cost=entropy_cost, lambda_=decay, **weights)

    return Algorithm(loss)


def _weights(section: AlgorithmSection) -> dict[str, Any]:
    return {
        "value_cost": section.value_cost,
        "reduction": section.reduction,
        "normalize_advantages": section.has_normal_advantages,
    }


def _bars(section: AlgorithmSection) -> dict[str, Any]:
    return {
        "rho_bar": section.rho_bar,
        "c_bar": section.c_bar,
        "pg_rho_bar": section.pg_rho_bar,
        "lambda_": section.trace_decay,
    }


def _target(view: View) -> TargetView:
    assert view.target is not None, "appo has a target network"
    return view.target


def _kl(view: View, target: TargetView) -> Tensor:
    """[T, B]"""
    return target.evaluation.joint_BT.kl(view.evaluation.joint_BT).t()


MAKERS: dict[str, Callable[[AlgorithmSection], Algorithm]] = {
    "impala": _impala,
    "appo": _appo,
    "ppo": _ppo,
    "a2c": _a2c,
}


def make_algorithm(section: AlgorithmSection) -> Algorithm:
    """The one that the section names; raises ConfigError where a user's own cannot be made."""
    if is_own(section):
        return _make_own(section)
    return MAKERS[section.name](section)


def is_own(section: AlgorithmSection) -> bool:
    """Whether the section names an algorithm of the user's."""
    return section.name not in MAKERS


def _make_own(section: AlgorithmSection) -> Algorithm:
    """A user's, in which every mistake becomes a ConfigError."""
    name = section.name
    make = import_callable(f"{KEY}: {name}", name)
    with NamedInSetting(KEY, name, "when it was made"):
        made = make(section)
    if not isinstance(made, Algorithm):
        raise ConfigError(
            f"{KEY}: {name} must make an Algorithm of impala_async/training/algorithms.py, not "
            f"{type(made).__name__}"
        )

    def loss(view: View, entropy_cost: Tensor | float) -> LossTerms:
        before = _versions(view)
        with NamedInSetting(KEY, name, "in its loss"):
            terms = made.loss(view, entropy_cost)
        _check_terms(name, terms)
        _check_rows(name, view, before)
        return terms

    def stats(view: View) -> dict[str, Tensor]:
        before = _versions(view)
        with NamedInSetting(KEY, name, "in its stats"):
            stats = made.stats(view)
        _check_stats(name, stats, has_target=made.has_target)
        _check_rows(name, view, before)
        return stats

    return Algorithm(loss, stats, made.has_target)


def _versions(view: View) -> list[int]:
    """Return the version of each tensor in `rows`; every change in place increases it."""
    return [rows._version for rows in view.rows]


def _check_rows(name: str, view: View, before: list[int]) -> None:
    for field, now, then in zip(Rows._fields, _versions(view), before, strict=True):
        if now != then:
            raise ConfigError(
                f"{KEY}: {name} changes view.rows.{field} in place, which other passes over the "
                "batch read too: it must make a new tensor"
            )


def _check_terms(name: str, terms: Any) -> None:
    if not isinstance(terms, LossTerms):
        raise ConfigError(
            f"{KEY}: the loss of {name} must give LossTerms of impala_async/algo/terms.py, as "
            f"ValidRows.terms makes them, not {type(terms).__name__}"
        )
    if torch.is_grad_enabled() and not terms.total.requires_grad:
        raise ConfigError(
            f"{KEY}: the loss of {name} has no gradient: its total must follow from view.evaluation"
        )


def _check_stats(name: str, stats: Any, *, has_target: bool) -> None:
    if not isinstance(stats, dict):
        raise ConfigError(
            f"{KEY}: the stats of {name} must be a dict from name to tensor, not a "
            f"{type(stats).__name__}"
        )
    for stat, value in stats.items():
        if not is_of_update(str(stat)):
            raise ConfigError(
                f"{KEY}: {name} reports {stat!r}, which is no metric of an update: a metric of "
                f"your own needs no declaration, but a name like {OWN_PREFIX}{_plain(stat)}"
            )
        if not isinstance(value, Tensor) or value.dim():
            raise ConfigError(
                f"{KEY}: {name} reports {stat} as {_kind(value)}, and must report a tensor without "
                "dimensions: view.mean gives one"
            )
    if has_target and "policy/kl" not in stats:
        raise ConfigError(
            f"{KEY}: {name} has a target network, so its stats must hold policy/kl, the KL from it"
        )


def _plain(stat: object) -> str:
    """As the end of a name."""
    return re.sub("[^a-z0-9]+", "_", str(stat).rpartition("/")[2].lower()).strip("_") or "name"


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
