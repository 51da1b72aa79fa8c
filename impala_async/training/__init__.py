"""One update: a batch on the device to loss, gradient and step; weights and checkpoints out.

No threads and no sockets here: whoever calls owns the thread.
"""
