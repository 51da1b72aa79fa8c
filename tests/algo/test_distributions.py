"""Distributions against those of torch and numeric integrals, draws against their probabilities."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_async.algo.distributions import (
    ACTS_AHEAD,
    NUMBERS_AHEAD,
    Categorical,
    DrawsAhead,
    Gaussian,
    Joint,
    joint_of,
    sample_by_numpy,
)
from impala_async.schema import ActionPart

LEADING = st.sampled_from([(), (1,), (7,), (3, 4)])
CHOICES = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)
squashed = partial(Gaussian, is_squashed=True)
KINDS = pytest.mark.parametrize("kind", [Gaussian, squashed], ids=["plain", "squashed"])


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def one_item(logits_A):
    """One item, with a choice for each logit."""
    return Categorical(logits_A, logits_A.shape[-1:], ())


def one_part(part, parameters_P, legal_P=None):
    """The distribution of a part that is alone."""
    return joint_of((part,), parameters_P, legal_P).parts[part.name]


def items_of(logits_P, legal_P, choices):
    part = ActionPart("", "discrete", choices, (len(choices),))
    return one_part(part, logits_P, legal_P)


# -------------------- discrete items


@settings(max_examples=60)
@given(
    leading=LEADING,
    shape=st.sampled_from([(), (3,), (2, 3), (1, 1)]),
    some=CHOICES,
    scale=st.sampled_from([0.0, 3.0, 30.0]),
    seed=st.integers(0, 10**6),
)
def test_items_are_as_many_of_torchs(leading, shape, some, scale, seed):
    num_items = math.prod(shape)
    choices = (some * num_items)[:num_items]
    logits, others = scale * normal(2, *leading, sum(choices), seed=seed)

    def of_torch(logits):
        return [torch.distributions.Categorical(logits=one) for one in logits.split(choices, -1)]

    def shaped(items):
        return torch.stack(items, -1).reshape(leading + shape)

    ours, theirs = Categorical(logits, choices, shape), of_torch(logits)
    draws = [item.sample() for item in theirs]
    log_probs = sum(item.log_prob(draw) for item, draw in zip(theirs, draws, strict=True))
    torch.testing.assert_close(ours.log_prob(shaped(draws)), log_probs)
    torch.testing.assert_close(ours.entropy(), sum(item.entropy() for item in theirs))
    pairs = zip(theirs, of_torch(others), strict=True)
    kl = sum(torch.distributions.kl_divergence(item, other) for item, other in pairs)
    torch.testing.assert_close(ours.kl(Categorical(others, choices, shape)), kl)
    modes = shaped([one.argmax(-1) for one in logits.split(choices, -1)])
    assert torch.equal(ours.mode(), modes)
    assert ours.sample().shape == modes.shape


@pytest.mark.parametrize("choices", [(4,), (2, 3, 4), (3, 3, 3)])
def test_draws_have_their_probabilities_item_by_item(choices):
    num_draws = 40_000
    logits = normal(sum(choices), seed=2).float()
    distribution = Categorical(logits.expand(num_draws, -1), choices, (len(choices),))
    draws = distribution.sample(torch.Generator().manual_seed(3))
    for item, logits_A in enumerate(logits.split(choices)):
        counts = torch.bincount(draws[:, item], minlength=choices[item])
        probs_A = logits_A.softmax(-1)
        deviation = (num_draws * probs_A * (1 - probs_A)).sqrt()
        assert ((counts - num_draws * probs_A).abs() < 4.5 * deviation).all()


def test_certain_uniform_excluding_and_broken_logits():
    uniform, certain = one_item(torch.zeros(2)), one_item(torch.tensor([1e4, 0.0]))
    assert certain.entropy().item() == 0
    assert certain.kl(uniform).item() == pytest.approx(math.log(2))
    assert uniform.kl(one_item(torch.tensor([0.0, -math.inf]))).item() == math.inf
    broken = one_item(torch.tensor([0.0, math.nan]))
    for term in (broken.entropy(), broken.log_prob(torch.tensor(0)), broken.kl(uniform)):
        assert term.isnan()
    assert uniform.kl(broken).isnan()


# -------------------- masks of legal actions


@settings(max_examples=40)
@given(CHOICES, st.integers(0, 10**6), st.sampled_from([torch.bool, torch.int8, torch.uint8]))
def test_an_illegal_action_is_never_drawn(choices, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    legal_P = torch.randint(0, 2, (sum(choices),), generator=generator).to(dtype)
    logits_P = 3 * torch.randn(sum(choices), generator=generator).expand(10_000, -1)
    draws = items_of(logits_P, legal_P.expand(10_000, -1), choices).sample(generator)
    for item, legal_A in enumerate(legal_P.split(choices)):
        allowed = legal_A.nonzero().flatten().tolist()
        # Nothing legal means that all are.
        assert set(draws[:, item].tolist()) <= set(allowed or range(len(legal_A)))


def test_what_is_legal_keeps_its_odds_and_what_is_not_gets_no_gradient():
    logits_P = normal(3, 5, seed=4).requires_grad_()
    legal_P = torch.tensor([[1, 0, 1, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
    choices = (3, 2)
    distribution = items_of(logits_P, legal_P, choices)
    log_probs = distribution.log_prob(torch.tensor([[2, 1], [0, 0], [1, 0]]))
    expected = [
        logits_P[0, [0, 2]].log_softmax(-1)[1],
        # No move of row 1 is legal, so all are; looking is certain.
        logits_P[1, :3].log_softmax(-1)[0],
        logits_P[2, :3].log_softmax(-1)[1] + logits_P[2, 3:].log_softmax(-1)[0],
    ]
    torch.testing.assert_close(log_probs, torch.stack(expected))
    other = items_of(logits_P.flip(0), legal_P, choices)
    total = log_probs + distribution.entropy() + distribution.kl(other)
    assert total.isfinite().all()
    for term in (distribution.entropy() + log_probs, other.kl(distribution)):
        (gradient,) = torch.autograd.grad(term.sum(), logits_P, retain_graph=True)
        assert gradient.isfinite().all()
    (gradient,) = torch.autograd.grad((distribution.entropy() + log_probs).sum(), logits_P)
    assert gradient[0, 1] == gradient[0, 3] == gradient[1, 4] == 0


# -------------------- numbers


def gaussian_of(kind, leading, shape, seed=0):
    """Ours, and torch's with the same means and deviations."""
    num_items = math.prod(shape)
    mean, log_std = 2 * normal(*leading, num_items, seed=seed), normal(*leading, num_items, seed=9)
    log_std = log_std.clamp(-2, 1)
    ours = kind(torch.cat([mean, log_std], -1), shape)
    return ours, torch.distributions.Normal(mean, log_std.exp())


