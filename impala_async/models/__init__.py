"""The networks: torsos, the actor-critic around them, and how one is built from a config."""
