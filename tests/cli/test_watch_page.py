"""The page of `lazyshard watch` in a real browser, and as a file: what it shows, and that nobody's names run in it."""

import base64
import html
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from matplotlib.image import imread
from PIL import Image, PngImagePlugin

from lazyshard import ChunkWriter
from lazyshard.cli.main import main
from lazyshard.cli.watch_page import BEGINNING, Shown, render
from lazyshard.cli.watch_server import LastLook, WatchServer, page_answers, watch_values
from lazyshard.format.seal import MixedSource
from lazyshard.format.state import BlendShare, Cursor, ReadingHint, RunState
from lazyshard.inspection.inspection import History
from lazyshard.inspection.outlook import Outlook
from lazyshard.inspection.row_facts import count_refusals
from lazyshard.inspection.survey import DiskUse, Lines
from lazyshard.part import Part
from lazyshard.stream.cursor import write_cursor, write_reading
from tests.cli.commands import HEAD, NOW, blended, consumer, contents, outlook, survey, told
from tests.stream.damage import flip
from tests.stream.streams import foreign, produce, publish_rows, stream_id_of

pytestmark = pytest.mark.timeout(300)

PROGRAM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

FLAGS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--enable-logging=stderr"),
    # So long the page's clock continues, as fast as it can; while an answer is waited for it stands still.
    "--virtual-time-budget=3500",
)

SCREENSHOTS: Final = os.environ.get("LAZYSHARD_SCREENSHOTS") or Path(__file__).parents[2] / "runs" / "screenshots"
"""Where pictures are kept for people to look at."""


def open_page(url: str, *flags: str, width: int = 1280, height: int = 800) -> tuple[str, list[str]]:
    """Opens a page in a real browser without a screen, and lets its clock continue for some seconds.

    Returns the document as it is then, and what the browser complained about.
    """
    if PROGRAM is None:
        pytest.skip("chromium is not installed")
    with tempfile.TemporaryDirectory(prefix="lazyshard-chromium-") as profile:
        size = f"--window-size={width},{height}"
        command = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", size, *(flags or ["--dump-dom"]), url]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


