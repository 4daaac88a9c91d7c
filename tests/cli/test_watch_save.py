"""`lazyshard watch --save`: the page as a file; it is seen whole, needs nothing, and does as nobody's row says."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Final

import pytest

from lazyshard import ChunkWriter
from lazyshard.cli.main import main
from lazyshard.cli.watch_page import BEGINNING
from lazyshard.format.cursor import Cursor, ReadingMark
from lazyshard.format.state import RunState
from lazyshard.part import Part
from lazyshard.stream.consumers import write_reading
from lazyshard.stream.cursor import write_cursor
from tests.cli.chromium import needs_chromium, open_page, screenshot
from tests.cli.commands import contents
from tests.stream.streams import foreign, produce

pytestmark = pytest.mark.timeout(300)

HOSTILE: Final = (
    "</title></style></svg><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)
NOW: Final = 1_700_000_000.0


def lived_in(stream: Path) -> Path:
    """Makes a stream with something to show in every part: long rows, a pause, a consumer, refused rows."""
    dice = random.Random(0)
    writer = ChunkWriter(stream, 64)
    for number in range(64 * 60):
        tokens = min(8192, int(dice.lognormvariate(math.log(700) - 0.5, 1)) + 1)
        writer.write({"id": number, "text": "y" * tokens}, tokens=tokens)
    writer.close(end=False)
    for chunk in range(60):
        seal = stream / f"chunk_{chunk:05d}.jsonl.completed"
        at = NOW + 60 * chunk + (1800 if chunk > 40 else 0) + dice.random() * 20
        seal.write_text(json.dumps(json.loads(seal.read_bytes()) | {"sealed_at": at}))
    stream_id = writer.stream_id
    state = RunState(stream_id, 64, 64, 128, 0, None, (Part(4, 2, 792, draws_per_step=8),), 3168)
    rules = {"dp_size": 4, "batch_size": 2, "unit": 64, "window": 128, "seed": 0}
    write_cursor(stream, Cursor("sft-8b", stream_id, 3168, 40, rules, NOW + 5000, state))
    write_reading(stream, ReadingMark("sft-8b", stream_id, 4, 7, 64, NOW + 5600))
    entry = {"source": f"{HOSTILE}.jsonl", "byte": 0, "at": NOW}
    with (stream / "quarantine.jsonl").open("w") as file:
        for number in range(40):
            reason = HOSTILE if number % 3 else "unexpected end of data"
            file.write(json.dumps(entry | {"line": number + 1, "reason": reason, "row": HOSTILE}) + "\n")
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
    assert re.findall(r'(?:src|srcset|href)="([a-z]+:[a-z+/]*)', text) == ["data:", *["data:image/svg+xml"] * 4]
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src &#39;none&#39;; style-src &#39;sha256-")
    # The refused row itself is not shown, its reason is, as text.
    assert "&lt;script&gt;document.title=&#39;owned&#39;&lt;/script&gt;" in text


def test_figures_stand_beside_the_pictures(page: Path) -> None:
    text = page.read_text("utf-8")
    for part in ("60 <small>chunks</small>", "unexpected end of data", "in 60 chunks.", "rows published", "sft-8b"):
        assert part in text, part
    assert len(re.findall(r"<tr><td>[0-9-]{10} [0-9:]{8} UTC</td>", text)) == 8


def test_without_matplotlib_there_are_tables_and_a_line_that_says_what_to_install(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "lazyshard.cli.watch_pictures", raising=False)
    assert main(["watch", str(page.parent / "chat"), "--save", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<img" not in text.replace("&lt;img", "")
    assert text.count("<details") - text.count("who-reads") == text.count(" open>") == 2
    assert "pip install 'lazyshard[plots]'" in text


def test_a_page_is_replaced_and_nothing_else_and_links_are_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazyshard.cli.watch._pictures", lambda history: None)
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


@pytest.mark.parametrize(
    ("stream", "target", "code"),
    [
        ("stream", "", 2),
        ("stream", "/dev/null", 2),
        ("stream", "{tmp}", 2),
        ("stream", "{tmp}/no/page.html", 2),
        ("stream", "s3://bucket/page.html", 2),
        ("to come", "{tmp}/page.html", 2),
        ("empty", "{tmp}/page.html", 5),
    ],
)
def test_refusal(stream: str, target: str, code: int, tmp_path: Path) -> None:
    produce(tmp_path / "stream", 4)
    (tmp_path / "empty").mkdir()
    assert main(["watch", str(tmp_path / stream), "--save", target.format(tmp=tmp_path)]) == code
    assert not (tmp_path / "page.html").exists()


def test_a_stream_without_rows_and_a_foreign_one(tmp_path: Path) -> None:
    ChunkWriter(tmp_path / "new", 2).close(end=False)
    foreign(tmp_path / "foreign", b'{"id":0}\n{"id":1}\n')
    for name, told in (("new", "There is no row yet."), ("foreign", "1 <small>chunk")):
        assert main(["watch", str(tmp_path / name), "--save", str(tmp_path / f"{name}.html")]) == 0
        assert told in (tmp_path / f"{name}.html").read_text("utf-8")


@needs_chromium
def test_it_is_shown_whole_and_nothing_in_it_is_run(page: Path) -> None:
    shown = open_page(page.as_uri(), "--dump-dom")
    assert shown.console == []
    assert "<title>idle · " in shown.document or "<title>dead · " in shown.document


@needs_chromium
def test_nothing_is_wider_than_a_phone(page: Path, tmp_path: Path) -> None:
    # The page itself runs nothing: it is measured from within a copy that may.
    frame = tmp_path / "frame.html"
    probe = "<script>document.title = `${document.documentElement.scrollWidth} of ${innerWidth}`</script>"
    policy = '<meta http-equiv="Content-Security-Policy"'
    frame.write_text(
        page.read_text("utf-8").replace(policy, '<meta name="policy"').replace("</body>", f"{probe}</body>"), "utf-8"
    )
    width = 500  # the narrowest window that the browser makes
    shown = open_page(frame.as_uri(), "--dump-dom", width=width)
    assert f"<title>{width} of {width}</title>" in shown.document


@needs_chromium
@pytest.mark.parametrize(
    ("width", "height", "scheme"), [(1280, 1700, "light"), (1280, 1700, "dark"), (390, 3000, "light")]
)
def test_pictures_of_it_are_kept_for_people(page: Path, width: int, height: int, scheme: str) -> None:
    picture = screenshot(page.as_uri(), "watch-saved", "light" if scheme == "light" else "dark", width, height)
    assert picture.stat().st_size > 50_000
