"""Windows, timers and counters; the one registry of metric names; report lines and their sinks.

A number is owned by one thread, which freezes a snapshot of it once per report interval. The
reporter merges the snapshots into one report and hands it to the sinks.
"""
