"""`make bench ARGS="NAME ..."`: a benchmark by its name; without a name, what there is."""

import runpy
import sys

BENCHES = {
    "learning": "tasks with floors, and controls that must fail",
    "ingest": "the learner's receiving side beside a bare TCP socket",
    "samplers": "each sampler against bare environments",
    "peers": "training beside other systems, on the same cores",
    "end_to_end": "whole trainings: speed, start, time to 475, memory",
    "scaling": "actors against env steps trained per second",
    "host": "one actor with env workers beside an actor for each core",
    "evaluations": "trainings with evaluations beside trainings without",
    "passes": "the time to a return with numbers of passes, and with auto",
    "soak": "half an hour at full speed: does anything grow",
    "ranks": "an update that two learners take together, beside one of each alone",
    "learner": "the learner service beside a bare training loop",
    "codec": "messages to frames and back, beside msgpack and pickle",
    "digests": "whether a change has left every weight of short trainings as it was",
    "before": "trainings by this checkout and by an earlier one",
    "recovery": "seconds until training goes on after a process has died",
    "stragglers": "lockstep among ranks of unequal speed, with and without cuts",
    "weights": "how soon new weights are with the actors, and what that costs",
}


def main() -> int:
    """Hand over to the benchmark, which has a --help of its own."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHES:
        for known, what in BENCHES.items():
            print(f"{known:11} {what}")
        return 0 if name in ("", "-h", "--help") else 2
    sys.argv = [f"bench.{name}", *sys.argv[2:]]
    runpy.run_module(f"bench.{name}", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
