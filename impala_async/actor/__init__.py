"""The actor process: environments, the sampler that steps them, the client that sends."""
