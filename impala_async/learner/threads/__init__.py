"""Everything of the learner that runs on the learner thread and the loader thread."""
