"""From settings to a learner: how many slots, which device, and what is put together."""

from dataclasses import replace

import pytest
import torch

from impala_async.config.learner import LearnerSection
from impala_async.config.ranks import Place
from impala_async.errors import CheckpointError, ConfigError, SpacesError
from impala_async.learner import build as module
from impala_async.learner.build import (
    GIB,
    build_learner,
    build_step,
    check_memory,
    find_layout,
    num_slots,
    pick_device,
)
from impala_async.learner.handoff import Progress
from impala_async.learner.loader import HostLoader
from impala_async.metrics.host import Memory
from impala_async.models.actor_critic import ActorCritic
from impala_async.models.torso import device_of
from impala_async.policy import Policy
from impala_async.schema import ArraySpec, ObsSpec, policy_leaf, recurrent_state
from impala_async.training.batch import Batch
from impala_async.training.step import UpdateStep
from impala_async.weights import Version
from tests.columns import flat_schema
from tests.learner.columns import big_schema, small_schema
from tests.learner.fakes import Listener
from tests.learner.server_harness import config_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("ring", "queue_size", "on_cpu", "on_gpu", "on_device"),
    [(1, 1, 3, 2, 2), (1, 2, 4, 2, 2), (4, 2, 7, 2, 5), (2, 5, 8, 5, 3)],
)
def test_the_numbers_of_slots(ring, queue_size, on_cpu, on_gpu, on_device):
    section = LearnerSection(minibatch_buffer_size=ring, queue_size=queue_size)
    assert num_slots(section, CPU) == (on_cpu, 0) == (max(ring + queue_size + 1, ring + 2), 0)
    assert num_slots(section, CUDA) == (on_gpu, on_device)


def build(training=None, *, start=None, listener=None, **sections):
    schema = small_schema()
    thread, layout = build_learner(
        config_of(schema, **sections),
        schema,
        start=start or Progress(1),
        training=training,
        channels=(listener or Listener()).channels,
        release=lambda index: None,
    )
    # It is told of what is published.
    weights = thread.snapshot.take(Version(1, 0))
    assert weights.layout_digest == layout.digest
    return thread


def test_a_learner_on_a_cpu_whose_algorithm_is_tried_before_anything_runs(monkeypatch):
    prepared = []

    def prepare(step, batch):
        prepared.append((batch, torch.get_num_threads()))

    monkeypatch.setattr(UpdateStep, "prepare", prepare)
    loader = build(
        learner={"threads": 2, "minibatch_buffer_size": 2, "queue_size": 3, "batch_columns": 5}
    ).loader
    ((batch, num_threads),) = prepared
    assert num_threads == 2
    assert not batch.mask_BT.any()
    assert batch is loader.batches[0]
    assert len(loader.slots) == 6 == loader.full.capacity == loader.num_slots
    assert {len(slot.obs) for slot in loader.slots} == {5}
    assert (type(loader), loader.bodies) == (HostLoader, {})


def step_of(**model):
    config = config_of(small_schema(), model=model)
    policy = Policy(small_schema(), config.model, seed=77)
    return UpdateStep(policy, config.algorithm)


def test_a_checkpoint_is_put_into_the_model():
    step, listener = step_of(), Listener()
    start = Progress(2, update=5, env_steps_trained=10)
    learner = build(step.capture(), start=start, listener=listener, stop={"env_steps": 1})
    # Its stop is reached already, so the body ends at once.
    learner.run()
    assert listener.stops == ["env_steps"]
    (first,) = listener.weights
    assert first.version == (2, 5)
    flat = torch.cat([tensor.reshape(-1) for tensor in step.policy.tensors])
    assert first.buffer.tobytes() == flat.numpy().tobytes()
    with pytest.raises(CheckpointError):
        build(training=step_of(hidden_sizes=[5]).capture())


