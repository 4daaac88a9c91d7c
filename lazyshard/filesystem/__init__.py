"""Checks of a filesystem shared by two mounts: `lazyshard verify-filesystem` controls one side on each."""
