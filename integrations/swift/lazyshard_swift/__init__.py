"""Sharded lazy data in ms-swift: the package that holds every touch of ms-swift, and nothing else.

`lazyshard_swift.pth` in site-packages imports this module at each start of the interpreter, so it does next to nothing:
it waits for ms-swift to be imported, and then loads `lazyshard_swift.hook`.
"""

import sys


def start(name, path=None, target=None):  # type: ignore[no-untyped-def]
    """Finds modules of ms-swift as `hook.find_spec` does, nothing else; without that module ms-swift continues.

    A finder of `sys.meta_path` in the least time: a class, and annotations, would cost a tenth of the whole.
    """
    if name[:5] == "swift" and name[5:6] in (".", ""):
        try:
            from lazyshard_swift.hook import find_spec
        except Exception:
            return None
        return find_spec(name, path, target)


vars(start).update(find_spec=start, lazyshard_swift=True)
sys.meta_path.insert(0, start)  # type: ignore[arg-type]
