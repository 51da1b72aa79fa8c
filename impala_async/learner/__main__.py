"""The learner door: `python -m impala_async.learner`.

Runs on: main thread; torch is imported only when the flags and settings are good
"""

import errno
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from impala_async import doors, processes
from impala_async.errors import ConfigError, EnvError, SpacesError, how_it_ended
from impala_async.output import flush_output, say

if TYPE_CHECKING:
    from rich.console import Console

    from impala_async.config.ranks import Place
    from impala_async.config.run import RunConfig, StopSection
    from impala_async.learner.handoff import Captured
    from impala_async.learner.meeting import Meeting
    from impala_async.metrics.sinks import Sink
    from impala_async.runs.folder import RunFolder
    from impala_async.runs.start import RunFlags
    from impala_async.schema import Schema
    from impala_async.training.ranks import Ranks

logger = logging.getLogger(__name__)

# As many as a learner opens by itself, and some for its first actors.
LEAST_DESCRIPTORS = 64
# Below it torch may load, and abort the process later. The actors of `train` have the same limit.
LEAST_ADDRESSES_KB = 1 << 20
PROBE_TIMEOUT_S = 120.0
# The event loop and the learner thread wait no longer for each other while either runs Python; with
# Python's own 5 ms a small model's updates are a twentieth slower (bench.learner).
SWITCH_S = 0.0005
START_WORK = "torch is loaded, the environment tried, the learner built"
DESCRIBE = (sys.executable, "-m", "impala_async.envs.describe")


def main(argv: Sequence[str] | None = None) -> int:
    # A run that dies may leave one that computes.
    processes.leave_threads()
    parser = doors.new_parser("learner", "Train from the trajectories of any number of actors.")
    doors.add_run_flags(parser)
    args = parser.parse_args(argv)

    def body() -> int:
        processes.keep_freed_memory()
        sys.setswitchinterval(SWITCH_S)
        # Read when numpy is imported, which computes small updates: more threads would slow it.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        from impala_async.config.ranks import place_in, share_of
        from impala_async.learner.meeting import Meeting
        from impala_async.runs.start import check_run, settle

        with Meeting(place := place_in()) as meeting:
            flags = settle(doors.run_flags_of(args))
            config, folder = check_run(flags)
            share = share_of(config, place, has_actors=False)
            processes.hold()
            with processes.undone(folder.withdraw), ExitStack() as starting:
                # A start that fails leaves nothing behind, whatever the reason.
                starting.push(lambda kind, *_: folder.withdraw() if kind else None)
                if place.count > 1:
                    starting.enter_context(processes.terms_later())
                folder.begin(config)
                return _serve(share, folder, flags, starting, meeting, config)

    return doors.run_door(body)


def _serve(
    config: "RunConfig",
    folder: "RunFolder",
    flags: "RunFlags",
    starting: ExitStack,
    meeting: "Meeting",
    settings: "RunConfig",
) -> int:
    """`config`: the share of this rank of the settings."""
    from impala_async.learner.recorder import Recorder

    place = meeting.place
    console = doors.start_logging(place.prefix)
    with ExitStack() as stack:
        what = f"{START_WORK}, the other ranks met" if place.count > 1 else START_WORK
        starting.enter_context(doors.start_told_of(what))
        starting.enter_context(_within_limits())
        recorder = None
        if flags.record is not None:
            recorder = Recorder(flags.record, folder.run_id)
            stack.callback(recorder.withdraw)
            stack.enter_context(processes.undone(recorder.withdraw))
        probe = begin_probe(config, folder.keep_spaces) if config.env.probe == "learner" else None

        # The probe works while torch loads.
        import uvloop

        from impala_async.config.ranks import in_common
        from impala_async.learner.agreement import join_run
        from impala_async.learner.build import pick_device
        from impala_async.learner.service import LearnerService

        schema = probe() if probe else None  # the other ranks hear of one that fails
        pick_device(config.learner.device, place)  # and of one that has no GPU
        ranks = stack.enter_context(meeting.joined())
        start = join_run(ranks, folder, in_common(settings), config.bind)
        restored = _restored(ranks, folder, config) if flags.is_resumed or ranks.are_many else None
        sinks = _sinks(config, folder, console, restored, place)

        async def serve() -> int:
            return await LearnerService(
                config,
                folder,
                sinks,
                schema=schema,
                restored=restored,
                recorder=recorder,
                is_watched=True,
                ranks=ranks,
                **start._asdict(),
                settings=settings,
                on_ready=starting.close,
            ).run()

        earlier = folder.read_json("summary.json")
        code = uvloop.run(serve())
        summary = None if folder.is_gone() else folder.peek_json("summary.json")
        if summary is not None and summary != earlier and place.is_first:
            _show(summary, folder, config.stop, code, is_resumed=flags.is_resumed)
        return code


def _restored(ranks: "Ranks", folder: "RunFolder", config: "RunConfig") -> "Captured | None":
    from impala_async.learner.restoring import restore

    restored = restore(ranks, folder)
    if restored is not None:
        tell_rate(folder.load_config(), config, restored.progress.env_steps_trained)
    return restored


def tell_rate(before: "RunConfig", now: "RunConfig", env_steps: int) -> None:
    """Tell of a learning rate that goes on elsewhere: a later end of a run moves its schedule."""
    from impala_async.training.optimizer import scheduled

    was, is_now = (
        scheduled(each.algorithm.lr, each.algorithm.lr_end, each.schedule_env_steps, env_steps)
        for each in (before, now)
    )
    if was != is_now:
        end = None if now.algorithm.lr_end is None else now.schedule_env_steps
        then = f"its schedule ends at {end:,} now" if end else "it has no schedule now"
        text = "algorithm.lr goes on at %.3g, and was %.3g at env step %s: %s"
        logger.warning(text, is_now, was, f"{env_steps:,}", then)