@given(leading=LEADING, shape=st.sampled_from([(), (3,), (2, 3)]), seed=st.integers(0, 10**6))
def test_numbers_agree_with_torch(leading, shape, seed):
    ours, theirs = gaussian_of(Gaussian, leading, shape, seed)
    other, other_theirs = gaussian_of(Gaussian, leading, shape, seed + 5)
    draw_D = theirs.sample()
    actions = draw_D.reshape(leading + shape)
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(draw_D).sum(-1))
    torch.testing.assert_close(ours.entropy(), theirs.entropy().sum(-1))
    kl = torch.distributions.kl_divergence(theirs, other_theirs).sum(-1)
    torch.testing.assert_close(ours.kl(other), kl)
    assert torch.equal(ours.mode(), theirs.mean.reshape(leading + shape))
    assert ours.sample().shape == actions.shape
    narrow, _ = gaussian_of(squashed, leading, shape, seed)
    through_tanh = torch.distributions.TransformedDistribution(
        theirs, torch.distributions.TanhTransform(cache_size=1)
    )
    squashed_D = through_tanh.rsample()
    # An action is the number before the tanh.
    before_D = through_tanh.transforms[0].inv(squashed_D)
    log_probs = through_tanh.log_prob(squashed_D).sum(-1)
    torch.testing.assert_close(narrow.log_prob(before_D.reshape(leading + shape)), log_probs)
    torch.testing.assert_close(narrow.kl(gaussian_of(squashed, leading, shape, seed + 5)[0]), kl)


