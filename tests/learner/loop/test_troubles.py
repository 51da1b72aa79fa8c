from impala_async.learner.loop.troubles import ActorTroubles

HANG = {"hang_s": 12.4, "hang_in": 0, "hang_first": 3, "hang_last": 3, "env_time_ms": 1.0}
A, B = b"a" * 16, b"b" * 16


def test_a_hang_is_told_now_and_then_and_reported_with_its_seconds() -> None:
    told: list[str] = []
    now = 100.0
    troubles = ActorTroubles(told.append, lambda: now)
    troubles.hear_beat(A, 2, {"env_time_ms": 1.0})
    assert troubles.report({A, B})["actor/hang"] is None
    troubles.hear_beat(A, 2, HANG)
    troubles.hear_beat(B, 5, HANG | {"hang_s": 10.0, "hang_in": 1, "hang_last": 6})
    assert told == [
        "environment 3 of actor 2 has been in step for 12 s",
        "one of environments 3 to 6 of actor 5 has been in reset for 10 s",
    ]
    now = 104.0
    troubles.hear_beat(A, 2, HANG | {"hang_s": 16.4})
    assert len(told) == 2
    hang = troubles.report({A, B})["actor/hang"]
    assert hang == "environment 3 of actor 2 has been in step for 16 s"
    now = 111.0
    troubles.hear_beat(A, 2, HANG | {"hang_s": 23.4})
    assert told[2] == "environment 3 of actor 2 has been in step for 23 s"


def test_a_hang_that_is_over_or_whose_session_is_is_forgotten() -> None:
    troubles = ActorTroubles(lambda line: None, lambda: 0.0)
    troubles.hear_beat(A, 2, HANG)
    troubles.hear_beat(B, 5, HANG)
    troubles.hear_beat(A, 2, {})
    assert "actor 5" in str(troubles.report({A, B})["actor/hang"])
    assert troubles.report({A})["actor/hang"] is None


def test_the_last_death_is_kept() -> None:
    troubles = ActorTroubles(lambda line: None, lambda: 0.0)
    assert troubles.report(set())["actor/last_death"] is None
    assert troubles.hear_death(2, "EnvError: it broke") == "it died of EnvError: it broke"
    assert troubles.report(set())["actor/last_death"] == "actor 2 died of EnvError: it broke"