HOSTILE: Final = "<img src=x onerror=document.title='owned'>\u202egnp"
HOSTILE_ROW: Final = (
    "</title></style></svg><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)

MIXTURE: Final = (
    MixedSource("/data/crawl/web-*.jsonl", 0.7, 0.7004, 8404, False),
    MixedSource("/data/incoming", 0.3, 0.2996, 3596, False),
    MixedSource("/data/seed.jsonl", 0.0, 0.0, 0, True),
)


def told_page(found: Outlook | None, **values: Any) -> tuple[dict[str, Any], Outlook | None]:
    facts = LastLook(found, values.get("error"), NOW, values.get("silent_since"), values.get("missing", False))
    return watch_values(Path("/shared/streams/chat-distillation"), 2.0, facts, NOW + 95), found


class Scene:
    """What a browser is shown, and continues to `later` once the page asks again."""

    def __init__(self) -> None:
        self.told = told_page(None)
        self.shown: Shown | None = None
        self.later: Outlook | None = None
        answers = page_answers(lambda: self.told, lambda: self.shown)
        for path, make in [(path, answers[path].make) for path in ("/now", "/history")]:
            answers[path] = answers[path]._replace(make=partial(self._later, make))
        self.server = WatchServer("127.0.0.1", 0, answers)

    def _later(self, make: Callable[[], bytes]) -> bytes:
        if self.later is not None:
            self.told, self.shown = told_page(self.later), Shown(History(None, refusals=REFUSALS), {}, 2)
        return make()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    made.told = told_page(busy())
    with made.server:
        thread = threading.Thread(target=made.server.serve_forever)
        thread.start()
        yield made
        made.server.shutdown()
        thread.join()


def lines() -> Iterator[bytes]:
    for number in range(3):
        entry = {"source": "/data/a.jsonl", "line": number + 1, "reason": f"byte {number}: {HOSTILE}"}
        yield json.dumps(entry).encode() + b"\n"


REFUSALS: Final = count_refusals(lines(), complete=True)


def busy() -> Outlook:
    """A run as it is most of the time: a reader that is quicker than the producer, and one that is done."""
    first = survey(consumers=(told(consumed=10_800, done=1080, needs=1104, ranks=4, window=2),))
    head = replace(HEAD, rate=412.5, updated_at=NOW + 8)
    later = survey(
        head=head,
        census={"retired": 940},
        consumers=(
            consumer("eval", consumed=12_000, done=1200, at=NOW - 700),
            blended(
                told(consumed=11_040, done=1104, needs=1160, ranks=4, window=2, at=NOW + 6),
                *(BlendShare("/shared/streams/chat", 0.8, 9270), BlendShare("/shared/streams/code", 0.2, 1770)),
            ),
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
    note = "--max-disk 2.0 GB: 1,234 chunks take 2.0 GB, and no checkpoint lets any of them be deleted"
    waiting = told(consumed=12_000, done=1200, needs=1240, ranks=4, window=2), consumer("old", problem="torn")
    return outlook(survey(head=replace(HEAD, state="waiting", note=note, rate=0.0), consumers=waiting, free=None))


def shown(document: str, part: str = "body") -> str:
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", document, flags=re.DOTALL)
    if part != "body":
        text = text[text.index(f'id="{part}"') :]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def rendered(found: Outlook | None, **values: Any) -> tuple[str, str]:
    document = render("whole", *told_page(found, **values), None).decode()
    return document, shown(document)


def opened(scene: Scene) -> str:
    document, console = open_page(scene.server.url)
    assert console == []
    assert "<img" not in document
    return document


def test_busy_run() -> None:
    document, text = rendered(busy())
    for part in (
        "/shared/streams/chat-distillation running",
        "Published 1,234 chunks 12,340 samples, 940 chunks deleted, live",
        "Close up: chunks 1,136 to 1,231",
        "rate 56.0 samples/s; will not have to wait at these rates",
        "reads now chunks 1,152 to 1,159 (rank 0: 1,152, 1,156; rank 1: 1,153, 1,157;",
        "/data/crawl/web-*.jsonl 70.0 % so far, 8,404 rows; weight 70.0 %",
        "/data/seed.jsonl 0.0 % so far, 0 rows; finished",
        "/shared/streams/chat 84.0 % so far, 9,270 samples; weight 80.0 %",
    ):
        assert part in text, text
    cells = re.findall(r'<span class="reading" title="([^"]*)">([^<]*)</span>', document)
    assert [number for _, number in cells] == ["0", "1", "2", "3", "0", "1", "2", "3"]
    assert cells[1][0] == "chunk 1,153: being read (sft, rank 1)"


@pytest.mark.parametrize(("chunks", "kind"), [(110, "wait"), (12_000, "good")])
def test_only_a_reader_that_has_to_wait_soon_is_warned_of(chunks: int, kind: str) -> None:
    reads_on = [told(consumed=1000, done=100, needs=needs, ranks=1, at=NOW + needs) for needs in (100, 105)]
    head = replace(HEAD, chunks=chunks, samples=10 * chunks, rate=0.0, state="idle")
    census = {"chunks": chunks, "samples": 10 * chunks}
    looks = [survey(head=head, census=census, consumers=(one,), looked_at=NOW + 200) for one in reads_on]
    document, text = rendered(outlook(*looks))
    assert re.search(rf'<span class="pill {kind}">will wait in', document), text


def test_names_and_notes_are_text(scene: Scene) -> None:
    hostile = blended(told(HOSTILE, needs=4), BlendShare(HOSTILE, 0.2, 100))
    found = survey(
        head=replace(HEAD, state="failed", note=HOSTILE, host=HOSTILE),
        consumers=(hostile, consumer("b", problem=HOSTILE)),
        mixture=(MixedSource(HOSTILE, 1.0, 1.0, 1, False),),
        problems=(HOSTILE,),
    )
    scene.told = told_page(outlook(found), error=HOSTILE)
    document = opened(scene)
    assert "<title>failed · /shared" in document
    assert shown(document, "now").count("<img src=x onerror=document.title='owned'>\\u202egnp") >= 8
    assert "\u202e" not in document


def test_a_million_chunks_are_few_elements() -> None:
    head = replace(HEAD, chunks=1_000_000, samples=10_000_000)
    million = {"chunks": 1_000_000, "samples": 10_000_000, "retired": 600_000}
    reads_now = told(consumed=6_999_552, done=700_000, needs=800_256, ranks=512)
    document, text = rendered(outlook(survey(head=head, census=million, consumers=(reads_now,))))
    assert "being read 512" in text
    document = re.sub(r"<(script|style)\b.*?</\1>", "", document, flags=re.DOTALL)
    assert document.count("<") < 1000
    assert len(document) < 100_000


def test_page_follows_the_stream_and_takes_history_only_where_that_has_changed(scene: Scene) -> None:
    scene.later = starving()
    document = opened(scene)
    text = shown(document)
    assert "sft waits for chunk 1,239" in text
    assert "<title>waiting · /shared" in document
    assert "Refused rows, by reason rows reason, with its first occurrence 3 byte 0: <img src=x" in text
    assert "/data/a.jsonl, line 1" in text


def test_page_says_when_the_command_gives_no_answer(scene: Scene) -> None:
    del scene.server.answers["/now"]
    document, _ = open_page(scene.server.url)
    assert re.search(r"No answer from lazyshard watch since [0-9:]{8} UTC", shown(document))
    assert re.search('<div id="now"[^>]* class="old"', document)
    assert "Published 1,234 chunks" in shown(document)


def test_silence_failures_and_a_stream_that_is_still_to_be_begun_are_told() -> None:
    document, text = rendered(busy(), silent_since=NOW + 30)
    assert '<div id="now" class="old"' in document
    assert re.search(r"no answer since [0-9:]{8} UTC, for 1 min 5 s\.", text)
    assert "Published 1,234 chunks" in text
    text = rendered(None, error="/shared/x: Permission denied")[1]
    assert "The last refresh failed: /shared/x: Permission denied." in text
    text = rendered(None, error="/shared/x: there is no stream", missing=True)[1]
    assert "Waiting for the stream." in text
    assert "failed" not in text


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 800, "dark"), (390, 844, "light")])
def test_picture(scene: Scene, width: int, height: int, scheme: str) -> None:
    picture = Path(SCREENSHOTS, f"watch-busy-{width}x{height}-{scheme}.png")
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.unlink(missing_ok=True)
    preference = f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}"
    shown = open_page(scene.server.url, preference, f"--screenshot={picture}", width=width, height=height)
    assert shown[1] == []
    pixels = imread(picture)
    assert pixels.shape[:2] == (height, width)
    ground = pixels[0, -1, :3]
    assert ground.min() > 0.8 if scheme == "light" else ground.max() < 0.25, f"{ground} is not {scheme}"


