"""Sharded lazy data in ms-swift. Only this package touches ms-swift.

`lazyshard_swift.pth` in site-packages imports this module at each start of the interpreter, so it does almost nothing:
it waits until ms-swift is imported, and then loads `lazyshard_swift.hook`.
"""

import sys


def start(name, path=None, target=None):  # type: ignore[no-untyped-def]
    """Finds modules of ms-swift by `hook.find_spec`, and nothing else; without the hook ms-swift runs unextended.

    A minimal finder for `sys.meta_path`: a class, and annotations, would add a tenth to the import time.
    """
    if name[:5] == "swift" and name[5:6] in (".", ""):
        try:
            from lazyshard_swift.hook import find_spec
        except Exception:
            return None
        return find_spec(name, path, target)


vars(start).update(find_spec=start, lazyshard_swift=True)
sys.meta_path.insert(0, start)  # type: ignore[arg-type]