@pytest.mark.parametrize("mean", [0.0, 0.5, -2.0, 8.0])
@pytest.mark.parametrize(
    ("std", "error"), [(1e-3, 1e-9), (0.3, 1e-6), (1.0, 5e-5), (2.0, 5e-3), (7.0, 0.25)]
)
def test_the_entropy_of_squashed_numbers(mean, std, error):
    """-∫ p(y) log p(y) dy, over what the tanh makes: numerically."""
    points = torch.linspace(mean - 12 * std, mean + 12 * std, 200_001, dtype=torch.float64)
    center, deviation = torch.tensor([mean, std], dtype=torch.float64)
    log_density = torch.distributions.Normal(center, deviation).log_prob(points)
    slope = 2 * (math.log(2) - points - torch.nn.functional.softplus(-2 * points))
    want = -torch.trapezoid(log_density.exp() * (log_density - slope), points).item()
    parameters = torch.tensor([mean, math.log(std)], dtype=torch.float64)
    assert squashed(parameters, ()).entropy().item() == pytest.approx(want, abs=error)


@KINDS
def test_draws_and_gradients_of_numbers_are_those_of_the_functions(kind):
    parameters = torch.tensor([1.5, -2.0, 0.5, -1.0]).expand(40_000, 4)
    draws = kind(parameters, (2,)).sample(torch.Generator().manual_seed(7))
    for item, (mean, std) in enumerate([(1.5, math.exp(0.5)), (-2.0, math.exp(-1.0))]):
        assert draws[:, item].mean().item() == pytest.approx(mean, abs=4.5 * std / 200)
        assert draws[:, item].std().item() == pytest.approx(std, rel=0.02)
    given_ = normal(3, 4, seed=1).requires_grad_()
    other = normal(3, 4, seed=2).requires_grad_()
    actions = normal(3, 2, seed=3)
    check = torch.autograd.gradcheck
    assert check(lambda x: kind(x, (2,)).log_prob(actions), given_)
    assert check(lambda x: kind(x, (2,)).entropy(), given_)
    assert check(lambda x, y: kind(x, (2,)).kl(kind(y, (2,))), (given_, other))


@KINDS
def test_numbers_far_from_0_keep_finite_gradients(kind):
    for mean in (30.0, 1e3, 1e6, -30.0, -1e3, -1e6):
        parameters = torch.tensor([mean, 0.0], requires_grad=True)
        distribution = kind(parameters, ())
        (distribution.log_prob(torch.tensor(mean + 0.5)) + distribution.entropy()).backward()
        assert parameters.grad.isfinite().all(), mean


@pytest.mark.parametrize(("log_std", "bound"), [(-50.0, -10.0), (9.0, 2.0)])
@pytest.mark.parametrize("wish", [1.0, -1.0])
def test_a_deviation_out_of_range_is_brought_back_by_its_gradient(log_std, bound, wish):
    parameters = torch.tensor([0.0, log_std], requires_grad=True)
    entropy = Gaussian(parameters, ()).entropy()
    assert entropy.item() == pytest.approx(bound + 0.5 + 0.5 * math.log(2 * math.pi))
    # A wish of 1 makes a step towards more entropy.
    (-wish * entropy).backward()
    assert parameters.grad[1].item() == (-wish if wish * log_std < 0 else 0)


# -------------------- parts together


