"""Distributions against those of torch and numeric integrals, draws against their probabilities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impala_async.algo.distributions import (
    Categorical,
    Gaussian,
    Joint,
    distribution_of,
    forbid,
)
from impala_async.schema import ActionPart

LEADING = st.sampled_from([(), (1,), (7,), (3, 4)])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def categorical(logits_A: Tensor) -> Categorical:
    """One item, with a choice for each logit."""
    return Categorical(logits_A, logits_A.shape[-1:], ())


@settings(deadline=None, max_examples=60)
@given(
    leading=LEADING,
    num_actions=st.integers(1, 6),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 10**6),
)
def test_agrees_with_torch(
    leading: tuple[int, ...], num_actions: int, scale: float, seed: int
) -> None:
    logits_A, other_A = scale * normal(2, *leading, num_actions, seed=seed)
    ours, theirs = categorical(logits_A), torch.distributions.Categorical(logits=logits_A)
    actions = normal(*leading, num_actions, seed=seed + 1).argmax(-1)
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.mode(), logits_A.argmax(-1))
    kl = torch.distributions.kl_divergence(theirs, torch.distributions.Categorical(logits=other_A))
    torch.testing.assert_close(ours.kl(categorical(other_A)), kl)


@pytest.mark.parametrize("num_actions", [2, 5])
def test_literal_uniform(num_actions: int) -> None:
    uniform = categorical(torch.full((3, num_actions), 7.0))
    certain = categorical(torch.eye(num_actions)[:1].mul(1e4).expand(3, -1))
    n = torch.full((3,), float(num_actions))
    torch.testing.assert_close(uniform.log_prob(torch.tensor([0, 1, 1])), -n.log())
    torch.testing.assert_close(uniform.entropy(), n.log())
    assert certain.entropy().tolist() == [0, 0, 0]
    torch.testing.assert_close(certain.kl(uniform), n.log())
    torch.testing.assert_close(uniform.kl(certain), 1e4 * (1 - 1 / n) - n.log())


def test_samples_have_their_probabilities() -> None:
    probs_A = torch.tensor([0.5, 0.3, 0.15, 0.05])
    num_draws = 40_000
    draws = categorical(probs_A.log().expand(num_draws, 4)).sample(torch.Generator().manual_seed(3))
    counts = torch.bincount(draws, minlength=4)
    deviation = (num_draws * probs_A * (1 - probs_A)).sqrt()
    assert ((counts - num_draws * probs_A).abs() < 4 * deviation).all()


def test_samples_of_different_rows_are_independent() -> None:
    draws = categorical(torch.zeros(20_000, 2, 2)).sample(torch.Generator().manual_seed(4))
    assert abs((draws[:, 0] == draws[:, 1]).float().mean().item() - 0.5) < 4 * 0.5 / 20_000**0.5


def test_the_generator_alone_drives_sampling() -> None:
    distribution = categorical(normal(64, 6))
    before = torch.get_rng_state()
    first = distribution.sample(torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(distribution.sample(generator), first)
    assert not torch.equal(distribution.sample(generator), first)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(distribution.sample(), first)


def test_impossible_actions_are_never_drawn() -> None:
    logits_A = torch.tensor([-math.inf, 0.0, -math.inf, -8.0, -1e30])
    draws = categorical(logits_A.expand(50_000, 5)).sample(torch.Generator().manual_seed(5))
    assert set(draws.tolist()) == {1, 3}


@pytest.mark.parametrize("excluded", [-math.inf, -1e30])
def test_impossible_actions_cost_nothing(excluded: float) -> None:
    logits_A = torch.tensor([0.3, excluded, -1.2], dtype=torch.float64, requires_grad=True)
    other_A = torch.tensor([0.1, excluded, 0.9], dtype=torch.float64, requires_grad=True)
    allowed = torch.tensor([0, 2])
    masked, other = categorical(logits_A), categorical(other_A)
    plain, plain_other = categorical(logits_A[allowed]), categorical(other_A[allowed])
    for got, want in (
        (masked.entropy(), plain.entropy()),
        (masked.kl(other), plain.kl(plain_other)),
        (masked.log_prob(torch.tensor(2)), plain.log_prob(torch.tensor(1))),
    ):
        torch.testing.assert_close(got, want)
        gradients = [
            torch.autograd.grad(term, (logits_A, other_A), retain_graph=True, allow_unused=True)
            for term in (got, want)
        ]
        for one, reference in zip(*gradients, strict=True):
            assert (one is None) == (reference is None)
            if one is not None:
                torch.testing.assert_close(one, reference)
                assert one[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_actions_cost_nothing_however_much_entropy_weighs(dtype: torch.dtype) -> None:
    """As with an entropy cost of 2 and reduction sum, where nothing makes it smaller."""
    logits_A = torch.tensor([0.3, -math.inf, 0.1], dtype=dtype).repeat(3, 1).requires_grad_()
    legal_A = torch.tensor([0.3, 0.1], dtype=dtype).repeat(3, 1).requires_grad_()
    for logits in (logits_A, legal_A):
        (-2 * categorical(logits).entropy()).sum().backward()
    assert logits_A.grad is not None
    assert legal_A.grad is not None
    torch.testing.assert_close(logits_A.grad[:, [0, 2]], legal_A.grad)
    assert logits_A.grad[:, 1].tolist() == [0, 0, 0]


def test_kl_to_an_excluding_distribution_is_infinite() -> None:
    wide, narrow = categorical(torch.zeros(2)), categorical(torch.tensor([0.0, -math.inf]))
    assert wide.kl(narrow).item() == math.inf
    assert narrow.kl(wide).item() == pytest.approx(math.log(2))


def test_gradients_are_those_of_the_functions() -> None:
    logits_A = normal(3, 4, seed=1).requires_grad_()
    other_A = normal(3, 4, seed=2).requires_grad_()
    actions = torch.tensor([0, 3, 1])
    torch.autograd.gradcheck(lambda x: categorical(x).log_prob(actions), logits_A)
    torch.autograd.gradcheck(lambda x: categorical(x).entropy(), logits_A)
    torch.autograd.gradcheck(lambda x, y: categorical(x).kl(categorical(y)), (logits_A, other_A))


def test_sampling_and_the_mode_leave_the_graph_alone() -> None:
    distribution = categorical(normal(5, 3).requires_grad_())
    assert not distribution.sample().requires_grad
    assert not distribution.mode().requires_grad
    distribution.entropy().sum().backward()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_upcast_before_anything(low: torch.dtype) -> None:
    logits_A = normal(6, 5).to(low)
    actions = torch.arange(6, dtype=torch.int32) % 5
    ours, upcast = categorical(logits_A), categorical(logits_A.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = categorical(logits_A).log_prob(actions)
    for got, want in (
        (ours.log_prob(actions), upcast.log_prob(actions)),
        (under_autocast, upcast.log_prob(actions)),
        (ours.entropy(), upcast.entropy()),
        (ours.kl(upcast), torch.zeros(6)),
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, want)


def test_log_probs_of_distant_logits_stay_finite() -> None:
    distribution = categorical(torch.tensor([[1e4, -1e4, 0.0]]))
    assert distribution.log_prob(torch.tensor([1])).tolist() == [-2e4]
    assert distribution.log_prob(torch.tensor([0])).tolist() == [0.0]
    assert distribution.entropy().tolist() == [0.0]


def test_nan_is_not_hidden() -> None:
    broken = categorical(torch.tensor([0.0, math.nan]))
    fine = categorical(torch.zeros(2))
    terms = broken.entropy(), broken.log_prob(torch.tensor(0)), broken.kl(fine), fine.kl(broken)
    assert all(term.isnan() for term in terms)


# -------------------- several items


CHOICES = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)


def spread(shape: tuple[int, ...], choices: tuple[int, ...]) -> tuple[int, ...]:
    """A number of choices for each item of a shape."""
    return (choices * math.prod(shape))[: math.prod(shape)]


def draw_of(items: list[torch.distributions.Distribution], shape: tuple[int, ...]) -> Tensor:
    return torch.stack([item.sample() for item in items], -1).unflatten(-1, shape)


@settings(deadline=None, max_examples=60)
@given(LEADING, st.sampled_from([(3,), (2, 3), (1, 1)]), CHOICES, st.integers(0, 10**6))
def test_several_items_are_as_many_of_torchs(
    leading: tuple[int, ...], shape: tuple[int, ...], some: tuple[int, ...], seed: int
) -> None:
    choices = spread(shape, some)
    logits, other = 3 * normal(2, *leading, sum(choices), seed=seed)
    ours = Categorical(logits, choices, shape)
    theirs = [torch.distributions.Categorical(logits=one) for one in logits.split(choices, -1)]
    others = [torch.distributions.Categorical(logits=one) for one in other.split(choices, -1)]
    actions = draw_of(list(theirs), shape)
    flat = actions.flatten(-len(shape)).unbind(-1)
    log_probs = sum(item.log_prob(a) for item, a in zip(theirs, flat, strict=True))
    torch.testing.assert_close(ours.log_prob(actions), log_probs)
    torch.testing.assert_close(ours.entropy(), sum(item.entropy() for item in theirs))
    gaps = zip(theirs, others, strict=True)
    kl = sum(torch.distributions.kl_divergence(item, other) for item, other in gaps)
    torch.testing.assert_close(ours.kl(Categorical(other, choices, shape)), kl)
    modes = torch.stack([one.argmax(-1) for one in logits.split(choices, -1)], -1)
    assert torch.equal(ours.mode(), modes.unflatten(-1, shape))
    assert ours.sample().shape == (*leading, *shape)


@pytest.mark.parametrize("choices", [(2, 3, 4), (3, 3, 3)])
def test_items_are_drawn_with_their_own_probabilities(choices: tuple[int, ...]) -> None:
    num_draws = 40_000
    logits = normal(sum(choices), seed=2).float()
    distribution = Categorical(logits.expand(num_draws, -1), choices, (3,))
    draws = distribution.sample(torch.Generator().manual_seed(3))
    for item, logits_A in enumerate(logits.split(choices)):
        counts = torch.bincount(draws[:, item], minlength=choices[item])
        probs_A = logits_A.softmax(-1)
        deviation = (num_draws * probs_A * (1 - probs_A)).sqrt()
        assert ((counts - num_draws * probs_A).abs() < 4.5 * deviation).all()


def test_items_of_different_sizes_leave_finite_gradients() -> None:
    logits = normal(4, 9, seed=1).requires_grad_()
    actions = torch.tensor([[1, 2, 3]] * 4)

    def terms(logits: Tensor) -> Tensor:
        ours = Categorical(logits, (2, 3, 4), (3,))
        other = Categorical(logits.flip(0), (2, 3, 4), (3,))
        return ours.log_prob(actions) + ours.entropy() + ours.kl(other)

    assert torch.autograd.gradcheck(terms, logits)


# -------------------- parts together


PARTS = (
    ActionPart("move", "discrete", (4,)),
    ActionPart("look", "discrete", (2, 3), (2,)),
    ActionPart("push", "continuous", (), (2, 2)),
    ActionPart("turn", "squashed"),
)


def joint_of(seed: int) -> Joint:
    return Joint(
        {
            part.name: distribution_of(part, normal(5, part.num_parameters, seed=seed + i))
            for i, part in enumerate(PARTS)
        }
    )


def test_each_kind_has_its_distribution() -> None:
    kinds = [type(part) for part in joint_of(0).parts.values()]
    assert kinds == [Categorical, Categorical, Gaussian, Gaussian]


def test_parts_add_up() -> None:
    joint, other = joint_of(0), joint_of(50)
    actions = joint.sample(torch.Generator().manual_seed(1))
    assert {name: tuple(action.shape[1:]) for name, action in actions.items()} == {
        part.name: part.shape for part in PARTS
    }
    parts = joint.parts
    for got, terms in (
        (joint.log_prob(actions), [parts[name].log_prob(actions[name]) for name in parts]),
        (joint.entropy(), [part.entropy() for part in parts.values()]),
        (joint.kl(other), [parts[name].kl(other.parts[name]) for name in parts]),
    ):
        assert got.shape == (5,)
        torch.testing.assert_close(got, torch.stack(terms).sum(0))
    assert all(torch.equal(joint.mode()[name], parts[name].mode()) for name in parts)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_every_kind_computes_in_float32(part: ActionPart, low: torch.dtype) -> None:
    parameters = normal(6, part.num_parameters).to(low)
    ours, upcast = (distribution_of(part, p) for p in (parameters, parameters.float()))
    actions = upcast.sample()
    for got, want in (
        (ours.log_prob(actions), upcast.log_prob(actions)),
        (ours.entropy(), upcast.entropy()),
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, want)
    assert not ours.sample().requires_grad


# -------------------- masks of legal actions


@settings(deadline=None, max_examples=40)
@given(CHOICES, st.integers(0, 10**6), st.sampled_from([torch.bool, torch.int8, torch.uint8]))
def test_an_illegal_action_is_never_drawn(
    choices: tuple[int, ...], seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    legal_P = torch.randint(0, 2, (sum(choices),), generator=generator).to(dtype)
    logits_P = 3 * torch.randn(sum(choices), generator=generator)
    forbidden_P = forbid(logits_P, legal_P, choices)
    draws = Categorical(forbidden_P.expand(10_000, -1), choices, (len(choices),)).sample(generator)
    for item, legal_A in enumerate(legal_P.split(choices)):
        allowed = legal_A.nonzero().flatten().tolist()
        # Nothing legal means that all are.
        assert set(draws[:, item].tolist()) <= set(allowed or range(len(legal_A)))


def test_what_is_legal_keeps_its_odds_and_what_is_not_gets_no_gradient() -> None:
    logits_P = normal(3, 5, seed=4).requires_grad_()
    legal_P = torch.tensor([[1, 0, 1, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
    choices = (3, 2)
    distribution = Categorical(forbid(logits_P, legal_P, choices), choices, (2,))
    actions = torch.tensor([[2, 1], [0, 0], [1, 0]])
    expected = torch.stack(
        [
            logits_P[0, [0, 2]].log_softmax(-1)[1],
            # No move of row 1 is legal, so all are; looking is certain.
            logits_P[1, :3].log_softmax(-1)[0],
            logits_P[2, :3].log_softmax(-1)[1] + logits_P[2, 3:].log_softmax(-1)[0],
        ]
    )
    log_probs = distribution.log_prob(actions)
    torch.testing.assert_close(log_probs, expected)
    other = Categorical(forbid(logits_P.flip(0), legal_P, choices), choices, (2,))
    total = log_probs + distribution.entropy() + distribution.kl(other)
    assert total.isfinite().all()
    (gradient,) = torch.autograd.grad(
        distribution.entropy().sum() + log_probs.sum(), logits_P, retain_graph=True
    )
    assert gradient.isfinite().all()
    assert gradient[0, 1] == gradient[0, 3] == gradient[1, 4] == 0
    (gradient,) = torch.autograd.grad(other.kl(distribution).sum(), logits_P)
    assert gradient.isfinite().all()


def test_a_single_item_is_masked_alike() -> None:
    legal = torch.tensor([[True, False, True], [False, False, False]])
    logits = torch.zeros(2, 3)
    assert forbid(logits, legal, (3,)).tolist() == [[0, -math.inf, 0], [0, 0, 0]]
