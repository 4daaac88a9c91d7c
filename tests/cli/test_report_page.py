"""The page of `lazyshard report` in a real browser, from a file: it is seen whole, and it does as nobody's row says."""

import json
import math
import random
from pathlib import Path

import pytest

from lazyshard import ChunkWriter
from lazyshard.cli.main import main
from lazyshard.format import Cursor, PartState, ReadingMark, RunState
from lazyshard.stream.consumers import write_reading
from lazyshard.stream.cursor import write_cursor
from tests.cli.chromium import needs_chromium, open_page, screenshot

pytestmark = [needs_chromium, pytest.mark.timeout(300)]

HOSTILE = "</title></style></svg><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
NOW = 1_700_000_000.0


def lived_in(stream: Path, run: Path) -> Path:
    """Makes a stream with something to tell in every part: long rows, a pause, checkpoints, refused rows."""
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
    stream_id = json.loads((stream / "stream.json").read_bytes())["stream_id"]
    for step in range(1, 12):
        state = RunState(stream_id, 64, 64, 128, 0, None, (PartState(4, 2, step * 72, draws_per_step=8),), step * 288)
        folder = run / f"checkpoint-{step * 9}"
        folder.mkdir(parents=True)
        saved = {"state": state.to_dict(), "step": step * 9, "consumer": "sft-8b", "saved_at": NOW + 500 * step}
        (folder / "lazyshard.json").write_text(json.dumps(saved))
    rules = {"dp_size": 4, "batch_size": 2, "unit": 64, "window": 128, "seed": 0}
    write_cursor(stream, Cursor("sft-8b", stream_id, 11 * 288, 40, rules, NOW + 5500, state))
    write_reading(stream, ReadingMark("sft-8b", stream_id, 4, 7, 64, NOW + 5600))
    entry = {"source": f"{HOSTILE}.jsonl", "byte": 0, "at": NOW}
    with (stream / "quarantine.jsonl").open("w") as file:
        for number in range(40):
            reason = HOSTILE if number % 3 else "unexpected end of data"
            file.write(json.dumps(entry | {"line": number + 1, "reason": reason, "row": HOSTILE}) + "\n")
    return stream


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    stream = lived_in(folder / "chat", folder / "run")
    target = folder / "report.html"
    assert main(["report", str(stream), "-o", str(target), "--checkpoints", str(folder / "run")]) == 0
    return target.as_uri()


def test_it_is_shown_whole_and_nothing_in_it_is_run(page: str) -> None:
    shown = open_page(page, "--dump-dom")
    assert shown.console == []
    assert "<title>lazyshard report: " in shown.document
    assert "owned'</title>" not in shown.document
    assert shown.document.count("<svg") >= 12
    assert shown.document.count("<section") == 9
    # The row's text is there, as text.
    assert "&lt;script&gt;document.title='owned'&lt;/script&gt;" in shown.document


def test_nothing_is_wider_than_a_phone(page: str, tmp_path: Path) -> None:
    # The page itself runs nothing: it is measured from outside, in a frame as wide as a phone.
    frame = tmp_path / "frame.html"
    inner = Path(page.removeprefix("file://")).read_text(encoding="utf-8")
    probe = "<script>document.title = `${document.documentElement.scrollWidth} of ${innerWidth}`</script>"
    policy = '<meta http-equiv="Content-Security-Policy"'
    frame.write_text(inner.replace(policy, '<meta name="policy"').replace("</body>", f"{probe}</body>"))
    width = 500  # the narrowest window that the browser makes
    shown = open_page(frame.as_uri(), "--dump-dom", width=width)
    assert f"<title>{width} of {width}</title>" in shown.document


@pytest.mark.parametrize(
    ("width", "height", "scheme"), [(1280, 3300, "light"), (1280, 3300, "dark"), (390, 4600, "light")]
)
def test_pictures_of_it_are_kept_for_people(page: str, width: int, height: int, scheme: str) -> None:
    picture = screenshot(page, "report", "light" if scheme == "light" else "dark", width, height)
    assert picture.stat().st_size > 50_000
