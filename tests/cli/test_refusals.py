"""What each command refuses: in one line that names it, with a code, with nothing on stdout and nothing changed."""

import json
import os
import shlex
from pathlib import Path
from typing import Final

import pytest

from lazyshard.part import Part
from lazyshard.stream.listing import retire
from tests.cli.commands import commit, fill, lazyshard, make_stream, run_of, save, two_ranks
from tests.conversion.test_exporting import ids
from tests.conversion.test_exporting import stream as tokens
from tests.stream.damage import delete, flip, put, stream
from tests.stream.streams import foreign
from tests.tiers import full

SIMULATE: Final = "simulate --ranks 2 --batch 2 --step-seconds 0.25 --producer-rate 8 --samples-per-chunk 4"
TRACE: Final = "trace run --state run/checkpoint-4"

REFUSALS: Final = [
    ("mend", 2, "(see `lazyshard --help`)"),
    ("verify", 2, "(see `lazyshard verify --help`)"),
    ("verify a.jsonl", 2, "a.jsonl"),
    ("verify stream --samples-per-chunk 0", 2, "--samples-per-chunk"),
    ("verify stream --forever", 2, "--forever"),
    ("verify stream --jobs 0", 2, "--jobs"),
    ("verify stream --samples-per-chunk 3", 5, "3"),
    *[(f"{command} bare", 5, "bare") for command in ("verify", "status", "status --json", "inspect")],
    *[(f"{command} later", 5, "stream.json") for command in ("verify", "status", "status --json", "inspect")],
    *[(f"{command} doubled", 3, "chunk_0.jsonl") for command in ("status", "status --json", "inspect")],
    ("status a.jsonl", 2, "a.jsonl"),
    ("status /no/such/place --watch", 2, "/no/such/place"),
    ("status '' --watch", 2, "STREAM"),
    *[(f"{command} {'a' * 300}", 2, "aaa") for command in ("status", "verify", "inspect")],
    *[(f"status stream --interval {words}", 2, "--interval") for words in ("1", "0 --watch")],
    ("inspect", 2, "STREAM"),
    ("inspect stream 5", 2, "from 0 to 4"),
    ("inspect stream --chunk 3", 2, "from 0 to 2"),
    ("inspect empty 0", 2, "sample 0"),
    ("inspect stream 0 --chunk 0", 2, "--chunk"),
    ("inspect stream --rows 1", 2, "--rows"),
    ("inspect stream 0 --all", 2, "--all"),
    ("inspect stream --samples-per-chunk 3", 5, "3"),
    ("inspect damaged 1", 5, "chunk_00000.jsonl: row 1 (byte 9)"),
    ("inspect damaged 2", 5, "chunk_00001.jsonl"),
    ("inspect damaged --chunk 2", 5, "chunk_00002.jsonl.completed"),
    *[(f"inspect retired {words}", 5, "below 1") for words in ("0", "--chunk 0")],
    *[(f"{TRACE} --step {step}", 2, "--step") for step in ("0", "5:5")],
    (f"{TRACE} --sample 1,x", 2, "--sample"),
    (f"{TRACE} --sample 7,24,99", 2, "no sample 24, 99"),
    (f"{TRACE} --step 3 --rank 3", 2, "--rank"),
    (f"{TRACE} --step 3 --sample 1", 2, "--sample"),
    (f"{TRACE} --rank 3", 2, "--rank"),
    (f"{TRACE} --chunk 3", 2, "--chunk"),
    (f"{TRACE} --chunk 7 --row 3", 2, "--row"),
    *[(f"{TRACE} --source {place}", 2, "--source") for place in ("in.jsonl", "in.jsonl:L0")],
    (f"{TRACE} --text ''", 2, "--text"),
    (f"{TRACE} --all", 2, "--all"),
    (f"{TRACE} --consumer a", 2, "--consumer"),
    ("trace stream --state other", 5, "stream_id"),
    ("trace run --state blind --step 1", 5, "step 1"),
    ("trace nothing --state other", 5, "nothing"),
    ("trace run --state nowhere", 2, "--state"),
    ("trace plain --state unnamed --sample 0 --origins", 2, "--origins"),
    ("trace plain --state unnamed --source in.jsonl:L1", 2, "--source"),
    ("forget run sfd --yes", 3, "registered: sft"),
    ("forget stream sft --yes", 3, "stream"),
    ("forget later sft --yes", 5, "later"),
    ("forget run", 2, "NAME"),
    *[(f"forget run {name}", 2, "NAME") for name in ("''", "../sft", ".sft")],
    *[(f"export tokens {name}", 2, "PREFIX") for name in ("tokens/", "nowhere/a", "a.idx")],
    *[(f"export tokens a {option} rows", 2, option) for option in ("--dtype", "--document-boundaries")],
    # These import megatron-core.
    *full(("export tokens a --field labels", 3, "tokens/chunk_00000.jsonl:1: "), ("export torn a", 5, "chunk_00000")),
    ("export retired a", 3, "retired"),
    *[(f"watch stream --save '{file}'", 2, "--save") for file in ("", "/dev/null", ".", "no/page.html", "s3://b/a")],
    ("audit stream nothing", 3, "nothing"),
    ("audit stream", 3, "stream"),
    ("audit stream nowhere", 2, "nowhere"),
    # A folder without checkpoints is not passed over in silence where there is a cursor, which alone is proven.
    ("audit run unsaid", 3, "unsaid"),
    ("watch coming --save page.html", 2, "coming"),
    ("watch nothing --save page.html", 5, "nothing"),
    ("watch no/stream", 2, "no/stream"),
    *[(f"watch stream --host '{host}'", 2, "--host") for host in ("no such host", "")],
    ("watch stream --interval 0", 2, "--interval"),
    *[(f"verify-filesystem {words}", 2, "") for words in ("", "/no/such", "--serve /no/such", ". . --far true")],
    *[(f"verify-filesystem . {words}", 2, "--") for words in ("--longest 0", "--far ''", '--far "\'"')],
    ("check-config missing.yaml", 7, "missing.yaml"),
    *[(f"check-config {file}", 2, "FILE") for file in (".", "''")],
    ("simulate", 2, "--ranks"),
    (SIMULATE, 2, "--rows"),
    (f"{SIMULATE} --rows 64 --chunks 16", 2, "--chunks"),
    (f"{SIMULATE} --rows 64 --rows-a-second 8", 2, "--rows-a-second"),
    (f"{SIMULATE} --rows 3", 2, "--rows"),
    *[(f"{SIMULATE} --rows 64 --{one} -1", 2, one) for one in ("samples-per-chunk", "latency", "visibility", "window")],
    (f"{SIMULATE} --rows 64 --max-ahead much", 2, "--max-ahead"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("refusals")
    (here / "nothing").mkdir()
    (here / "a.jsonl").touch()
    stream(here / "stream")
    stream(here / "empty", 0)
    flip("chunk_00000.jsonl", 10)(stream(here / "damaged"))
    delete("chunk_00001.jsonl", "chunk_00002.jsonl.completed")(here / "damaged")
    retire(stream(here / "retired", 4, end=False), 1, 2)
    put("chunk_0.jsonl")(foreign(here / "doubled", b"{}\n"))
    fill(here / "bare")
    foreign(here / "plain", *[b'{"id":0}\n{"id":1}\n{"id":2}\n'] * 4)
    (here / "unnamed").write_text(json.dumps(run_of(None, two_ranks(1)).to_dict()))
    put("stream.json", b'{"format":3}')(stream(here / "later"))
    rows = ids([1, 2], [3], [4, 5, 6])
    tokens(here / "tokens", rows)
    flip("chunk_00000.jsonl", 14)(tokens(here / "torn", rows))
    stream_id = make_stream(here / "run")
    state = run_of(stream_id, two_ranks(2), Part(3, 1, 2, skip=((16, 18),), first_step=2, draws_per_step=1))
    save(here / "run", 4, state)
    commit(here / "run", state)
    (here / "unsaid" / "step-5").mkdir(parents=True)
    (here / "unsaid" / "step-5" / "lazyshard.json").write_text("{}")
    (here / "other").write_text(json.dumps(run_of("f" * 32, two_ranks(2)).to_dict()))
    (here / "blind").write_text(json.dumps(run_of(stream_id, Part(2, 1, 4)).to_dict()))
    return here


@pytest.mark.parametrize(("words", "code", "named"), REFUSALS)
def test_refusal(words: str, code: int, named: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    before = {path: os.stat(path).st_mtime_ns for path in place.rglob("*")}
    done = lazyshard(*shlex.split(words))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert done.stderr.startswith("lazyshard: error: ") and named in done.stderr
    assert {path: os.stat(path).st_mtime_ns for path in place.rglob("*")} == before
