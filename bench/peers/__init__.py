"""This package's training beside that of others, in turns, on the same cores.

`__main__` is the command. `run_*.py` run in virtual environments of their own, which have no
impala_async: of this package they import `games` and `say`, and nothing else.
"""
