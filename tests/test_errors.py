"""The exception tree and its exit codes, as they are documented and relied upon."""

from impala_async import errors
from impala_async.errors import ImpalaAsyncError, ProtocolError

EXIT_CODES = {
    "ImpalaAsyncError": 70,
    "ConfigError": 2,
    "EnvError": 2,
    "EnvHangsError": 70,
    "SpacesError": 2,
    "CheckpointError": 2,
    "RecordingError": 2,
    "RunOver": 0,
    "ProtocolError": 70,
    "MismatchError": 78,
    "NotAllowedError": 77,
    "UnreachableError": 75,
    "RankError": 75,
    "InUseError": 75,
    "StartError": 75,
    "ServiceError": 70,
}
TREE = {name: getattr(errors, name) for name in EXIT_CODES}


def test_every_exception_has_its_code_and_says_what_it_is():
    found = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert found == TREE
    assert {name: kind.exit_code for name, kind in TREE.items()} == EXIT_CODES
    assert {*errors.Exit} == {*EXIT_CODES.values(), 130}
    assert all(kind.__dict__.get("__doc__") for kind in TREE.values())
    bases = {kind.__bases__ for name, kind in TREE.items() if name != "SpacesError"}
    assert bases == {(Exception,), (ImpalaAsyncError,)}
    assert errors.SpacesError.__bases__ == (errors.ConfigError,)


def test_a_protocol_error_has_a_reason_to_count_and_a_text_to_read():
    error = ProtocolError("wrong_size", "12 bytes, not 13")
    assert (error.reason, str(error)) == ("wrong_size", "12 bytes, not 13")
    assert str(ProtocolError("wrong_size")) == "wrong_size"


def test_an_exit_code_is_told_in_words():
    assert errors.how_it_ended(-9).startswith("was killed (SIGKILL), by hand, or by the system ")
    for code, told in (
        *((0, "ended with exit code 0"), (130, "was interrupted (SIGINT)")),
        (-40, "died of signal 40"),
        # As a shell has it.
        *((-6, "died of SIGABRT"), (134, "died of SIGABRT")),
    ):
        assert errors.how_it_ended(code) == told


def test_what_others_wrote_is_one_line():
    assert errors.plain("an actor, Ä") == "an actor, Ä"
    assert errors.plain("one\ntwo\x1b[2J") == "one\\ntwo\\x1b[2J"
