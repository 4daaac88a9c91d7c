"""Directories and object stores: how files are written durably, read, and copied to this node."""
