"""Windows, timers and counters; the one registry of metric names; report lines and their sinks.

A number is owned by one thread, which pushes into a `WindowStat`, a `TimerStat` or a `Counters`
and freezes a snapshot of it once per report interval. The reporter merges the snapshots under
the names of `metrics.names` into one report and hands it to the sinks. Nothing in this room
imports torch or a socket library, and only `sinks.py` starts threads.
"""
