"""The train door: one learner and its actors on this machine."""

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from impala_async import doors
from impala_async.errors import SHELL_SIGNAL, ConfigError, Exit, StartError, how_it_ended
from impala_async.launch.local import LocalRun
from impala_async.processes import hold, leave

if TYPE_CHECKING:
    from impala_async.runs.folder import RunFolder
    from impala_async.runs.start import RunFlags

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    parser = doors.new_parser(
        "train",
        "Train on this machine: one learner and train.num_actors actors. Without arguments: "
        "CartPole-v1, until the mean return of 100 episodes is 475.",
    )
    doors.add_run_flags(parser)
    told = "train with each seed, one after the other, in a folder of its own: 0-4, or a list"
    parser.add_argument("--seeds", type=doors.seeds_of, metavar="SEEDS", help=told)
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    hold()  # `impala_async.run` starts us

    def body() -> int:
        flags = doors.run_flags_of(args)
        if not args.seeds:
            code, _ = _train(flags, words)
            return code
        from impala_async.runs.seed_runs import SeedRuns

        return SeedRuns(flags, args.seeds, doors.command_of("train")).train(_train)

    return doors.run_door(body)


def _train(flags: "RunFlags", words: Sequence[str]) -> tuple[int, Sequence[int]]:
    """Run a learner and its actors; `words` are its flags, and `flags` the same, parsed. Returns
    the exit code, and the signals that asked for an end."""
    from impala_async.config.ranks import place_in, share_of
    from impala_async.learner.meeting import Meeting
    from impala_async.runs.start import check_run, chosen_config, settle

    words = [*words]
    with Meeting(place := place_in()):
        flags = settle(flags)
        if (chosen := chosen_config(flags)) != flags.config:
            flags = flags._replace(config=chosen)
            words += ["--config", str(chosen)]
        config, folder = check_run(flags)
        num_actors = share_of(config, place).train.num_actors
        folder.check_free()
    doors.start_logging(place.prefix)
    if flags.run_dir is None:
        words += ["--run-dir", str(folder.path)]
    # Where the settings name no port any will do, at a later resume too.
    for key in ("data", "weights"):
        if key not in config.bind.model_fields_set:
            words += ["--set", f"bind.{key}=tcp://127.0.0.1:*"]
    before = folder.read_json("summary.json")
    run = LocalRun(words, folder.path)
    try:
        code = run.run(num_actors)
    except (ConfigError, StartError):
        if not folder.exists():
            folder.withdraw(with_logs=True)
        raise
    return _code_of_end(run, code, folder, before, flags.is_resumed), run.heard


def _code_of_end(
    run: LocalRun,
    code: int,
    folder: "RunFolder",
    before: dict[str, Any] | None,
    is_resumed: bool,
) -> int:
    """The exit code of this door, where that of the run is `code`; `before` is the summary that lay
    there at its start. Tells of a death of which nothing else tells, and withdraws a run that has
    not begun."""
    is_refused = code in (Exit.CONFIG, Exit.TRY_AGAIN)
    if is_refused and folder.path.exists() and folder.is_taken():
        return code  # by another one at the same moment, as the learner has said
    if not (run.verdict or run.has_begun or folder.exists()):
        # Actors have said no more in their logs than that they were ended.
        folder.withdraw(with_logs=True)
    if run.verdict:
        return code
    if folder.peek_json("summary.json") not in (None, before):
        if code > SHELL_SIGNAL and not run.heard:
            logger.error("the learner %s; its summary is there", how_it_ended(code))
        return code
    # A learner that was told to end while it started, or found a setting wrong, has lost nothing,
    # and withdrawn a new run. Code of one's own may have ended it on the spot (os._exit).
    is_left = folder.exists() and not (is_resumed or run.has_begun)
    is_untold = is_left or (is_resumed and not (run.has_begun or run.heard))
    is_cut = code == Exit.DONE and (is_untold or folder.peek_json("service.json") is not None)
    is_told = code in (Exit.CONFIG, Exit.INTERRUPTED) and not (run.has_begun or is_left)
    if is_cut or not (is_told or code == Exit.DONE):
        doors.tell_death(code, folder, "train")
    return Exit.CONFIG if is_cut else code


if __name__ == "__main__":
    leave(main())
