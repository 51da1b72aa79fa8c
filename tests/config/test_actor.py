from tests.config.made import complaint, config_of


def test_each_worker_has_an_environment():
    for sampler in ("auto", "parallel"):
        settings = f"actor.sampler={sampler} actor.num_envs=4 actor.num_workers"
        config_of(f"{settings}=4")
        assert "num_workers (6) must not exceed num_envs (4)" in complaint(f"{settings}=6")


def test_a_device_is_one_of_those_that_can_be():
    for key in ("actor.device", "learner.device"):
        # torch would take 256 for 0, and 128 for -128.
        for device in ("gpu", "meta", "cuda:", "cuda:x", "mps", "", "cuda:256", "cuda:00"):
            wants = f"{key}: wants auto, cpu, cuda or cuda:N with N up to 99, got {device!r}"
            assert complaint(f"{key}={device}") == f"--set: {wants}"
        for device in ("cuda:0", "cuda:1", "cuda:15"):
            config_of(f"{key}={device}")
