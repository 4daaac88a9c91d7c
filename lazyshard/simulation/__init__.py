"""How a run would go with so many ranks, such chunks, such windows and such a producer: arithmetic, no file is touched.

`setting` is what is simulated; `run` when chunks are published and each step begins; `costs` what that takes on disk
and asks of the filesystem; `order` how well it is shuffled; `outcome` all of it.
"""
