"""How a run would go with so many ranks, such chunks, such windows and such a producer: arithmetic, no file is touched.

`setting` is what is simulated; `run` when chunks are published and each step begins, and what that takes.
"""
