"""Environments: gymnasium spaces to our spec, one environment by name, batches of them."""
