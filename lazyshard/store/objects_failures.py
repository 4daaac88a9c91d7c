"""What a failed call to an object store means: decided from the error alone, whichever driver of fsspec raised it."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from lazyshard.errors import redact

FIRST_PAUSE_S: Final = 0.1
_LAST_PAUSE_S: Final = 5.0

_PASSING_STATUS: Final = (408, 409, 425, 429)
"""Of the client's faults, by their numbers: too slow, somebody else was writing it just then, too often."""

_DRIVERS: Final = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "azure", "adlfs", "requests", "urllib3")
"""Libraries whose errors come from a connection, unless they say otherwise."""

_NO_CREDENTIALS: Final = (
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"),
    *("ProfileNotFound", "ConfigNotFound", "DefaultCredentialsError", "ClientAuthenticationError"),
)
_OWN_MISTAKES: Final = ("ParamValidationError", "InvalidEndpointURLError", "NoRegionError", "UnknownServiceError")

_CREDENTIALS_ADVICE: Final = (
    "Give this process credentials of the store: for S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or "
    "a role of the machine"
)
_RIGHTS_ADVICE: Final = (
    "See to the credentials and their rights: reading takes s3:GetObject and s3:ListBucket (without the latter S3 says "
    "403 of what is only not there yet), cursors and a producer take s3:PutObject"
)
_DRIVER_ADVICE: Final = (
    "Install what reads such URLs: pip install 'lazyshard[objects]' for s3://, fsspec's driver for others"
)
_BUCKET_ADVICE: Final = "Make the bucket, or correct the URL or the endpoint (AWS_ENDPOINT_URL for S3)"
_ENDPOINT_ADVICE: Final = "An endpoint is a URL, like http://host:9000: correct AWS_ENDPOINT_URL"
_REQUEST_ADVICE: Final = "Correct the URL, or the settings of the store"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has failed.

    Attributes:
        kind: "missing": there is no such object; "passing": worth another try; "refused": it never will be; "unknown":
            none of the store's errors.
        words: what the store or its driver said, on one line.
        advice: what to do, where it was refused.
        status: of the HTTP answer, None where there is none.
        code: the store's own word for it, empty where there is none.
    """

    kind: Literal["missing", "passing", "refused", "unknown"]
    words: str
    advice: str = ""
    status: int | None = None
    code: str = ""


def next_pause(pause: float) -> float:
    """Returns the pause in seconds after one of so many: twice as long, and not the same for all who were refused."""
    return min(_LAST_PAUSE_S, 2 * pause) * random.uniform(0.75, 1.0)  # noqa: S311


def why_failed(error: BaseException, url: str = "") -> Failure:
    """Returns what an error of a driver means.

    Args:
        error: which a driver has raised.
        url: of the store, whose credentials are left out of the words, as are those of any URL in them.
    """
    chain = list(_chain(error))
    status, code = _answer(chain)
    words = redact(_words(error, code), url)
    names = {type(one).__name__ for one in chain}
    if code == "NoSuchBucket":
        return Failure("refused", words, _BUCKET_ADVICE, status, code)
    if isinstance(error, ImportError):
        return Failure("refused", words, _DRIVER_ADVICE)
    if not names.isdisjoint(_NO_CREDENTIALS):
        return Failure("refused", words, _CREDENTIALS_ADVICE, status, code)
    if isinstance(error, ValueError) and "Invalid endpoint" in words:
        return Failure("refused", words, _ENDPOINT_ADVICE)
    if not names.isdisjoint(_OWN_MISTAKES) or (isinstance(error, ValueError) and "Protocol not known" in words):
        return Failure("refused", words, _DRIVER_ADVICE if isinstance(error, ValueError) else _REQUEST_ADVICE)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)) or status == 404:
        return Failure("missing", words, "", status, code)
    if isinstance(error, PermissionError) or status in (401, 403):
        return Failure("refused", words, _RIGHTS_ADVICE, status, code)
    if status is not None and status < 500 and status not in _PASSING_STATUS:
        # One that was read only in part has the status of success.
        passing = status < 300
        return Failure("passing" if passing else "refused", words, "" if passing else _REQUEST_ADVICE, status, code)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSYS):
        return Failure("refused", words, _REQUEST_ADVICE, status, code)
    known = isinstance(error, (OSError, EOFError)) or any(
        type(one).__module__.partition(".")[0] in _DRIVERS or "Timeout" in type(one).__name__ for one in chain
    )
    return Failure("passing" if known else "unknown", words, "", status, code)


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__


def _answer(chain: list[BaseException]) -> tuple[int | None, str]:
    """Returns the status and the code of the store's answer, as far as the errors have kept them."""
    for one in chain:
        answer: Any = getattr(one, "response", None)
        if isinstance(answer, dict):
            code = str(answer.get("Error", {}).get("Code", ""))
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return (int(code) if status is None and code.isdigit() else status), code
        status = getattr(one, "status", None)
        # What aiohttp calls a code is its own verdict on an answer that was cut, and no server's.
        if status is None and not type(one).__module__.startswith("aiohttp."):
            status = getattr(one, "code", None)
        if isinstance(status, int):
            return status, ""
    return None, ""


def _words(error: BaseException, code: str) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if not code or code in text else f"{code}: {text}"
