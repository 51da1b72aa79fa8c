"""The export door: the policy of a checkpoint as a file of ONNX, or of torch.export."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from impala_async.doors import new_parser, run_door, start_told_of, typed_path
from impala_async.envs.faults import tell_stderr
from impala_async.files import check_file, unwritten, write_whole
from impala_async.processes import leave, result_wanted

if TYPE_CHECKING:
    from impala_async.schema import ArraySpec


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("export", "Write a trained policy for programs without this package.")
    parser.add_argument("path", type=Path, help="a run folder, or one checkpoint in it")
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--onnx", type=typed_path, metavar="FILE", help="as ONNX")
    kinds.add_argument("--torch", type=typed_path, metavar="FILE", help="as torch.export saves it")
    parser.add_argument("--policy", metavar="NAME", help="the member of a team")
    args = parser.parse_args(argv)
    with result_wanted():
        return run_door(lambda: _export(args))


def _export(args: argparse.Namespace) -> int:
    flag, file = ("--onnx", args.onnx) if args.onnx else ("--torch", args.torch)
    check_file(flag, file)
    # Code of the user's own may change the current folder; and a link stays where it is.
    whole = file.resolve()
    with start_told_of("torch and its exporter are loaded, the policy is traced", tell_stderr):
        from impala_async.library.exported import as_onnx, as_torch, check_needs, trace
        from impala_async.library.loaded_policy import open_policy

        check_needs(is_onnx=args.onnx is not None)
        opened = open_policy(args.path, args.policy)
        graph = trace(opened)
        data = as_onnx(graph) if args.onnx else as_torch(graph)
    try:
        write_whole(whole, data)
    except OSError as error:
        raise unwritten(flag, file, error) from None
    print(f"{file}: the policy of {opened.checkpoint}, for N observations")
    for title, arrays in (("takes", graph.inputs), ("gives", graph.outputs)):
        for array in arrays:
            print(f"  {title}  {_described(array)}")
    return 0


def _described(array: "ArraySpec") -> str:
    return f"{array.name:<20} {array.dtype} [{', '.join(['N', *map(str, array.shape)])}]"


if __name__ == "__main__":
    leave(main())
