"""One update: a batch on the device to loss, gradient and step; no threads, no sockets."""
