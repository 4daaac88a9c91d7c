"""Rows through ms-swift's ordinary path and through ours; in a process of its own, since importing ms-swift warns.

An assertion that does not hold ends it.
"""

import copy
import importlib
import json
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lazyshard_swift.rlhf import encoder_of
from lazyshard_swift.rows import RowEncoder

USER = {"role": "user", "content": "question"}
ASSISTANT = {"role": "assistant", "content": "answer"}
CHAT = [USER, ASSISTANT]
PNG = "data:image/png;base64,iVBORw0KGgo="
Rows = list[dict[str, Any]]
USES = {"from": "function_call", "value": "{}"}, {"from": "observation", "value": "r"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
ALPACA = {"instruction": "translate", "input": "dog", "output": "Hund"}
SING = {"instruction": "sing", "output": "la"}
PAIR = {"query": "q", "response": "a"}
UNUSED = {"messages": CHAT, "id": 7, "meta": {"a": 1}, "label": 1, "channel": "c"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLED = {"role": "tool", "tool_call_id": "1", "content": "r"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
IMAGE = {"type": "image", "source": {"type": "url", "url": "/a.png"}}
# By name. A file has the columns of all of its rows: the ordinary path fills up with null.
CASES: dict[str, Rows] = {
    "messages": [
        {"messages": CHAT},
        {"messages": [{"role": "system", "content": "be brief"}, *CHAT, *CHAT]},
        {"messages": [USER, {**ASSISTANT, "loss": False}]},
        {"messages": [{**USER, "name": "anna"}, ASSISTANT]},
    ],
    "messages as text": [{"messages": json.dumps(CHAT)}, {"messages": str(CHAT)}],
    "query, response, system, history": [
        {**PAIR, "system": "s", "history": [["q0", "a0"], ["q1", "a1"]]},
        {**PAIR, "system": "", "history": []},
    ],
    "several responses": [{"query": "q", "response": ["a", "b"]}],
    "alpaca": [ALPACA, SING | {"input": ""}, ALPACA | {"instruction": ""}, SING | {"input": None}],
    "alpaca, some rows without input": [ALPACA, SING],
    "sharegpt": [{"conversations": [HUMAN, GPT]}, {"conversations": [HUMAN, *USES, GPT]}],
    "conversation of pairs": [{"conversation": [{"human": "q1", "assistant": "a1"}], "system": "s"}],
    "names of others": [{"question": "q", "answer": "a", "system_prompt": "s"}],
    "prompt and completion": [{"prompt": "q", "completion": "a"}],
    "text alone": [{"text": "once upon a time"}],
    "images": [
        {"messages": CHAT, "images": images}
        for images in (["/a.png", "/b.png"], [], [PNG], ["https://example.org/a.png"])
    ],
    "image as one path": [{"messages": CHAT, "image": "/a.png"}, {"messages": CHAT, "image": PNG}],
    "image as an object": [{"messages": CHAT, "image": {"bytes": None, "path": "/a.png"}}],
    "videos and audios": [
        {"messages": CHAT, "videos": ["/a.mp4"], "audios": ["/a.wav"]},
        {"messages": CHAT, "videos": [], "audios": ["data:audio/wav;base64,UklGRg=="]},
    ],
    "columns": [{"text1": "q", "text2": "a", "id": 1}],
    "columns in other letters": [{"Text1": "q", "text2": "a"}],
    "columns to messages": [{"dialog": CHAT}],
    "columns that hide one": [{"query": "no", "text1": "q", "response": "a"}],
    "columns that change places": [{"query": "a", "response": "q"}],
    "unused columns": [UNUSED],
    "unused columns kept": [UNUSED],
    "solution kept": [{"query": "q", "solution": "42"}],
    "without automatic names": [{"prompt": "q", "response": "a"}],
    "columns alone": [{"a": "q", "b": "r", "image": "/a.png"}],
    "tools": [
        {"messages": CHAT, "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}]}
        for name, parameters in (("f", {}), ("g", {"x": 1}))
    ],
    "tools as text": [{"messages": CHAT, "tools": '[{"name": "f"}]'}, {"messages": CHAT, "tools": "a tool"}],
    "tool calls of openai": [{"messages": [USER, CALLS, CALLED, ASSISTANT]}],
    "blocks of anthropic": [{"messages": [USER | {"content": [{"type": "text", "text": "q"}, IMAGE]}, ASSISTANT]}],
    "preferences": [{"messages": CHAT, "rejected_response": "no", "margin": margin} for margin in (0.5, 1.5)],
    "grounding": [{"messages": CHAT, "images": ["/a.png"], "objects": {"ref": ["dog"], "bbox": [[9, 9, 1, 1]]}}],
    "options of the chat template": [{"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "columns": {"columns": {"text1": "query", "text2": "response"}},
    "columns in other letters": {"columns": {"text1": "query", "TEXT2": "response"}},
    "columns to messages": {"columns": {"dialog": "messages"}},
    "columns that hide one": {"columns": {"query": "other", "text1": "query"}},
    "columns that change places": {"columns": {"query": "response", "response": "query"}},
    "unused columns kept": {"remove_unused_columns": False},
    "solution kept": {"remove_unused_columns": False},
    "without automatic names": {"disable_auto_column_mapping": True},
    "columns alone": {"columns": {"a": "query", "b": "response"}, "disable_auto_column_mapping": True},
}
DROPPED: dict[str, Rows] = {
    "no messages": [{"messages": CHAT}, {"messages": []}],
    "no content": [{"messages": CHAT}, {"messages": [{"role": "user", "content": None}]}],
    "unknown role": [{"messages": CHAT}, {"messages": [{"role": "robot", "content": "a"}]}],
    "rejected like chosen": [{"messages": CHAT, "rejected_response": text} for text in ("no", "answer")],
}
ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
# What some come to.
LITERAL: dict[str, dict[str, Any]] = {
    "alpaca": {"messages": [ASKED | {"content": "translate\ndog"}, ANSWERED | {"content": "Hund"}]},
    "image as one path": {"messages": CHAT, "images": [{"bytes": None, "path": "/a.png"}]},
    "columns": {"messages": [ASKED, ANSWERED]},
    "unused columns": {"messages": CHAT, "label": 1, "channel": "c"},
    "unused columns kept": UNUSED,
}


# Media as `bytes`: columns of a row, and what reaches the template.
URI = "data:image;base64,iVBORw=="
BLOB, IN_ROW = b"\x89PNG", {"bytes": b"\x89PNG", "path": None}
BLOBS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"images": [BLOB, BLOB]}, {"images": [IN_ROW, IN_ROW]}),
    ({"image": BLOB}, {"images": [IN_ROW]}),
    ({"image": {"bytes": BLOB}}, {"images": [IN_ROW]}),
    ({"images": ["/a.png", BLOB]}, {"images": [{"bytes": None, "path": "/a.png"}, IN_ROW]}),
    ({"images": [{"bytes": BLOB, "path": "/a.png"}]}, {"images": [{"bytes": BLOB, "path": "/a.png"}]}),
    ({"images": [BLOB], "rejected_images": BLOB}, {"images": [IN_ROW], "rejected_images": [IN_ROW]}),
    ({"audio": BLOB, "pdf": BLOB}, {"audios": [URI]}),
    ({"audios": ["/a.wav", {"bytes": BLOB, "path": None}]}, {"audios": ["/a.wav", URI]}),
    ({"videos": [BLOB, [BLOB, "/2.png"]]}, {"videos": [URI, [URI, "/2.png"]]}),
]


class Template:
    """Encodes to what it was given."""

    template_meta = SimpleNamespace(template_type="echo")

    def encode(self, row: dict[str, Any], return_length: bool = False) -> dict[str, Any]:
        text = str(row["messages"])
        if "too long" in text:
            raise importlib.import_module("swift.template").MaxLengthError("Current length of row(9) is larger")
        if "impossible" in text:
            raise ValueError("no such image")
        return {**row, "return_length": return_length}


def ordinary(rows: Rows, options: dict[str, Any]) -> Rows:
    # Of another name each time, or it may come from the cache.
    file = Path(f"rows_{uuid.uuid4().hex}.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    # num_proc: or each file would get a pool of processes.
    common = {"remove_unused_columns": True, "load_from_cache_file": False, "num_proc": None}
    dataset, _ = importlib.import_module("swift.dataset").load_dataset(str(file), **common | options)
    return [plain(row) for row in dataset]


def ours(rows: Rows, options: dict[str, Any]) -> list[Any]:
    """The rows, or the name of an error and what it says."""
    encoder = RowEncoder(
        Template(),
        columns=options.get("columns"),
        auto_columns=not options.get("disable_auto_column_mapping", False),
        keep_unused=not options.get("remove_unused_columns", True),
    )
    found: list[Any] = []
    for row in copy.deepcopy(rows):
        try:
            made = encoder(row)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            assert made["return_length"] is True
            found.append(plain(made))
    return found


def of_rlhf(kind: str, row: dict[str, Any]) -> Any:
    """What the trainer gets of a row, or an error, where a row has four tokens."""
    own = {"rlhf_type": kind, "loss_type": kind, "teacher_model_server": "rows", "gkd_logits_topk": 2}
    args = SimpleNamespace(**own, columns=None, remove_unused_columns=True)
    template = SimpleNamespace(encode=lambda row, return_length: {"input_ids": [7] * 4})
    try:
        return encoder_of(args, template, None)({"messages": CHAT, **row})
    except ValueError as error:
        return str(error)


def check_rlhf() -> None:
    assert "no label and no rejected_response" in of_rlhf("kto", {})
    assert of_rlhf("kto", {"label": False, "rejected_response": "other"}) == {"input_ids": [7] * 4}
    assert of_rlhf("grpo", {"id": 7}) == {"messages": CHAT}
    assert "no teacher_ids and no teacher_logprobs" in of_rlhf("gkd", {})
    for shape, fits in ((3, 2), True), ((4, 5), True), ((3, 1), False), ((2, 2), False), ((5, 2), False), ((6,), False):
        made = of_rlhf("gkd", dict.fromkeys(("teacher_ids", "teacher_logprobs"), np.ones(shape)))
        assert made["teacher_ids"].shape == (3, 2) if fits else f"teacher_ids has shape {shape}, " in made


def plain(row: Any) -> Any:
    """Leaves out the nulls with which the ordinary path fills columns up, and its tag for several teachers."""
    left = ("dataset", "return_length")
    return {name: value for name, value in row.items() if value is not None and name not in left}


def main() -> None:
    check_rlhf()
    for name, rows in CASES.items():
        options = OPTIONS.get(name, {})
        found = ours(rows, options)
        assert found == ordinary(rows, options), name
        # So that they cannot agree on nothing.
        assert name not in LITERAL or found[0] == LITERAL[name], name
    for name, rows in DROPPED.items():
        kept, dropped = ours(rows, {})
        assert [kept] == ordinary(rows, {}), name
        # One that is dropped without an error is none.
        kinds = ["SkipSample"] if name == "no messages" else ["SkipSample", "AssertionError", "ValueError"]
        assert dropped.partition(":")[0] in kinds, name
    # A row that is too long is skipped, other errors are raised as they are.
    long, other = ours([{"query": "too long", "response": "a"}, {"query": "q", "response": "a"}], {})
    assert (long, other) == ("SkipSample: Current length of row(9) is larger", {"messages": [ASKED, ANSWERED]})
    assert ours([{"query": "impossible", "response": "a"}], {}) == ["ValueError: no such image"]
    for given, reached in BLOBS:
        assert ours([{"messages": CHAT, **given}], {}) == [{"messages": CHAT, **reached}], given
    assert importlib.import_module("swift.template").load_file(URI).read() == BLOB
    (refusal,) = ours([{"query": "impossible", "response": "a", "image": BLOB}], {})
    assert refusal.startswith("ValueError: ") and "bytes in image: ValueError: no such image" in refusal


if __name__ == "__main__":
    main()