PARTS = (
    ActionPart("move", "discrete", (4,)),
    ActionPart("look", "discrete", (2, 3), (2,)),
    ActionPart("push", "continuous", (), (2, 2)),
    ActionPart("turn", "squashed"),
)


def test_parts_add_up():
    def parts_of(seed):
        parameters = [normal(5, p.num_parameters, seed=seed + i) for i, p in enumerate(PARTS)]
        return joint_of(PARTS, torch.cat(parameters, -1), None).parts

    parts, others = parts_of(0), parts_of(50)
    assert [type(part) for part in parts.values()] == [*[Categorical] * 2, *[Gaussian] * 2]
    joint = Joint(parts)
    actions = joint.sample(torch.Generator().manual_seed(1))
    for part in PARTS:
        assert tuple(actions[part.name].shape[1:]) == part.shape
    for got, terms in (
        (joint.log_prob(actions), [part.log_prob(actions[name]) for name, part in parts.items()]),
        (joint.entropy(), [part.entropy() for part in parts.values()]),
        (joint.kl(Joint(others)), [parts[name].kl(others[name]) for name in parts]),
    ):
        assert got.shape == (5,)
        torch.testing.assert_close(got, torch.stack(terms).sum(0))
    assert all(torch.equal(joint.mode()[name], part.mode()) for name, part in parts.items())
    plain = Gaussian(normal(5, 2, seed=3), ())
    assert not torch.equal(parts["turn"].entropy(), plain.entropy()), "it is squashed"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_every_kind_computes_in_float32(part, low):
    parameters = normal(6, part.num_parameters).to(low)
    ours, upcast = (one_part(part, p) for p in (parameters, parameters.float()))
    actions = upcast.sample()
    for got, want in (
        (ours.log_prob(actions), upcast.log_prob(actions)),
        (ours.entropy(), upcast.entropy()),
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, want)
    assert not ours.sample().requires_grad


# -------------------- draws ahead


def are_seeded_by_call():
    """Whether torch takes a seed for each call, as older releases do."""
    first, second = (torch.Generator().manual_seed(1) for _ in range(2))
    twice = [torch.empty(4).exponential_(generator=second) for _ in range(2)]
    return not torch.equal(torch.empty(8).exponential_(generator=first), torch.cat(twice))


@pytest.mark.skipif(are_seeded_by_call(), reason="this torch seeds each call anew")
def test_draws_ahead_are_those_of_one_by_one_also_when_the_shape_changes():
    ahead, single = DrawsAhead().manual_seed(5), torch.Generator().manual_seed(5)
    logits_CA = normal(16, 3, seed=1).float().numpy()
    for _ in range(3 * ACTS_AHEAD):
        found = sample_by_numpy(logits_CA.copy(), ahead)
        expected = sample_by_numpy(logits_CA.copy(), single)
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    # All that was drawn is used up here: other shapes go on from the same place.
    for num_columns in (4, 7):
        np.testing.assert_array_equal(
            sample_by_numpy(logits_CA[:num_columns].copy(), ahead)[0],
            sample_by_numpy(logits_CA[:num_columns].copy(), single)[0],
        )
        single.set_state(ahead.get_state())


def test_draws_of_another_seed_differ_and_each_generator_has_its_own():
    first, second = DrawsAhead().manual_seed(1), DrawsAhead().manual_seed(2)
    shape = (3, 4)
    assert not np.array_equal(first.exponential(shape), second.exponential(shape))
    assert first.exponential(shape).shape == shape
    begun = first.manual_seed(7).exponential(shape).copy()
    first.exponential(shape)
    assert np.array_equal(first.manual_seed(7).exponential(shape), begun)


def test_no_more_is_drawn_ahead_than_is_little_memory():
    large = DrawsAhead().manual_seed(0).exponential((256, 4672))
    assert large.base.size == large.size > NUMBERS_AHEAD
    small = DrawsAhead().manual_seed(0).exponential((16, 2))
    assert small.base.size == ACTS_AHEAD * 32
