"""Python's collector looks at everything less often: an import of the stack, 6,000 modules, takes a fifth less.

Python imports this before anything else where the folder is on PYTHONPATH.
"""

import gc

gc.set_threshold(50_000, 50, 100)
