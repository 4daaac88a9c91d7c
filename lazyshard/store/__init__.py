"""Directories and object stores: durable writes, reads, and local copies of objects."""