@contextmanager
def _within_limits() -> Iterator[None]:
    """A start that has too few addresses or descriptors is one line: ConfigError."""
    from impala_async.wire.connections import most_descriptors

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit >> 10 < LEAST_ADDRESSES_KB:
        raise ConfigError(
            f"the address space of this process is limited to {limit >> 10} KB; a learner and each "
            f"actor need {LEAST_ADDRESSES_KB}: raise ulimit -v"
        )
    fix = f"a learner needs {LEAST_DESCRIPTORS} and two for each actor: raise ulimit -n"
    most = most_descriptors()
    if most < LEAST_DESCRIPTORS:  # ZeroMQ would abort the process
        raise ConfigError(f"only {most} files and sockets may be open in this process; {fix}")
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) not in (errno.EMFILE, errno.ENFILE):
            raise
        raise ConfigError(f"no more files and sockets can be opened ({error}); {fix}") from error


def begin_probe(
    config: "RunConfig", keep_spaces: Callable[[dict[str, Any]], None]
) -> "Callable[[], Schema]":
    """Start a child that makes the environment once and describes it, so that it is never imported
    here. The result waits for the schema, or raises EnvError with the child's one line; the spaces
    as gymnasium has them go to `keep_spaces`."""
    env = config.env
    # It is its own: a learner may have none, and ends without a word when it is killed.
    lifeline = processes.Lifeline()
    asked = {
        "env": env.model_dump(mode="json"),
        "sampler": config.actor.sampler,
        "policies": config.policies.model_dump(mode="json"),
    }
    # No pipe: what the environment forks may hold that open for ever.
    answer_fd = os.memfd_create("impala-async-spaces")
    child = lifeline.start(DESCRIBE, stdin=subprocess.PIPE, stdout=answer_fd)
    assert child.stdin is not None
    child.stdin.write(json.dumps(asked).encode())
    child.stdin.close()

    def wait() -> "Schema":
        try:
            child.wait(PROBE_TIMEOUT_S)
            # Two answers, where it forked and both processes went on, are read as well.
            answer = os.pread(answer_fd, os.fstat(answer_fd).st_size, 0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            text = f"was not made and tried within {PROBE_TIMEOUT_S:.0f} s; where it stands is told"
            raise EnvError(f"env.id: {env.id} {text} above") from None
        finally:
            lifeline.close()
            os.close(answer_fd)
        if not answer:
            raise EnvError(
                f"env.id: {env.id}: the process that made it {how_it_ended(child.returncode)}; "
                "what it printed, if anything, is above"
            )
        schema = _schema_of(config, answer)
        if child.returncode:
            how = how_it_ended(child.returncode)
            logger.warning("env.id: %s: the process that tried and closed it %s", env.id, how)
        keep_spaces(json.loads(answer)["spaces"])
        return schema

    return wait


def _schema_of(config: "RunConfig", answer: bytes) -> "Schema":
    from impala_async.envs.describe import read_answer
    from impala_async.envs.faults import with_id
    from impala_async.schema import Schema, recurrent_state

    env_id, model = config.env.id, config.model
    try:
        obs, action, num_columns = read_answer(answer)
        state = recurrent_state(model.core, model.core_size)
        schema = Schema(obs, action, config.trajectory.rows, state, config.policies.names)
        _ = schema.layout
    except EnvError as error:
        raise with_id(error, env_id) from error.__cause__
    except SpacesError as error:
        raise EnvError(f"env.id: {env_id}: {error}") from None
    if broken := list(config.broken_columns(num_columns)):
        raise ConfigError("\n".join(broken))
    return schema


def _sinks(
    config: "RunConfig",
    folder: "RunFolder",
    console: "Console",
    restored: "Captured | None",
    place: "Place",
) -> "list[Sink]":
    from impala_async.metrics.console import ConsoleSink
    from impala_async.metrics.sinks import ChosenSinks, JsonlSink, Run

    settings = config.model_dump(mode="json", by_alias=True)
    env_steps = restored.progress.env_steps_trained if restored else 0
    run = Run(folder.absolute, folder.run_id.hex(), settings, env_steps)
    kept = JsonlSink(
        folder.metrics, reserve=lambda: 2 * folder.checkpoint_bytes, is_gone=folder.is_gone
    )
    if not place.is_first:
        return [kept]
    return [kept, ConsoleSink(config.stop, console), ChosenSinks(config.report, run)]


def _show(
    summary: dict[str, Any],
    folder: "RunFolder",
    stop: "StopSection",
    code: int,
    *,
    is_resumed: bool,
) -> None:
    from impala_async.runs.summary import describe, draw_at_end

    reason = summary["exit_reason"]
    if reason == "actor_failed" and not summary["env_steps_trained"]:
        return  # whoever gave the run up says why
    flush_output()
    table = describe(summary, stop.mean_return, is_resumed=is_resumed)
    say(f"{table}\nrun folder: {folder.path}")
    if reason != "terminated":  # that leaves ten seconds
        processes.end_at_signal(code)
        goal = stop.eval_return if stop.mean_return is None else stop.mean_return
        curve = draw_at_end(summary, folder, goal)
        say(f"learning curve: {curve}")


if __name__ == "__main__":
    processes.leave(main())
