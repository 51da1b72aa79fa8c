"""The learner process: ingest, slots, ring, updates, weights out, reports."""
