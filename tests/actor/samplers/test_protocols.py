from impala_async.actor.samplers.protocols import SamplerTimers


def test_taking_the_timers_begins_them_anew():
    timers = SamplerTimers()
    timers.act_time_s += 0.25
    timers.env_time_s += 0.5
    timers.num_steps += 3
    assert timers.take() == SamplerTimers(0.25, 0.5, 3)
    assert timers.take() == SamplerTimers(0.0, 0.0, 0)
