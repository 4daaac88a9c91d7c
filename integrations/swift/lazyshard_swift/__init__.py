"""Sharded lazy data in ms-swift: the package that holds every touch of ms-swift, and nothing else.

Nothing is hooked yet: importing this package changes nothing.
"""
