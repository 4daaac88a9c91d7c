from lazyshard.format import records
from tests.stream.streams import raised


def test_names_of_the_stream_files() -> None:
    assert (records.MANIFEST, records.HEAD, records.LOCK) == ("stream.json", "head.json", ".producer.lock")
    assert (records.END, records.OWNER, records.TEMPORARY) == ("stream.end", "stream.owner", ".tmp")
    for name in (records.chunk_name, records.seal_name, records.arrays_name):
        raised(ValueError, name, -1)


def test_chunk_number_has_five_digits_and_grows_and_any_other_name_is_no_chunk() -> None:
    digits = {0: "00000", 42: "00042", 99999: "99999", 100000: "100000", 10**15: "1" + "0" * 15}
    for chunk, text in digits.items():
        assert records.chunk_name(chunk) == f"chunk_{text}.jsonl"
        assert records.seal_name(chunk) == f"chunk_{text}.jsonl.completed"
    for text in ("7", "0000000007", "00000000000000000001", "1700000000000000000"):
        assert records.parse_chunk_name(f"chunk_{text}.jsonl") == (int(text), False)
        assert records.parse_chunk_name(f"chunk_{text}.jsonl.completed") == (int(text), True)
    numbers = ("", "-1", "+1", "1_000", " 1", "1e3", "\u0661", "²", "1" * 5000)
    suffixes = (".jsonl\n", ".json", "xjsonl", ".jsonl.gz", ".jsonl.completed.completed", ".jsonl.tmp")
    others = ("", "\nchunk_00001.jsonl", ".chunk_00001.jsonl", "Chunk_00001.jsonl", "stream.json", "stream.end")
    like = [f"chunk_{number}.jsonl" for number in numbers] + [f"chunk_00001{suffix}" for suffix in suffixes]
    for name in [*like, *others]:
        assert records.parse_chunk_name(name) is None, name
