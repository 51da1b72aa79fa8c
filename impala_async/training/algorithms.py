"""The algorithms: what loss each has, what it reports, and whether it wants a target network.

A user's own is named `algorithm.name = "package.module:Name"`. It is made from the `algorithm`
section, by a function that gives an `Algorithm`; docs/models.md says more. Its loss and its stats
are looked at each time, so that what is wrong is told by its name. One of ours is a loss in
`algo/`, a maker in the table here, and its keys in `config/algorithm.py`.

    B columns of a batch, T action rows, S = T+1 observation rows
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impala_async.algo.losses import appo_loss, impact_ratios, impala_loss, ppo_loss
from impala_async.algo.terms import LossTerms
from impala_async.algo.vtrace import clamped_exp
from impala_async.config.algorithm import AlgorithmSection
from impala_async.errors import ConfigError
from impala_async.metrics.names import OWN_PREFIX, is_of_update
from impala_async.policy import Evaluation
from impala_async.user_code import NamedInSetting, import_callable

KEY = "algorithm.name"


class View(NamedTuple):
    """A batch, or a part of it, as the weights of now see it: the inputs of a loss, time-major.

    Masked rows may hold anything, NaN included: a loss selects before it computes.
    """

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

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments that every loss takes."""
        return {
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


def _impala(section: AlgorithmSection) -> Algorithm:
    settings = _settings(section, "rho_bar", "c_bar", "pg_rho_bar")
    return Algorithm(lambda view, cost: impala_loss(**view.inputs, entropy_cost=cost, **settings))


def _appo(section: AlgorithmSection) -> Algorithm:
    settings = _settings(section, "rho_bar", "c_bar", "pg_rho_bar", "clip", "is_clip")

    def loss(view: View, entropy_cost: float) -> LossTerms:
        return appo_loss(
            **view.inputs,
            target_log_probs_TB=_target(view).log_probs_TB,
            kl_TB=_kl(view) if view.kl_coeff else None,
            kl_coeff=view.kl_coeff,
            entropy_cost=entropy_cost,
            **settings,
        )

    def stats(view: View) -> dict[str, Tensor]:
        log_probs_TB, mu_TB = view.evaluation.log_probs_TB, view.behaviour_log_probs_TB
        target_TB = _target(view).log_probs_TB
        ratios_TB = impact_ratios(log_probs_TB, mu_TB, target_TB, section.is_clip)
        return {
            "policy/kl": view.mean(_kl(view)),
            "policy/clip_fraction": view.mean((ratios_TB - 1).abs() > section.clip),
        }

    return Algorithm(loss, stats, has_target=True)


def _ppo(section: AlgorithmSection) -> Algorithm:
    settings = _settings(section, "rho_bar", "c_bar", "clip")
    settings["returns"] = section.returns_kind

    def stats(view: View) -> dict[str, Tensor]:
        log_ratios_TB = view.evaluation.log_probs_TB.detach() - view.behaviour_log_probs_TB
        ratios_TB = clamped_exp(log_ratios_TB)
        return {
            # From the actions taken alone, and never below 0: E[r - 1 - log r] = KL(mu || pi).
            "policy/kl": view.mean(ratios_TB - 1 - log_ratios_TB),
            "policy/clip_fraction": view.mean((ratios_TB - 1).abs() > section.clip),
        }

    return Algorithm(
        lambda view, cost: ppo_loss(**view.inputs, entropy_cost=cost, **settings), stats
    )


def _a2c(section: AlgorithmSection) -> Algorithm:
    settings = _settings(section) | {"clip": None}
    return Algorithm(lambda view, cost: ppo_loss(**view.inputs, entropy_cost=cost, **settings))


def _settings(section: AlgorithmSection, *keys: str) -> dict[str, Any]:
    """The arguments of a loss that are settings: those that all have, and these."""
    return {
        "value_cost": section.value_cost,
        "reduction": section.reduction,
        "normalize_advantages": section.has_normal_advantages,
        "lambda_": section.trace_decay,
        **{key: getattr(section, key) for key in keys},
    }


def _target(view: View) -> Evaluation:
    assert view.target is not None, "appo has a target network"
    return view.target


def _kl(view: View) -> Tensor:
    """[T, B]"""
    return _target(view).joint_BT.kl(view.evaluation.joint_BT).t()


MAKERS: dict[str, Callable[[AlgorithmSection], Algorithm]] = {
    "impala": _impala,
    "appo": _appo,
    "ppo": _ppo,
    "a2c": _a2c,
}


def make_algorithm(section: AlgorithmSection) -> Algorithm:
    """The one that the section names; raises ConfigError where a user's own cannot be made."""
    name = section.name
    if name in MAKERS:
        return MAKERS[name](section)
    make = import_callable(f"{KEY}: {name}", name)
    with NamedInSetting(KEY, name, "when it was made"):
        made = make(section)
    if not isinstance(made, Algorithm):
        raise ConfigError(
            f"{KEY}: {name} must make an Algorithm of impala_async/training/algorithms.py, not "
            f"{type(made).__name__}"
        )

    def loss(view: View, entropy_cost: float) -> LossTerms:
        terms = _call(name, "in its loss", made.loss, view, entropy_cost)
        if not isinstance(terms, LossTerms):
            raise ConfigError(
                f"{KEY}: the loss of {name} must give LossTerms of impala_async/algo/terms.py, as "
                f"ValidRows.terms makes them, not {type(terms).__name__}"
            )
        if torch.is_grad_enabled() and not terms.total.requires_grad:
            raise ConfigError(
                f"{KEY}: the loss of {name} has no gradient: its total must follow from "
                "view.evaluation"
            )
        return terms

    def stats(view: View) -> dict[str, Tensor]:
        found: dict[str, Tensor] = _call(name, "in its stats", made.stats, view)
        _check_stats(name, found, has_target=made.has_target)
        return found

    return Algorithm(loss, stats, made.has_target)


def _call(name: str, where: str, function: Callable[..., Any], view: View, *more: float) -> Any:
    """A mistake in a user's function is told by the name, as is a change to the batch's memory."""
    rows = {field: part for field, part in view._asdict().items() if isinstance(part, Tensor)}
    # Every change in place increases it.
    before = {field: tensor._version for field, tensor in rows.items()}
    with NamedInSetting(KEY, name, where):
        found = function(view, *more)
    for field, tensor in rows.items():
        if tensor._version != before[field]:
            raise ConfigError(
                f"{KEY}: {name} changes view.{field} in place, which other passes over the batch "
                "read too: it must make a new tensor"
            )
    return found


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
                f"your own needs no declaration, but a name like {OWN_PREFIX}name"
            )
        if not isinstance(value, Tensor) or value.dim():
            raise ConfigError(
                f"{KEY}: {name} must report {stat} as a tensor without dimensions: view.mean "
                "gives one"
            )
    if has_target and "policy/kl" not in stats:
        raise ConfigError(
            f"{KEY}: {name} has a target network, so its stats must hold policy/kl, the KL from it"
        )
