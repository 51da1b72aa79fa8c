"""All that scripts and notebooks use by `import impala_async`: a trained policy, and runs."""
