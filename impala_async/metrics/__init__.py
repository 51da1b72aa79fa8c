"""Windows, timers and counters; the one registry of metric names; report lines and their sinks."""
