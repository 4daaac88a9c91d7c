"""The page of `lazyshard watch` in a real browser: what it shows, and that it does as it is told by nobody's names."""

from __future__ import annotations

import html
import json
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from lazyshard.cli.watch import page_answers, watch_values
from lazyshard.cli.watch_page import Shown, WatchPage
from lazyshard.cli.watch_server import LastLook, WatchServer
from lazyshard.format.blend_state import BlendShare
from lazyshard.format.seal import MixedSource
from lazyshard.inspection.disk_use import DiskUse, Lines
from lazyshard.inspection.history import History, count_refusals
from lazyshard.inspection.outlook import Outlook
from lazyshard.stream.consumers import Consumer
from tests.cli.chromium import needs_chromium, open_page, screenshot
from tests.cli.looks import HEAD, NOW, consumer, outlook, survey, told
from tests.cli.watched import watch
from tests.inspection.surveyed import checkpoint, reads
from tests.stream.streams import produce

pytestmark = [needs_chromium, pytest.mark.timeout(300)]

HOSTILE: Final = "<img src=x onerror=document.title='owned'>\u202egnp"

MIXTURE: Final = (
    MixedSource("/data/crawl/web-*.jsonl", 0.7, 0.7004, 8404, False),
    MixedSource("/data/incoming", 0.3, 0.2996, 3596, False),
    MixedSource("/data/seed.jsonl", 0.0, 0.0, 0, True),
)


class Scene:
    """A server whose stream is made up."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.shown: Shown | None = None
        self.later: Outlook | None = None
        answers = page_answers(WatchPage(), lambda: self.values, lambda: self.shown)
        for path, make in [(path, answers[path].make) for path in ("/now", "/history")]:
            answers[path] = replace(answers[path], make=partial(self._later, make))
        self._server = WatchServer("127.0.0.1", 0, answers)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url, self.answers = self._server.url, self._server.answers

    def show(self, found: Outlook | None, **values: Any) -> None:
        facts = LastLook(found, values.get("error"), NOW, values.get("silent_since"), values.get("missing", False))
        self.values = watch_values(Path("/shared/streams/chat-distillation"), 2.0, facts, NOW + 95)

    def _later(self, make: Callable[[], bytes]) -> bytes:
        """Goes on to what is to be shown once the page asks again."""
        if self.later is not None:
            self.show(self.later)
            self.shown = Shown(History(None, refusals=REFUSALS), {}, 2)
        return make()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def lines() -> Iterator[bytes]:
    for number in range(3):
        entry = {"source": "/data/a.jsonl", "line": number + 1, "reason": f"byte {number}: {HOSTILE}"}
        yield json.dumps(entry).encode() + b"\n"


REFUSALS: Final = count_refusals(lines(), complete=True)


def blending(one: Consumer) -> Consumer:
    assert one.cursor is not None
    shares = (BlendShare("/shared/streams/chat", 0.8, 9270), BlendShare("/shared/streams/code", 0.2, 1770))
    return replace(one, cursor=replace(one.cursor, blend=shares))


def busy() -> Outlook:
    """A run as it is most of the time: a reader that is quicker than the producer, and one that is done."""
    first = survey(consumers=(told(consumed=10_800, done=1080, needs=1104, ranks=4, window=2),))
    head = replace(HEAD, rate=412.5, updated_at=NOW + 8)
    later = survey(
        head=head,
        census={"retired": 940},
        consumers=(
            consumer("eval", consumed=12_000, done=1200, at=NOW - 700),
            blending(told(consumed=11_040, done=1104, needs=1160, ranks=4, window=2, at=NOW + 6)),
        ),
        unread_since={"eval": NOW - 21, "sft": NOW - 310},
        disk=DiskUse(10_340_000_000, False, 8.4e6, ()),
        free=210_000_000_000,
        quarantine=Lines(12, 3456, True),
        mixture=MIXTURE,
        looked_at=NOW + 9,
    )
    return outlook(first, later)


def starving() -> Outlook:
    """A producer that waits, and a reader that does: each in words."""
    note = "--max-disk 2.0 GB: 1,234 chunks take 2.0 GB, and no checkpoint lets any of them be deleted"
    return outlook(
        survey(
            head=replace(HEAD, state="waiting", note=note, rate=0.0),
            consumers=(
                told(consumed=12_000, done=1200, needs=1240, ranks=4, window=2),
                consumer("old", problem="torn"),
            ),
            free=None,
        )
    )


def shown(document: str, part: str = "body") -> str:
    """The text of a document, in a line."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", document, flags=re.DOTALL)
    if part != "body":
        text = text[text.index(f'id="{part}"') :]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def test_busy_run(scene: Scene) -> None:
    scene.show(busy())
    document, console = open_page(scene.url, "--dump-dom")
    assert console == []
    text = shown(document)
    for part in (
        "/shared/streams/chat-distillation running",
        "the producer is 74 chunks ahead of the slowest reader, 'sft'.",
        "Published 1,234 chunks 12,340 samples, 940 chunks deleted, live",
        "Rate 412.5 samples/s published",
        "Until a reader starves",
        "Disk ≈ 10.3 GB 210.0 GB free",
        "Quarantine 12 rows refused so far",
        "deleted 940",
        "being read 8",
        "Close up: chunks 1,136 to 1,231",
        "process 12345 on node7",
        "heartbeat 1 s old",
        "reads now chunks 1,152 to 1,159, by 4 ranks",
        "supply 74 chunks ahead of it; told 3 s ago",
        "checkpoint 11,040 samples, done with 1,104 chunks; 3 s old",
        "/data/crawl/web-*.jsonl 70.0 % so far, 8,404 rows; weight 70.0 %",
        "/data/seed.jsonl 0.0 % so far, 0 rows; finished",
    ):
        assert part in text, text
    cells = re.findall(r'<span class="reading" title="([^"]*)">([^<]*)</span>', document)
    assert [number for _, number in cells] == ["0", "1", "2", "3", "0", "1", "2", "3"]
    assert cells[1][0] == "chunk 1,153: being read (sft, rank 1)"


