"""Whether it learns: tasks with a floor each, and controls that must fail.

`python -m bench.learning --suite quick|full` trains every task with several seeds, as a user would,
and compares with the floors in `cases.py`.
"""
