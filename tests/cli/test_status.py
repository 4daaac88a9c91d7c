"""`lazyshard status` in processes of its own; what it says of looks that are made up: test_status_view.py."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lazyshard import ChunkWriter
from lazyshard.cli.status import status_lines, status_values
from lazyshard.cli.watch_page import render
from lazyshard.cli.watch_server import MAX_LABELS, LastLook, watch_values
from lazyshard.errors import StreamEnded
from lazyshard.format.records import Head, Manifest
from lazyshard.format.seal import producer_source
from lazyshard.format.state import Cursor
from lazyshard.format.writers import Committed, EndRequest
from lazyshard.inspection.outlook import Looks, Outlook
from lazyshard.inspection.survey import outlook_of_writer, take_survey
from lazyshard.store.durable import publish_bytes
from lazyshard.store.files import read_seal
from lazyshard.stream import CursorOwner
from lazyshard.stream.listing import retire
from tests.cli.commands import ID, NOW, lazyshard, outlook, started, survey, terminal
from tests.cli.test_status_view import exposed, samples
from tests.stream.damage import checkpoint, cut, edit_head, reads
from tests.stream.streams import add, owners, produce, raised, running, sequence, stream_id_of, wait_until, write_pieces

TWO_HOURS_S = 7201.0  # Two hours, and nearly a minute until that is said otherwise
SEQUENCER = Committed(1234, {}, {}, False, 7, "node7", 12345, NOW - 1)


def looked(*arguments: object) -> Any:
    done = lazyshard("status", *arguments, "--json")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    return json.loads(done.stdout)


def test_live_stream_is_looked_at_and_left_as_it_is(tmp_path: Path) -> None:
    stream = produce(tmp_path / "stream", 20, end=False)
    then = time.time() - TWO_HOURS_S
    checkpoint(stream, "sft", 11, 5, then)
    reads(stream, "sft", 7, then)
    retire(stream, 4, 10)
    os.utime(stream / "chunk_00005.jsonl.completed", (then, then))
    edit_head(stream, host="node7", pid=12345, updated_at=then)
    before = {str(path): path.stat().st_mtime_ns for path in (stream, *stream.rglob("*"))}
    done = lazyshard("status", stream)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  keeps       5 chunks from deletion, the oldest 2 h 0 min old" in done.stdout.splitlines()
    assert {str(path): path.stat().st_mtime_ns for path in (stream, *stream.rglob("*"))} == before


def test_killed_producer_is_dead_at_once_or_once_its_heartbeats_are_missed(tmp_path: Path) -> None:
    def producer(**head: Any) -> tuple[str, bool, bool]:
        if head:
            edit_head(tmp_path, **head)
        found = looked(tmp_path)["producer"]
        return found["state"], found["process_is_gone"], found["process_has_ended"]

    def work() -> None:
        add(ChunkWriter(tmp_path, 2), 0, 2)
        os.mkdir(tmp_path / "published")
        time.sleep(3600)

    with running(work):
        wait_until((tmp_path / "published").exists, "a chunk")
        assert producer(updated_at=time.time() - 30) == ("running", False, False)
    assert producer() == ("dead", True, True)
    # Of another machine, by what it says, only that it is silent can be told.
    assert producer(updated_at=time.time(), process="elsewhere")[0] == "running"
    assert producer(updated_at=time.time() - 30, process="elsewhere") == ("dead", True, False)
    assert producer(updated_at=time.time() + 1)[:2] == ("running", True)


def test_stopped_producer_is_not_to_be_started_again_and_a_run_that_is_gone_is_to_be_resumed(tmp_path: Path) -> None:
    stream = produce(tmp_path / "stream", 20, end=False)
    edit_head(stream, state="running", pid=os.getpid(), process="", updated_at=time.time() - 90)

    def train() -> None:
        CursorOwner(stream, "sft").begin(Cursor("sft", stream_id_of(stream), 10, 5, {}, 0.0))
        (tmp_path / "trains").mkdir()
        time.sleep(3600)

    with running(train):
        wait_until((tmp_path / "trains").exists, "a cursor")
        told = looked(stream)["summary"]
        assert (f"process {os.getpid()} exists" in told, "'sft' no longer exists" in told) == (True, False)
    assert "'sft' no longer exists" in looked(stream)["summary"]


class Watch(NamedTuple):
    process: "subprocess.Popen[str]"

    def line(self) -> str:
        assert self.process.stdout is not None
        found: str = self.process.stdout.readline()
        assert found, self.process.communicate()
        return found

    def look_until(self, condition: Callable[[Any], bool]) -> Any:
        found: Any = None
        while found is None or not condition(found):
            found = json.loads(self.line())
        return found


@contextlib.contextmanager
def watching(stream: Path, *arguments: str, stdout: int = subprocess.PIPE, **variables: str) -> Iterator[Watch]:
    words = ["-m", "lazyshard.cli", "status", "--watch", "--interval", "0.1", stream, *arguments]
    with started(*words, stdout=stdout, variables=variables) as process:
        yield Watch(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "")


def test_watch_as_json_follows_the_stream(tmp_path: Path) -> None:
    with watching(tmp_path, "--json") as watch:
        assert json.loads(watch.line())["error"].startswith(f"{tmp_path}: ")
        produce(tmp_path, 20, end=False)
        edit_head(tmp_path, state="running", rate=4.0)
        now = time.time()
        reads(tmp_path, "sft", 2, now)
        first = watch.look_until(lambda found: found["error"] is None and bool(found["consumers"]))
        assert (first["consumers"][0]["read_chunks_per_s"], first["published_chunks_per_s"]) == (None, 2.0)
        reads(tmp_path, "sft", 6, now + 1)
        reader = watch.look_until(lambda found: found["consumers"][0]["needs_chunks"] == 6)["consumers"][0]
        assert (reader["read_chunks_per_s"], reader["read_samples_per_s"]) == (4.0, 8.0)
        assert (reader["ahead_chunks"], reader["supply"], reader["starving_in_s"]) == (4, "shrinking", 2.0)
        produce(tmp_path, 22)
        assert watch.look_until(lambda found: found["ended"])["published_chunks"] == 11


def test_watch_without_a_terminal_prints_pages_once_the_stream_has_come(tmp_path: Path) -> None:
    stream = tmp_path / "to come"
    with watching(stream) as watch:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\n", watch.line())
        assert watch.line().startswith(f"{stream}: no stream yet")
        produce(stream, 4)
        while not watch.line().startswith("band          ++"):
            pass


def test_watch_on_a_terminal_keeps_the_page_in_its_place(tmp_path: Path) -> None:
    produce(tmp_path, 4, end=False)
    with terminal() as (fd, shown), watching(tmp_path, stdout=fd, TERM="xterm", COLUMNS="60", LINES="40"):
        wait_until(lambda: shown.count(b"Ctrl-C to quit") >= 2, "two pages")
        edit_head(tmp_path, state="failed")
        wait_until(lambda: b"failed " in shown, "a page that says otherwise")
    text = bytes(shown)
    # The cursor goes up over the old page and is there again in the end; nothing is cleared as a whole.
    assert b"\x1b[1A" in text
    assert b"\x1b[2J" not in text
    assert text.rstrip().endswith(b"\x1b[?25h")
    lines = re.sub(rb"\x1b\[[0-9?]*[a-zA-Z]", b"", text).split(b"\n")
    assert max(len(line.strip()) for line in lines) <= 60 + len(str(tmp_path))


def head(rows: int, **values: Any) -> Head:
    return replace(Head(rows // 10, rows, False, "running", 5.0, "node8", 77, NOW - 2), **values)


@dataclass
class Writer:
    name: str
    head: Head | None
    taken: int
    refused: str | None = None


def shared(*writers: Writer, declared: int = 0, sequencer: Committed | None = SEQUENCER) -> Outlook:
    census = {"manifest": Manifest(ID, 10, NOW, writers=declared)}
    told = tuple(outlook_of_writer(one.name, one.head, one.taken, one.refused, 10, NOW, False) for one in writers)
    return outlook(survey(writers=told, sequencer=sequencer, sequencer_gone=False, census=census))


def paragraph(found: Outlook) -> list[str]:
    lines = status_lines(found, watching=False)
    first = next(number for number, line in enumerate(lines) if line.startswith("writers"))
    return lines[first : lines.index("", first)]


FEW = (
    Writer("a", head(120), 100),
    Writer("b", head(40, state="waiting", rate=2.0, note="of --rate"), 40),
    Writer("c", head(45, state="finished", ended=True, rate=0.0), 45),
    Writer("d", head(70, updated_at=NOW - 90), 70),
    Writer("e", head(30), 10, "chunk_00001.jsonl: bad"),
    Writer("f", None, 0),
)  # fmt: skip


def test_page_and_summary() -> None:
    found = shared(*FEW, declared=8)
    shown = paragraph(found)
    words = "6 of 8: 1 dead, 1 unknown, 1 refused, 1 waiting, 1 running, 1 finished"
    assert " ".join(" ".join(shown[:2]).split()) == f"writers {words}"
    # Those in trouble first.
    assert [line[14] for line in shown[2:] if line[15:17] == ": "] == list("dfebac")
    summary = "writer 'd' did not respond: restart; writer 'e' is refused; writer 'f' did not begin, or cannot be read"
    assert summary in status_values(found)["summary"]


def test_values() -> None:
    values = status_values(shared(*FEW))
    told = {"host": "node7", "pid": 12345, "process_is_gone": False, "stopped": False, "sign_age_s": 1}
    assert values["sequencer"] == told
    states = ["running", "waiting", "finished", "dead", "refused", "unknown"]
    assert [one["state"] for one in values["writers"]] == states
    assert values["writers"][4] == {
        **{"name": "e", "state": "refused", "published_samples": 30, "stream_samples": 10, "waiting_pieces": 2},
        **{"samples_per_s": 5.0, "heartbeat_age_s": 2.0, "host": "node8", "pid": 77},
        **{"reason": "chunk_00001.jsonl: bad", "left_out_samples": 0},
    }
    alone = status_values(outlook(survey()))
    assert (alone["sequencer"], alone["writers"]) == (None, [])
    assert not [line for line in status_lines(outlook(survey()), watching=False) if "writer" in line]


def test_many_writers_stay_readable() -> None:
    names = [f"vllm-{number:03d}" for number in range(256)]
    writers = [Writer(name, head(100, rate=float(1 + number)), 100) for number, name in enumerate(names)]
    writers[200] = replace(writers[200], head=head(100, state="failed", note="no room"))
    found = shared(*writers, declared=256)
    shown = paragraph(found)
    assert shown[0] == "writers       256 of 256: 1 failed, 255 running"
    told = [line[14:].split(":")[0] for line in shown[1:] if ": " in line]
    assert told == ["vllm-200", *names[:7]]
    assert shown[-1] == "              and 248 more, which --json lists"
    assert len(status_values(found)["writers"]) == 256
    assert "writer 'vllm-200' failed" in status_values(found)["summary"]
    dead = shared(*(replace(one, head=head(100, updated_at=NOW - 99)) for one in writers))
    assert "writers 'vllm-000', 'vllm-001', 'vllm-002' and 253 more did not respond" in status_values(dead)["summary"]


def test_metrics() -> None:
    found = samples(exposed(shared(*FEW)))
    told = {name.removeprefix("lazyshard_writer_"): value for name, value in found.items() if "_writer_" in name}
    assert {name: value for name, value in told.items() if name[-1] == "e"} == {
        **{"published_samples e": 30, "stream_samples e": 10, "waiting_pieces e": 2},
        **{"samples_per_second e": 5, "heartbeat_age_seconds e": 2, "trouble e": 1},
    }
    assert {name[-1] for name, value in told.items() if name.startswith("trouble") and value} == set("def")
    text = (Path(__file__).resolve().parents[2] / "docs" / "watch.md").read_text(encoding="utf-8")
    assert {name for name in told if f"`lazyshard_writer_{name.split()[0]}{{writer}}`" not in text} == set()
    many = samples(exposed(shared(*(Writer(f"w{number}", head(10), 10) for number in range(150)))))
    assert sum(name.startswith("lazyshard_writer_trouble ") for name in many) == MAX_LABELS


def test_table_of_the_page() -> None:
    found = shared(*FEW[:5], Writer("<b>", head(10), 0))
    values = watch_values(Path("/data/stream"), 2.0, LastLook(found, answered_at=NOW), NOW)
    text = render("now", values, found, None).decode()
    table = text[text.index("<h2>Writers</h2>") :]
    table = table[: table.index("</table>")]
    assert table.count("<tr>") == 7
    assert ("&lt;b&gt;" in table, "<b>" in table, "<h3>Sequencer</h3>" in text) == (True, False, True)
    assert "<h2>Writers</h2>" not in render("now", values | {"status": None}, None, None).decode()


def test_a_stream_and_its_files(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    write_pieces(stream, "a", 9, 3)
    write_pieces(stream, "b", 8, end=False)
    cut(".writers/b/chunk_00001.jsonl.completed", 3)(stream)
    sequence(stream)
    found = take_survey(stream, NOW)
    told = [(one.name, one.published_samples, one.stream_samples, one.state == "refused") for one in found.writers]
    assert told == [("a", 9, 8, False), ("b", 8, 4, True)]
    assert found.sequencer is not None and found.sequencer.stopped
    done = lazyshard("status", stream, "--json")
    assert [one["waiting_pieces"] for one in json.loads(done.stdout)["writers"]] == [1, 1]
    (stream / ".writers" / "committed.json").write_bytes(b"{}")
    found = take_survey(stream, NOW)
    assert (len(found.problems), found.sequencer, len(found.writers)) == (1, None, 2)


def test_an_ended_stream_without_some_rows(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    write_pieces(stream, "a", 9)
    write_pieces(stream, "b", 12, end=False)
    cut(".writers/b/chunk_00001.jsonl.completed", 3)(stream)
    publish_bytes(EndRequest(NOW).encode(), stream / ".writers" / "end.json", stream / ".writers" / ".end")
    sequence(stream)
    assert owners(stream)[-1] == ["a-8"]
    heads = [path.read_bytes() for path in sorted(stream.rglob("head.json"))]
    for name in "abc":  # Processes that the stream refuses are not shown
        raised(StreamEnded, ChunkWriter, stream, writer=name)
    assert heads == [path.read_bytes() for path in sorted(stream.rglob("head.json"))]
    a, b = json.loads(lazyshard("status", stream, "--json").stdout)["writers"]
    assert [(one["waiting_pieces"], one["left_out_samples"]) for one in (a, b)] == [(0, 0), (0, 8)]
    lines = status_lines(Looks().add(take_survey(stream, time.time())), watching=False)
    refused = "  writer      b: refused, 12 rows, 8 rows not part of the stream;"
    assert any(line.startswith(refused) for line in lines)
    assert "2 pieces of writers not part of it" in lazyshard("verify", stream).stdout


def test_the_process_of_the_sequencer_is_in_one_place(tmp_path: Path) -> None:
    write_pieces(stream := tmp_path / "s", "a", 9)
    sequence(stream)
    committed = stream / ".writers" / "committed.json"
    told = replace(Committed.decode(committed.read_bytes(), ""), host="node9", pid=99, updated_at=time.time() + 1)
    committed.write_bytes(told.encode())
    values = json.loads(lazyshard("status", stream, "--json").stdout)
    assert [(one["host"], one["pid"]) for one in (values["producer"], values["sequencer"])] == [("node9", 99)] * 2
    page = lazyshard("status", stream).stdout
    assert ("\nsequencer     idle\n  process     99 on node9" in page, page.count("99 on node9")) == (True, 1)


def test_what_writers_have_read_is_counted_together(tmp_path: Path) -> None:
    for name, rows in (("a", 9), ("b", 10)):
        write_pieces(stream := tmp_path / "s", name, rows, 2)
    sequence(stream)
    # The newest chunk has rows of both.
    assert producer_source(read_seal(stream, len(owners(stream)) - 1).source) is None
    values = json.loads(lazyshard("inspect", stream, "--json").stdout)
    assert values["source_rows"] == {"read": 19, "refused": 0, "exact": True}
