"""The relay process: one for all actors of a host, between them and a learner elsewhere."""
