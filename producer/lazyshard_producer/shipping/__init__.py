"""Publishing to an object store: a run publishes into a directory of this machine, and a thread puts that to the store.

- `destination`: where a run publishes; `objects`: an object store as such; `spool`: the directory of this machine
- `shipper`: the thread that puts things, in order; `retiring`: deletes there, and what is still to be put
- `store`: what is in the store and who may put to it

See docs/object-storage-producer.md for the order of steps and what follows from it.
"""
