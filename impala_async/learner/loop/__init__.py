"""Everything of the learner that runs on its event loop."""