def lived_in(stream: Path) -> Path:
    """Makes a stream with something to show in every part: long rows, a pause, a consumer, refused rows."""
    dice = random.Random(0)
    tokens = [min(8192, int(dice.lognormvariate(math.log(700) - 0.5, 1)) + 1) for _ in range(64 * 60)]
    rows = ({"id": number, "text": "y" * length} for number, length in enumerate(tokens))
    publish_rows(stream, 64, rows, tokens, end=False)
    for chunk in range(60):
        seal = stream / f"chunk_{chunk:05d}.jsonl.completed"
        at = NOW + 60 * chunk + (1800 if chunk > 40 else 0) + dice.random() * 20
        seal.write_text(json.dumps(json.loads(seal.read_bytes()) | {"sealed_at": at}))
    stream_id = stream_id_of(stream)
    state = RunState(stream_id, 64, 64, 128, 0, None, (Part(4, 2, 792, draws_per_step=8),), 3168)
    rules = {"dp_size": 4, "batch_size": 2, "unit": 64, "window": 128, "seed": 0}
    write_cursor(stream, Cursor("sft-8b", stream_id, 3168, 40, rules, NOW + 5000, state))
    write_reading(stream, ReadingHint("sft-8b", stream_id, 4, 7, 64, NOW + 5600))
    entry = {"source": f"{HOSTILE_ROW}.jsonl", "byte": 0, "at": NOW}
    with (stream / "quarantine.jsonl").open("w") as file:
        for number in range(40):
            reason = HOSTILE_ROW if number % 3 else "unexpected end of data"
            file.write(json.dumps(entry | {"line": number + 1, "reason": reason, "row": HOSTILE_ROW}) + "\n")
    return stream


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    stream = lived_in(folder / "chat")
    before = contents(stream)
    assert main(["watch", str(stream), "--save", str(folder / "page.html")]) == 0
    assert contents(stream) == before
    return folder / "page.html"


