"""`lazyshard report`: the command, on streams that the producer and a training run have made."""

import json
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter
from lazyshard.cli.main import main
from lazyshard.cli.report_page import BEGINNING
from lazyshard.stream.retire import retire
from lazyshard_producer.cli import main as produce_main
from tests.cli.commands import contents, lazyshard
from tests.cli.traced_runs import commit, run_of, save, two_ranks
from tests.stream.streams import foreign, produce

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
PARTS = ["lengths", "packing", "balance", "shuffle", "rates", "waits", "refusals", "disk"]


class Page(HTMLParser):
    """What is in a page: names of tags, of parts, and the text of each part."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.parts: list[str] = []
        self.links: list[str] = []
        self.text: dict[str, str] = {"": ""}
        self._part = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href") and value is not None]
        if tag == "section":
            self._part = values.get("id") or ""
            self.parts.append(self._part)
            self.text[self._part] = ""

    def handle_data(self, data: str) -> None:
        self.text[self._part] += data


def written(capsys: pytest.CaptureFixture[str], stream: Path, *arguments: object) -> tuple[Page, str]:
    """Writes a page and returns it with what was said."""
    target = stream.parent / "report.html"
    assert main(["report", str(stream), "-o", str(target), *map(str, arguments)]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    return Page(target.read_text(encoding="utf-8")), told.out


def values(capsys: pytest.CaptureFixture[str], stream: Path, *arguments: object) -> Any:
    assert main(["report", str(stream), "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["report", *map(str, arguments)])
    told = capsys.readouterr()
    assert told.out == ""
    return code, told.err


def source(path: Path, lengths: list[int]) -> Path:
    lines = [json.dumps({"id": number, "length": length}) for number, length in enumerate(lengths)]
    path.write_text("\n".join(lines) + "\n")
    return path


def producer(*arguments: object) -> None:
    assert produce_main(["run", "--no-progress", *map(str, arguments)]) == 0


def test_a_page_of_a_stream_of_the_producer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = source(tmp_path / "a.jsonl", [100, 900, 200, 800, 300, 700, 400, 600] * 8)
    with rows.open("a") as file:
        file.write(f'{{"id": "{HOSTILE}" oops\n')
    stream = tmp_path / HOSTILE.replace("/", "|")[:40]
    producer("--source", rows, "--out", stream, "--samples-per-chunk", 4, "--on-bad-row", "quarantine", "--balance", 2)
    before = contents(stream)
    capsys.readouterr()
    page, said = written(capsys, stream, "--pack", 1000)
    assert contents(stream) == before
    assert page.parts == ["", *PARTS]
    # Nothing of it can run, and nothing is fetched.
    assert page.tags.isdisjoint({"script", "img", "iframe", "object", "form"})
    assert [link for link in page.links if not link.startswith("#")] == ["data:,"]
    assert HOSTILE in page.text["refusals"]
    assert "Half of the rows have at most 400 tokens" in page.text["lengths"]
    assert "Packed to 1,000 tokens, rows would need 50 % fewer micro batches" in page.text["packing"]
    assert "The stream is dealt for these ranks." in page.text["balance"]
    assert said.rstrip().endswith(
        "2 changes proposed, first: Pack the rows: 50 % fewer micro batches of 1,000 tokens at the most"
    )


def test_the_summary_has_the_weightiest_change_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = tmp_path / "s"
    writer = ChunkWriter(stream, 2)
    for length in (1, 1, 9, 9, 9, 9, 1, 1) * 4:
        writer.write({"id": 1}, tokens=length)
    writer.close(end=False)
    page, _ = written(capsys, stream, "--dp-size", 2)
    summary = page.text[""]
    assert summary.index("Start the producer again") < summary.index("Pack the rows") < summary.index("dealt by cost")


def test_packs_of_the_producer_are_as_full_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = source(tmp_path / "a.jsonl", [6, 4, 2, 7, 3, 5])
    stream = tmp_path / "s"
    producer("--source", rows, "--out", stream, "--samples-per-chunk", 1, "--pack", 10, "--pack-buffer", 6)
    capsys.readouterr()
    found = values(capsys, stream, "--dp-size", 1)
    assert found["packing"] == {
        "form": "pack",
        "tokens": 10,
        "looked_at": 3,
        "filled": 0.9,
        "packs": None,
        "too_long": None,
        "padding": [],
    }
    assert found["findings"]["packing"]["text"] == "Packs of 10 tokens are 90 % full."
    assert found["balance"]["packed"] is True


def test_checkpoints_and_cursor_tell_how_training_went_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = tmp_path / "s"
    writer = ChunkWriter(stream, 3)
    for number in range(24):
        writer.write({"id": number}, tokens=5)
    writer.close()
    stream_id = json.loads((stream / "stream.json").read_bytes())["stream_id"]
    for step in (1, 2):
        save(tmp_path / "out", step, run_of(stream_id, two_ranks(step)))
    commit(stream, run_of(stream_id, two_ranks(3)))
    found = values(capsys, stream, "--checkpoints", tmp_path / "out")
    assert found["trained_samples"] == {"sft": [[1.0, 12], [101.0, 4], [102.0, 8]]}
    assert found["training"] == {
        "ranks": 2,
        "told_by": "consumer sft",
        "micro_batch_size": 1,
        "rank_step_samples": 2,
        "window_chunks": 0,
    }
    assert found["balance_of_global_batches"]["micro_batch_size"] == 2
    page, _ = written(capsys, stream, "--checkpoints", tmp_path / "out")
    assert "trained by sft" in page.text["rates"]
    assert "those of consumer sft" in page.text["balance"]


def test_of_many_chunks_some_are_looked_at_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = produce(tmp_path / "s", 40)
    (tmp_path / "report.html").unlink(missing_ok=True)
    assert values(capsys, stream, "--chunks", 5)["chunks"] == {"there": 20, "looked_at": 5, "unread": 0}
    target = tmp_path / "report.html"
    assert main(["report", str(stream), "-o", str(target), "--chunks", "5"]) == 0
    assert "5 of 20 chunks were looked at, evenly spaced: --chunks takes more." in target.read_text()
    assert main(["report", str(stream), "-o", str(target)]) == 0
    assert "evenly spaced" not in target.read_text()


def test_streams_in_any_condition_have_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = produce(tmp_path / "empty", 0, end=False)
    assert "Nothing is published yet." in written(capsys, empty)[0].text["rates"]
    ended = produce(tmp_path / "ended", 0)
    assert "Nothing to change." in written(capsys, ended)[0].text[""]
    partly = produce(tmp_path / "partly", 12, end=False)
    retire(partly, 4, 6)
    assert "damage" not in written(capsys, partly)[0].parts
    other = foreign(tmp_path / "other", b'{"a":1}\n{"a":2}\n', b'{"a":3}\n')
    assert "lazyshard-producer run --source" in written(capsys, other)[0].text["lengths"]
    damaged = produce(tmp_path / "damaged", 12)
    os.remove(damaged / "chunk_00002.jsonl.completed")
    (damaged / "head.json").write_text("{")
    page, said = written(capsys, damaged)
    assert page.parts[1] == "damage"
    assert "chunk_00002.jsonl.completed" in page.text["damage"]
    assert "first: Look for damage" in said


def test_a_page_on_stdout_is_nothing_but_the_page(tmp_path: Path) -> None:
    done = lazyshard("report", produce(tmp_path / "s", 4), "-o", "-")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(BEGINNING)
    assert done.stdout.endswith("</html>\n")


def test_json_and_page_tell_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream, target = produce(tmp_path / "s", 8), tmp_path / "report.html"
    assert main(["report", str(stream), "-o", str(target), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    page = Page(target.read_text())
    for name, finding in found["findings"].items():
        assert finding["text"] in page.text[name]
        assert all(change["text"] in page.text[name] for change in finding["changes"])


def test_a_report_is_replaced_and_nothing_else_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream, target = produce(tmp_path / "s", 4), tmp_path / "rows.html"
    target.write_text("<!doctype html>\n<p>my thesis")
    code, told = refused(capsys, stream, "-o", target)
    assert (code, told) == (
        3,
        f"lazyshard: error: {target}: is there already and is no report; choose another name, or have it replaced with "
        f"--force\n",
    )
    assert target.read_text() == "<!doctype html>\n<p>my thesis"
    assert main(["report", str(stream), "-o", str(target), "--force"]) == 0
    assert target.read_text().startswith(BEGINNING)
    assert main(["report", str(stream), "-o", str(target)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.html", "s"]


def test_a_link_is_followed_and_a_device_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream, target = produce(tmp_path / "s", 4), tmp_path / "real.html"
    target.touch()
    (tmp_path / "link.html").symlink_to(target)
    assert main(["report", str(stream), "-o", str(tmp_path / "link.html")]) == 0
    assert (tmp_path / "link.html").is_symlink()
    assert target.read_text().startswith(BEGINNING)
    capsys.readouterr()
    os.mkfifo(tmp_path / "pipe.html")
    assert refused(capsys, stream, "-o", tmp_path / "pipe.html", "--force")[0] == 2


def test_without_a_name_the_page_is_report_html_here_and_its_place_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, here = produce(tmp_path / "s", 4), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert main(["report", str(stream), "--json"]) == 0
    assert list(here.iterdir()) == []
    capsys.readouterr()
    assert main(["report", str(stream)]) == 0
    assert capsys.readouterr().out.startswith("report.html: ")
    assert [path.read_bytes().startswith(BEGINNING.encode()) for path in here.iterdir()] == [True]
    (here / "report.html").write_text("my own")
    assert refused(capsys, stream)[0] == 3
    assert (here / "report.html").read_text() == "my own"


def test_what_fails_while_it_is_written_leaves_the_old_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, target = produce(tmp_path / "s", 4), tmp_path / "report.html"
    assert main(["report", str(stream), "-o", str(target)]) == 0
    before = target.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr("lazyshard.store.durable.write_all", full)
    capsys.readouterr()
    assert refused(capsys, stream, "-o", target)[0] == 7
    assert target.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "s"]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["STREAM", "-o", "-", "--json"], 2, "both take the standard output"),
        (["STREAM", "-o", ""], 2, "no name of a plain file"),
        (["STREAM", "-o", "s3://bucket/report.html"], 2, "no name of a plain file"),
        (["STREAM", "-o", "STREAM"], 2, "no name of a plain file"),
        (["STREAM", "-o", "STREAM/no/report.html"], 2, "is not a directory"),
        (["STREAM", "-o", "x.html", "--checkpoints", "STREAM/no"], 2, "does not exist"),
        (["STREAM/no", "-o", "x.html"], 2, "is not a directory"),
        (["STREAM/cursors", "--json"], 5, "there is no stream"),
    ],
)
def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, told: str
) -> None:
    stream = produce(tmp_path / "s", 4)
    (stream / "cursors").mkdir(exist_ok=True)
    found, said = refused(capsys, *(one.replace("STREAM", str(stream)) for one in arguments))
    assert (found, told in " ".join(said.split())) == (code, True), said
