"""The wire: what learner and actors say to each other, and how it travels."""