def test_it_holds_all_that_it_needs_and_no_script(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text.startswith(BEGINNING)
    assert "<script" not in text
    assert not re.search(r"\sstyle=|\son\w+=[\"']", text)
    assert not re.search(r"https?://", text)
    assert re.findall(r'(?:src|srcset|href)="([a-z]+:[a-z+/]*)', text) == ["data:", *["data:image/svg+xml"] * 2]
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src &#39;none&#39;; style-src &#39;sha256-")
    for part in ("60 <small>chunks</small>", "unexpected end of data", "in 60 chunks.", "sft-8b"):
        assert part in text, part
    assert len(re.findall(r"<tr><td>[0-9-]{10} [0-9:]{8} UTC</td>", text)) == 8
    # The refused row itself is not shown, its reason is, as text.
    assert "&lt;script&gt;document.title=&#39;owned&#39;&lt;/script&gt;" in text


def test_without_matplotlib_there_are_tables(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["watch", str(page.parent / "chat"), "--save", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<img" not in text.replace("&lt;img", "")
    assert text.count("<details") - text.count("who-reads") == text.count(" open>") == 2
    assert "pip install 'lazyshard[plots]'" in text


def test_pages_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.cli.watch_page.draw", lambda history: None)
    stream, target = produce(tmp_path / "stream", 20), tmp_path / "page.html"
    for _ in range(2):
        assert main(["watch", str(stream), "--save", str(target)]) == 0
    assert re.fullmatch(rf"({re.escape(str(target))}: [0-9.]+ kB\n){{2}}", capsys.readouterr().out)
    target.write_text("mine")
    assert main(["watch", str(stream), "--save", str(target)]) == 3
    assert target.read_text() == "mine"
    target.write_text("")
    (tmp_path / "latest.html").symlink_to("page.html")
    assert main(["watch", str(stream), "--save", str(tmp_path / "latest.html")]) == 0
    assert (tmp_path / "latest.html").is_symlink() and target.read_text("utf-8").startswith(BEGINNING)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["latest.html", "page.html", "stream"]


def test_a_stream_without_rows_and_a_foreign_one(tmp_path: Path) -> None:
    ChunkWriter(tmp_path / "new", 2).close(end=False)
    foreign(tmp_path / "foreign", b'{"id":0}\n{"id":1}\n')
    for name, text in (("new", "No rows yet."), ("foreign", "1 <small>chunk")):
        assert main(["watch", str(tmp_path / name), "--save", str(tmp_path / f"{name}.html")]) == 0
        assert text in (tmp_path / f"{name}.html").read_text("utf-8")


def test_it_is_shown_whole_nothing_in_it_is_run_and_nothing_is_wider_than_a_phone(page: Path, tmp_path: Path) -> None:
    document, console = open_page(page.as_uri())
    assert console == []
    assert re.search("<title>(idle|dead) · ", document)
    # The page itself runs nothing: it is measured from within a copy that may.
    frame = tmp_path / "frame.html"
    probe = "<script>document.title = `${document.documentElement.scrollWidth} of ${innerWidth}`</script>"
    policy = '<meta http-equiv="Content-Security-Policy"'
    text = page.read_text("utf-8").replace(policy, '<meta name="policy"').replace("</body>", f"{probe}</body>")
    frame.write_text(text, "utf-8")
    width = 500  # the narrowest window that the browser makes
    assert f"<title>{width} of {width}</title>" in open_page(frame.as_uri(), width=width)[0]


def test_the_newest_sample_is_shown_if_asked_for_as_text_and_as_new_images(tmp_path: Path) -> None:
    stream, target, file, text = tmp_path / "s", tmp_path / "page.html", io.BytesIO(), PngImagePlugin.PngInfo()
    text.add_text("note", HOSTILE_ROW)
    Image.new("RGB", (640, 480), (0, 128, 255)).save(file, "PNG", pnginfo=text)
    svg = f"<svg>{HOSTILE_ROW}</svg>".encode()
    blobs = {"image": file.getvalue(), "svg": svg, "cut": b"\x89PNG\r\n\x1a\n" + svg, "gif": b"GIF89a"}
    row = {"text": HOSTILE_ROW, "a": [*range(100, 119)], "b": [*range(200, 219)], **blobs}
    publish_rows(stream, 2, ({"id": number, **row} for number in range(4)), arrays=True)
    assert main(["watch", str(stream), "--save", str(target)]) == 0
    assert "Newest sample" not in target.read_text("utf-8")
    assert main(["watch", str(stream), "--save", str(target), "--sample"]) == 0
    page = target.read_text("utf-8")
    assert "Newest sample: 3 " in shown(page) and "\n  &#34;id&#34;: 3,\n" in page
    assert "<script" not in page and "&lt;script&gt;document.title" in page
    (image,) = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    made = Image.open(io.BytesIO(base64.b64decode(image)))
    assert (made.size, made.mode, made.info, made.getpixel((0, 0))) == ((160, 120), "RGB", {}, (0, 128, 255))
    assert page.count("no thumbnail, the image is damaged: ") == 2
    # Of the text there are the first 40 lines.
    assert "    213,\n    214,\n...</pre>" in page
    document, console = open_page(target.as_uri())
    assert console == [] and "<title>ended" in document


def test_a_newest_sample_that_cannot_be_read_is_told_in_words(tmp_path: Path) -> None:
    flip("chunk_00001.jsonl", 12)(produce(tmp_path / "s", 4))
    assert main(["watch", str(tmp_path / "s"), "--save", str(tmp_path / "page.html"), "--sample"]) == 0
    assert "chunk_00001.jsonl: row 1 (byte 9): expected XXH3" in shown((tmp_path / "page.html").read_text("utf-8"))
