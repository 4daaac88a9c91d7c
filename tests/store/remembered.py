"""Has botocore parse its files of facts once in a process and its forks, and not once for each store."""

from functools import cache, partial
from importlib import import_module
from typing import Any

_loader: Any = import_module("botocore.loaders").JSONFileLoader
_load_file = cache(partial(_loader.load_file, _loader()))
_loader.load_file = lambda _, path: _load_file(path)


def load() -> None:
    """Has a nursery load what a store needs."""
    import_module("aiobotocore.client")
    session = import_module("botocore.session").get_session()
    session.create_client("s3", "us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
