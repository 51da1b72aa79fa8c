"""Reinforcement-learning mathematics: pure functions on tensors, without state, threads or I/O."""
