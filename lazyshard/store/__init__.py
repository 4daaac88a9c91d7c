"""Directories and object stores: how files are written durably, read, and copied to this node.

- `durable`: the steps of a durable write; `files`: reading a file that may be late, stale or on a server
- `urls`: is it a directory or a URL; `objects`, `objects_calls`, `objects_failures`: what a store holds
- `mirror` with `mirror_*`: chunks of a store, copied to this node
- `kept_samples` with `kept_file`, `kept_room`: encoded samples, kept on this node for all of its processes
- `node_file`: a small record that the processes of one node share
"""
