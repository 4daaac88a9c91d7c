"""Directories and object stores: how files are written durably, read, and copied to this node.

- `durable`: the steps of a durable write; `files`: reading a file that may be late, stale or on a server
- `urls`: is it a directory or a URL; `objects`, `objects_failures`: what a store holds, and why a call has failed
- `mirror`, `mirror_room`: chunks of a store, copied to this node, and the room for them
- `kept_samples`, `kept_room`: encoded samples, kept on this node for all of its processes
"""
