"""Sharded lazy data in ms-swift: the package that holds every touch of ms-swift, and nothing else.

`lazyshard_swift.pth` in site-packages imports this module at each start of the interpreter, so it does next to nothing:
it waits for ms-swift to be imported, and then loads `lazyshard_swift.hook`. That waits in turn for the modules of
ms-swift that are extended, and only then loads the rest.
"""

import sys


class Start:
    """A finder in the first place of `sys.meta_path` that finds nothing, and makes way for the hook's own."""

    lazyshard_swift = True

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Installs the hook at the first import of ms-swift; whatever fails there, ms-swift goes on."""
        if name[:5] == "swift" and name[5:6] in (".", ""):
            try:
                from lazyshard_swift.hook import install

                install()
            except Exception:
                pass


sys.meta_path.insert(0, Start())