def test_what_torsos_round_anyway_travels_in_bfloat16_but_not_in_lockstep():
    policy = step_of(precision="bfloat16").policy
    for precision, mode, sent in (
        ("bfloat16", "async", policy.coarse_layout),
        ("float32", "async", policy.layout),
        ("bfloat16", "lockstep", policy.layout),
    ):
        thread = build(model={"precision": precision}, pace={"mode": mode})
        weights = thread.snapshot.take(Version(1, 0))
        assert (weights.layout_digest, weights.buffer.nbytes) == (sent.digest, sent.num_bytes)


def test_the_layout_is_known_before_the_model_is_built():
    config = config_of(small_schema())
    assert find_layout(config.model, small_schema()) == step_of().policy.layout.digest


def test_a_schedule_without_an_end_ends_with_the_run():
    schema, columns = small_schema(), torch.ones(4, dtype=torch.bool)
    config = config_of(schema, algorithm={"lr": 1e-3, "lr_end": 0}, stop={"env_steps": 1000})
    step, _ = build_step(config, schema, CPU)
    sizes = schema.layout.obs_bytes, schema.layout.small_bytes
    batch = Batch.in_planes(schema, *(torch.zeros(4, size, dtype=torch.uint8) for size in sizes))
    rates = [step.run(batch, columns, done).stats["algorithm/lr"] for done in (0, 250, 1000)]
    assert rates == pytest.approx([1e-3, 7.5e-4, 0])


def test_what_learns_is_told(caplog):
    caplog.set_level("INFO")
    for schema, model, torso in (
        (small_schema(), {}, "mlp"),
        (big_schema(), {}, "small_cnn"),
        (big_schema(), {"name": "mlp"}, "mlp"),
    ):
        caplog.clear()
        build_step(config_of(schema, model={"precision": "float32", **model}), schema, CPU)
        assert caplog.messages == [f"learning with {torso} on cpu in float32"]


