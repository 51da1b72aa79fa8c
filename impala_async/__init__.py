"""impala-async: an asyncio IMPALA/APPO learner service with actors anywhere."""

__version__ = "0.1.0"
