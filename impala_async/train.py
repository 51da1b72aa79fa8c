"""The train door: one learner and its actors on this machine."""

import argparse
import sys
from collections.abc import Sequence

from impala_async import doors
from impala_async.config.packaged import packaged_configs
from impala_async.errors import Exit
from impala_async.launch.local import LocalRun
from impala_async.processes import hold, leave


def main(argv: Sequence[str] | None = None) -> int:
    parser = doors.new_parser(
        "train",
        "Train on this machine: one learner and train.num_actors actors. Without arguments: "
        "CartPole-v1, until the mean return of 100 episodes is 475.",
    )
    doors.add_run_flags(parser)
    flags = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(flags)
    return doors.run_door(lambda: _train(args, flags))


def _train(args: argparse.Namespace, flags: list[str]) -> int:
    hold()  # `impala_async.run` starts us
    from impala_async.config.load import names_an_env

    if not (args.resume or args.config or names_an_env(args.overrides)):
        args.config = packaged_configs()["cartpole"]
        flags += ["--config", str(args.config)]
    config, folder = doors.check_run(args)
    folder.check_free()
    doors.start_logging()
    if args.run_dir is None:
        flags += ["--run-dir", str(folder.path)]
    # Where the settings name no port any will do, at a later resume too.
    for key in ("data", "weights"):
        if key not in config.bind.model_fields_set:
            flags += ["--set", f"bind.{key}=tcp://127.0.0.1:*"]
    before = folder.read_json("summary.json")
    run = LocalRun(flags, folder.path)
    code = run.run(config.train.num_actors)
    if code == Exit.CONFIG and folder.path.exists() and folder.is_taken():
        return code  # by another one at the same moment, as the learner has said
    if not (run.verdict or run.has_begun or folder.exists()):
        # Actors have said no more in their logs than that they were ended.
        folder.withdraw(with_logs=True)
    if run.verdict or folder.peek_json("summary.json") not in (None, before):
        return code
    # A learner that was told to end while it started, or found a setting wrong, has lost nothing,
    # and withdrawn a new run. Code of one's own may have ended it on the spot (os._exit).
    is_left = folder.exists() and not (args.resume or run.has_begun)
    is_cut = code == Exit.DONE and (is_left or folder.peek_json("service.json") is not None)
    is_told = code in (Exit.CONFIG, Exit.INTERRUPTED) and not (run.has_begun or is_left)
    if is_cut or not (is_told or code == Exit.DONE):
        doors.tell_death(code, folder, "train")
    return Exit.CONFIG if is_cut else code


if __name__ == "__main__":
    leave(main())
