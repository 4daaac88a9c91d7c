"""One run of the command: from the settings to a stream that has ended, or that can be resumed."""

from __future__ import annotations

import errno
import os
import signal
import stat
import time
from collections.abc import Callable

from lazyshard.errors import StreamEnded, StreamInvalid
from lazyshard.format import End
from lazyshard.storage import ChunkWriter
from lazyshard_producer.ended import find_end, leftovers, notes_on_end
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.jsonl import JsonLinesFile
from lazyshard_producer.loop import RowLoop
from lazyshard_producer.pace import Pace
from lazyshard_producer.position import FilePosition, decode_positions, plain_name, resume
from lazyshard_producer.progress import Display
from lazyshard_producer.sequence import SourceSequence
from lazyshard_producer.settings import Settings
from lazyshard_producer.source_file import check_committed, check_source_files, file_size, open_source_file
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import Outcome, Tally


def run(
    settings: Settings,
    display: Display,
    stop: Stop,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome | End:
    """Publishes the sources as a stream, from where the last run came to, and ends it.

    Whatever happens, what is published stays published, and the same settings go on from there. Nothing is made before
    the sources were found to be readable.

    Returns:
        How it came out; the end that was found if the stream had ended before.

    Raises:
        SettingInvalid, SourceRefused, RowInvalid: see there.
        LazyShardError, OSError: as `ChunkWriter` raises them.
    """
    check_out(settings.out)
    end = find_end(settings.out, settings.samples_per_chunk)
    if end is None:
        check_source_files(settings.sources, settings.out)
        try:
            writer = ChunkWriter(settings.out, settings.samples_per_chunk)
        except StreamEnded:
            # A crash had left only the end to be written, which the writer has done.
            end = find_end(settings.out, settings.samples_per_chunk)
            if end is None:
                raise
    if end is not None:
        for note in notes_on_end(settings.out, end, settings.sources):
            display.warn(note)
        return end
    try:
        return _Run(settings, display, stop, writer, clock, sleep).outcome()
    finally:
        # Does nothing if the run has closed it.
        writer.close(end=False, state="failed")


def check_out(out: str) -> None:
    """Checks that a directory can have this name, or has it.

    Raises:
        SettingInvalid: no file can have this name.
        StreamInvalid: something else than a directory has it.
        OSError: the filesystem failed.
    """
    try:
        mode = os.stat(out).st_mode
    except FileNotFoundError:
        if os.path.islink(out):
            raise StreamInvalid(f"{out}: expected a directory, found a link to nothing", directory=out) from None
        return
    except OSError as cause:
        if cause.errno == errno.ENAMETOOLONG:
            shown = f"{out[:40]}..."
            raise SettingInvalid(
                f"--out: a name of {len(out)} characters is too long: {shown}", option="--out"
            ) from None
        if cause.errno in (errno.ENOTDIR, errno.ELOOP):
            raise StreamInvalid(f"{out}: cannot be a directory: {cause.strerror}", directory=out) from None
        raise
    if not stat.S_ISDIR(mode):
        raise StreamInvalid(f"{out}: expected a directory (or nothing yet), found a file", directory=out)


class _Run:
    """A run with its writer open."""

    def __init__(
        self,
        settings: Settings,
        display: Display,
        stop: Stop,
        writer: ChunkWriter,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._settings = settings
        self._display = display
        self._stop = stop
        self._writer = writer
        self._clock = clock
        self._started = clock()
        self._paths = {plain_name(path): path for path in settings.sources}
        self._sources = SourceSequence(self._start_positions(), self._open, self._finished)
        self._bytes_total = sum(map(file_size, settings.sources))
        self._loop = RowLoop(
            self._sources,
            writer,
            Pace(settings.rate, self._started) if settings.rate is not None else None,
            stop,
            every_s=display.every_s,
            look=lambda: display.show(self._tally()),
            warn=display.warn,
            clock=clock,
            sleep=sleep,
        )

    def outcome(self) -> Outcome:
        """Does the run and closes the writer, unless something raises."""
        self._display.start(self._settings.out, self._tally())
        try:
            if self._loop.run():
                self._writer.close(end=True, source=self._sources.encoded())
                for note in leftovers(self._sources.positions(), self._settings.sources):
                    self._display.warn(note)
                return Outcome("finished", self._settings.out, self._tally())
            interrupted = self._stop.requested is signal.SIGINT
            outcome = Outcome("interrupted" if interrupted else "terminated", self._settings.out, self._tally())
            self._writer.close(end=False)
            return outcome
        finally:
            self._sources.close()

    def _start_positions(self) -> list[FilePosition]:
        """Returns where to start in each source, after a look at what is published of it."""
        committed: tuple[FilePosition, ...] = ()
        if self._writer.published_chunks:
            committed = decode_positions(self._writer.source, self._settings.out)
        positions = resume(committed, self._settings.sources)
        for position in committed:
            path = self._paths[position.path]
            with open_source_file(path) as file:
                check_committed(file, path, position)
        return positions

    def _open(self, position: FilePosition) -> JsonLinesFile:
        return JsonLinesFile(self._paths[position.path], position, self._settings.max_row_bytes)

    def _finished(self, position: FilePosition) -> None:
        if position.rows == 0:
            self._display.warn(f"{position.path}: holds no rows")

    def _tally(self) -> Tally:
        read, blank, duplicate = self._sources.totals()
        return Tally(
            samples=self._writer.samples,
            published=self._writer.published_samples,
            chunks=self._writer.published_chunks,
            new=self._loop.rows,
            blank=blank,
            duplicate=duplicate,
            bytes_read=read,
            bytes_total=self._bytes_total,
            seconds=self._clock() - self._started,
        )
