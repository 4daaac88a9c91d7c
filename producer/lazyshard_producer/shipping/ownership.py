"""Which producer may put to a stream in an object store: the object `stream.owner`, taken under a condition.

A start always takes the stream over, as it does in a directory: there is no lease to wait for, and nothing to renew.
The one that was there before finds itself fenced at its next look, and could not publish a chunk twice if it did not
look: a seal is put only where there is none.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import NamedTuple

from lazyshard.errors import OwnerInvalid, ProducerFenced
from lazyshard.format.names import OWNER
from lazyshard.format.owner import Owner
from lazyshard.store.objects import ObjectStore
from lazyshard_producer.shipping.tries import Tries


class FoundOwner(NamedTuple):
    """What is in the store as the owner.

    Attributes:
        owner: None where there is none, or none that can be read.
        tag: of the object; None where there is none.
    """

    owner: Owner | None
    tag: str | None


def find_owner(store: ObjectStore, tries: Tries) -> FoundOwner:
    """Returns the owner in the store. Raises as `Tries` does."""
    try:
        data, tag = tries(lambda: store.get_tagged(OWNER))
    except FileNotFoundError:
        return FoundOwner(None, None)
    try:
        return FoundOwner(Owner.decode(data, store.name_of(OWNER)), tag)
    except OwnerInvalid:
        return FoundOwner(None, tag)


def next_owner(before: Owner | None, now: float) -> Owner:
    """Returns this process as the owner after another one; `now` is in seconds since 1970."""
    return Owner(
        epoch=before.epoch + 1 if before else 1,
        token=secrets.token_hex(8),
        host=socket.gethostname() or "unknown",
        pid=os.getpid(),
        since=now,
    )


class Ownership:
    """The right to put to the stream.

    Args:
        store: of the stream.
        tries: calls it.
        owner: this producer.
    """

    def __init__(self, store: ObjectStore, tries: Tries, owner: Owner) -> None:
        self._store = store
        self._tries = tries
        self.owner = owner

    def take(self, found: FoundOwner) -> None:
        """Takes the stream from whoever had it when it was looked at.

        Raises:
            ProducerFenced: somebody else has taken it since that look.
        """
        data, tag = self.owner.encode(), found.tag
        if tag is None:
            taken = self._tries(lambda: self._store.put_new(OWNER, data))
        else:
            taken = self._tries(lambda: self._store.put_matching(OWNER, data, tag))
        # A try whose answer was lost may have done it.
        if not taken or not self._store.conditional:
            self.check()

    def check(self) -> None:
        """Looks whether the stream is still ours.

        Raises:
            ProducerFenced: another producer has taken it over, or the object is gone.
        """
        found = find_owner(self._store, self._tries)
        if found.owner == self.owner:
            return
        url = self._store.url
        if found.owner is None:
            raise ProducerFenced(
                f"{self._store.name_of(OWNER)}: is gone or cannot be read: somebody removes the stream, or has changed "
                f"that object; this producer stops, since it cannot know any more whether the stream is its own. If "
                f"the stream is still wanted, start it again: it goes on after the last sealed chunk",
                directory=url,
            )
        raise ProducerFenced(
            f"{url}: {found.owner} has taken this stream over; this producer stops. Nothing is lost: the other one "
            f"goes on after the last sealed chunk",
            directory=url,
            holder=str(found.owner),
        )
