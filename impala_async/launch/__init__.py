"""Starting processes. The launchers know flags and exit codes, and nothing of what runs inside."""