def test_waiting_producer_and_reader(scene: Scene) -> None:
    scene.show(starving())
    text = shown(open_page(scene.url, "--dump-dom").document)
    for part in (
        "Until a reader starves now sft waits for 6 chunks",
        "waits for --max-disk 2.0 GB: 1,234 chunks take 2.0 GB, and no checkpoint lets any of them be deleted",
        "sft waits for data",
        "has to wait it waits now",
        "waits for chunks 1,234 to 1,239, to read chunks 1,232 to 1,239, by 4 ranks",
        "awaited 6",
        "Problems consumer 'old': torn; it counts as done with nothing",
        "free space not known",
    ):
        assert part in text, text


def test_only_a_reader_that_has_to_wait_soon_is_warned_of(scene: Scene) -> None:
    reads_on = [told(consumed=1000, done=100, needs=needs, ranks=1, at=NOW + needs) for needs in (100, 105)]
    for chunks, kind in ((110, "wait"), (12_000, "good")):
        head = replace(HEAD, chunks=chunks, samples=10 * chunks, rate=0.0, state="idle")
        census = {"chunks": chunks, "samples": 10 * chunks}
        looks = [survey(head=head, census=census, consumers=(one,), looked_at=NOW + 200) for one in reads_on]
        scene.show(outlook(*looks))
        document, _ = open_page(scene.url, "--dump-dom")
        assert re.search(rf'<span class="pill {kind}">has to wait in', document), shown(document)


def test_rate_of_a_silent_producer_comes_with_its_age(scene: Scene) -> None:
    scene.show(outlook(survey(head=replace(HEAD, updated_at=NOW - 12))))
    assert "Rate 50.0 samples/s published, told 12 s ago" in shown(open_page(scene.url, "--dump-dom").document)


def test_names_and_notes_are_text(scene: Scene) -> None:
    found = survey(
        head=replace(HEAD, state="failed", note=HOSTILE, host=HOSTILE),
        consumers=(told(HOSTILE, needs=4), consumer("b", problem=HOSTILE)),
        mixture=(MixedSource(HOSTILE, 1.0, 1.0, 1, False),),
        problems=(HOSTILE,),
    )
    scene.show(outlook(found), error=HOSTILE)
    document, console = open_page(scene.url, "--dump-dom")
    assert console == []
    assert "<title>failed · /shared" in document
    assert "<img" not in document
    text = shown(document, "now")
    assert text.count("<img src=x onerror=document.title='owned'>\\u202egnp") >= 7
    assert "\u202e" not in document


def test_blend_of_a_consumer(scene: Scene) -> None:
    one = told(consumed=100, done=10, needs=20)
    assert one.cursor is not None
    blended = replace(one.cursor, blend=(BlendShare("/data/chat", 0.8, 300), BlendShare(HOSTILE, 0.2, 100)))
    scene.show(outlook(survey(consumers=(replace(one, cursor=blended),))))
    document, console = open_page(scene.url, "--dump-dom")
    assert console == []
    assert "<img" not in document
    text = shown(document)
    assert "Blend, as of its last checkpoint /data/chat 75.0 % so far, 300 samples; weight 80.0 %" in text
    assert "\\u202egnp 25.0 % so far, 100 samples; weight 20.0 %" in text


