"""The learner's name for the short cut, which it shares with a relay.

Runs on: event loop
"""

from impala_async.wire.local_link import LocalLink

__all__ = ["LocalLink"]