def test_auto_takes_what_is_there_and_a_device_that_is_not_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for is_there, device in ((True, CUDA), (False, CPU)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert pick_device("auto") == device_of("auto") == device
    assert pick_device("cpu") == CPU
    with pytest.raises(ConfigError, match=r"^learner\.device: 'cuda:1' is not on .* has 1 GPUs"):
        pick_device("cuda:1")


def test_each_rank_has_a_gpu_or_none_of_a_host_begins(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    of_two_hosts = [Place(number, 4, number % 2, 2) for number in range(4)]
    devices = [pick_device("auto", place) for place in of_two_hosts]
    assert devices == [torch.device("cuda", number) for number in (0, 1, 0, 1)]
    # The first of three has one.
    for place in (Place(0, 3, 0, 3), Place(2, 3, 2)):
        with pytest.raises(ConfigError, match="no more ranks on a host than it has GPUs"):
            pick_device("cuda", place)
    assert pick_device("cpu", Place(0, 3, 0, 3)) == CPU


@pytest.fixture
def free(monkeypatch):
    """A machine with 4 GiB to spare, and a way to say how much it has."""

    def has(num_bytes):
        monkeypatch.setattr(module, "find_memory", lambda: Memory(8 * GIB, num_bytes))

    has(4 * GIB)
    return has


def check(schema, num_slots=4, **sections):
    config = config_of(schema, learner={"batch_columns": 16}, **sections)
    check_memory(config, schema, num_slots, CPU)


def test_slots_that_do_not_fit_are_refused_with_the_numbers_and_the_keys(free):
    wide = ObsSpec((ArraySpec("obs", (1 << 14,), "uint8"),))
    schema = replace(small_schema(), obs=wide, rows=63)
    check(schema, num_slots=220)
    says = r"4\.\d GiB for 256 batches, .* 4\.0 GiB are free: .*\.minibatch_buffer_size or"
    with pytest.raises(SpacesError, match=says):
        check(schema, num_slots=256)
    # A tenth of what is free is left to others.
    with pytest.raises(SpacesError, match=r"3\.\d GiB for 236 batches, .* 4\.0 GiB are free"):
        check(schema, num_slots=236)


def test_a_model_that_does_not_fit_is_refused_without_being_built(free):
    schema, names = small_schema(), ("main", "other", "third")
    wide_core = replace(schema, state=recurrent_state("lstm", 10**5))
    several = replace(schema, obs=ObsSpec((*schema.obs.leaves, policy_leaf(names))), policies=names)
    wide_model = {"hidden_sizes": [5200, 5200]}
    check(schema, model=wide_model)
    for too_large, model in (
        (flat_schema(2, 10**8, rows=3), {}),
        (flat_schema(2, 2**31 - 1, rows=3), {}),
        # The weights have 1.8 GiB. The rest is for each choice in each row.
        (flat_schema(2, 10**6, rows=100), {"hidden_sizes": [64, 64]}),
        (wide_core, {"core": "lstm", "core_size": 10**5}),
        # Each of several policies wants weights.
        (several, wide_model),
    ):
        with pytest.raises(SpacesError, match=r"GiB for the model"):
            check(too_large, model=model)


def test_a_schema_that_lacks_what_the_core_carries_is_refused_before_torch_sees_it(free):
    with pytest.raises(SpacesError, match=r"model\.core: lstm of 256 here, the schema has \(\)"):
        check(small_schema(), model={"core": "lstm"})


@pytest.mark.parametrize(("core", "name"), [(None, "impala_resnet"), ("lstm", "nature_cnn")])
def test_an_update_s_own_tensors_are_estimated(free, monkeypatch, core, name):
    """By those that torch keeps of two batches, of which one has four rows more."""
    model = {"name": name, "core": core, "precision": "float32", "normalize_obs": False}
    state = recurrent_state(core, 256)
    image = ObsSpec((ArraySpec("obs", (4, 84, 84), "uint8"),))
    schema = replace(small_schema(), obs=image, state=state, rows=3)
    config = config_of(schema, learner={"batch_columns": 16}, model=model)
    network = ActorCritic(config.model, schema.inputs, schema.action)
    kept = []
    for num_rows in (4, 8):
        found = {}

        def keep(tensor, found=found):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        obs = {"obs": torch.zeros(num_rows, 4, 84, 84, dtype=torch.uint8)}
        carried = tuple(torch.zeros(1, 256) for _ in state)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = network(obs, carried, torch.zeros(1, num_rows, dtype=torch.bool))
        kept.append(sum(found.values()))
        del outputs
    of_update = 16 * 4 * (kept[1] - kept[0]) // 4
    of_model = sum(parameter.nbytes for parameter in network.parameters())

    def fits(share, device=CPU, **changed):
        free(int(share * of_update) + 7 * of_model)
        plain = {"num_minibatches": 1, "normalize_returns": False, "returns": "gae"}
        algorithm = config.algorithm.model_copy(update=plain | changed)
        check_memory(config.model_copy(update={"algorithm": algorithm}), schema, 0, device)

    says = r"GiB for an update.*model.hidden_sizes, {}or choose .*or smaller images"
    fits(1.3)
    with pytest.raises(SpacesError, match=says.format("raise algorithm.num_minibatches, ")):
        fits(0.7)
    fits(0.7, device=CUDA)  # there they have memory of their own
    # The largest of three parts has 6 columns of 16.
    fits(0.55, num_minibatches=3)
    with pytest.raises(SpacesError, match=says.format("raise algorithm.num_minibatches, ")):
        fits(0.35, num_minibatches=3)
    fits(0.2, num_minibatches=16)
    # The whole batch is looked at beside its parts, without gradients.
    for look in ({"normalize_returns": True}, {"shuffle_rows": True}, {"returns": "vtrace"}):
        with pytest.raises(SpacesError, match=says.format("")):
            fits(0.2, num_minibatches=16, **look)


class Measures(torch.nn.Module):
    """Asks for a value while it is made, which a meta tensor has not."""

    num_out = 3

    def __init__(self, obs, section):
        super().__init__()
        self.size = int(torch.tensor(obs.leaves[0].shape).prod())


def test_a_network_of_one_s_own_that_cannot_be_estimated_is_let_through(free):
    check(small_schema(), model={"name": f"{__name__}:Measures", "hidden_sizes": None})
