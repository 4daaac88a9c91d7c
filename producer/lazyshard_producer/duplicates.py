"""Keys that an object names twice, under the name by which this package calls them."""

from lazyshard.format import has_duplicate_keys as names_a_key_twice

__all__ = ["names_a_key_twice"]
