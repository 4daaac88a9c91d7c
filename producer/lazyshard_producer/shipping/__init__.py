"""Publishing to an object store.

A run publishes into a directory of this machine, the spool, and what is durable there is put to the store in the same
order.

```
destination           where a run publishes, and what it has to do for that: a directory, or an object store
  object_opening      takes a stream in a store over, or looks at it
  object_destination  what a run has of it then
  spool               the directory of this machine and what else lies beside it
  ownership           which producer may put to the store
  found, restoring    what is in the store; a spool made of it
  shipper             the thread that puts things, in order
  backlog             what is still to be put
  chunks              how one chunk is put, and objects that are replaced
  tries               repeats what a store fails to do, and gives up
  retiring            deletes in the store, and copies the cursors from there
  object_shelf        consumers, deletion and sizes, for `--max-ahead` and `--retain`
```

See docs/object-storage-producer.md for the order of steps and what follows from it.
"""
