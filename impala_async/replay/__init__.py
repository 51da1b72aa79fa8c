"""A recording played into a learner, which takes the player for an actor."""