def test_a_million_chunks_are_few_elements(scene: Scene) -> None:
    head = replace(HEAD, chunks=1_000_000, samples=10_000_000)
    million = {"chunks": 1_000_000, "samples": 10_000_000, "retired": 600_000}
    reads_now = told(consumed=6_999_552, done=700_000, needs=800_256, ranks=512)
    scene.show(outlook(survey(head=head, census=million, consumers=(reads_now,))))
    document, console = open_page(scene.url, "--dump-dom")
    assert console == []
    assert "being read 512" in shown(document)
    assert document.count("<") < 1000
    assert len(document) < 100_000


def test_page_follows_the_stream_and_takes_history_only_where_that_has_changed(scene: Scene) -> None:
    scene.show(busy())
    scene.later = starving()
    document, console = open_page(scene.url, "--dump-dom")
    scene.later, scene.shown = None, None
    assert console == []
    text = shown(document)
    assert "sft waits for 6 chunks" in text
    assert "<title>waiting · /shared" in document
    assert "Refused rows, by reason rows reason, and where it was met first 3 byte 0: <img src=x" in text
    assert "/data/a.jsonl, line 1" in text
    assert "<img" not in document


def test_page_says_when_the_command_gives_no_answer(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.show(busy())
    monkeypatch.delitem(scene.answers, "/now")
    document, _ = open_page(scene.url, "--dump-dom")
    assert re.search(r"No answer from lazyshard watch since [0-9:]{8} UTC: has it ended\?", shown(document))
    assert re.search('<div id="now"[^>]* class="old"', document)
    assert "Published 1,234 chunks" in shown(document)


def test_silence_is_told_since_when(scene: Scene) -> None:
    scene.show(busy(), silent_since=NOW + 30)
    document, _ = open_page(scene.url, "--dump-dom")
    assert '<div id="now" class="old"' in document
    assert re.search(
        r"The stream's storage has given no answer since [0-9:]{8} UTC, for 1 min 5 s\. "
        r"What is shown is of [0-9:]{8} UTC\.",
        shown(document),
    )
    assert "Published 1,234 chunks" in shown(document)


def test_look_that_fails(scene: Scene) -> None:
    scene.show(None, error="/shared/x: Permission denied")
    text = shown(open_page(scene.url, "--dump-dom").document)
    assert "Nothing can be shown yet." in text
    assert "The last look has failed: /shared/x: Permission denied." in text


def test_stream_that_is_still_to_be_begun_is_waited_for_and_no_failure(scene: Scene) -> None:
    scene.show(None, error="/shared/x: there is no stream: neither stream.json nor any chunk file", missing=True)
    text = shown(open_page(scene.url, "--dump-dom").document)
    assert "Waiting for the stream." in text
    assert "There is no stream here yet. It will be shown as soon as its producer" in text
    assert "failed" not in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)], ids=["laptop", "phone"])
def test_picture(scene: Scene, width: int, height: int, scheme: Literal["light", "dark"]) -> None:
    scene.show(busy())
    size, ground = png(screenshot(scene.url, "watch-busy", scheme, width, height))
    assert size == (width, height)
    assert (min(ground) > 200) if scheme == "light" else (max(ground) < 60), f"{ground} is not {scheme}"


def test_real_stream(tmp_path: Path) -> None:
    stream = produce(tmp_path / "stream", 20, end=False)
    checkpoint(stream, "sft", 8, 4, NOW)
    reads(stream, "sft", 12, NOW)
    with watch(stream, "--interval", "0.5") as running:
        document, console = open_page(running.url, "--dump-dom")
    assert console == []
    text = shown(document)
    assert "Published 10 chunks 20 samples, live" in text
    assert "sft waits for 2 chunks" in text


def png(picture: Path) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Returns the size of a picture of 8 bits a channel, and its last pixel of the first line."""
    data = picture.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (data[:8], depth, kind in (2, 6)) == (b"\x89PNG\r\n\x1a\n", 8, True)
    at, packed = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        packed += data[at + 8 : at + 8 + length] if data[at + 4 : at + 8] == b"IDAT" else b""
        at += length + 12
    pixel = 3 if kind == 2 else 4
    line = bytearray(zlib.decompress(packed)[: 1 + width * pixel])
    # Filters of the first line, above which there is nothing: by how much of what is to the left a byte is less.
    share = {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.5, 4: 1.0}[line[0]]
    for place in range(1 + pixel, len(line)):
        line[place] = (line[place] + int(line[place - pixel] * share)) % 256
    red, green, blue = line[-pixel:][:3]
    return (width, height), (red, green, blue)
