"""`rows`: row by row what ms-swift's own `load_dataset` makes of the same lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.swift.programs import found_by

PROGRAM = Path(__file__).with_name("rows_program.py")
USER = {"role": "user", "content": "question"}
ASSISTANT = {"role": "assistant", "content": "answer"}
CHAT = [USER, ASSISTANT]
PNG = "data:image/png;base64,iVBORw0KGgo="
Rows = list[dict[str, Any]]
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
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
    "alpaca": [
        {"instruction": "translate", "input": "dog", "output": "Hund"},
        {"instruction": "sing", "input": "", "output": "la"},
        {"instruction": "", "input": "dog", "output": "Hund"},
        {"instruction": "sing", "input": None, "output": "la"},
    ],
    "alpaca, some rows without input": [
        {"instruction": "translate", "input": "dog", "output": "Hund"},
        {"instruction": "sing", "output": "la"},
    ],
    "sharegpt": [
        {"conversations": [HUMAN, GPT]},
        {
            "conversations": [
                *(HUMAN, {"from": "function_call", "value": "{}"}),
                *({"from": "observation", "value": "r"}, GPT),
            ]
        },
    ],
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

ENCODED: dict[str, Rows] = {
    "too long": [{"query": "too long", "response": "a"}, {"query": "q", "response": "a"}],
    "impossible": [{"query": "impossible", "response": "a"}],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What both ways made of all cases."""
    folder = tmp_path_factory.mktemp("rows")
    # num_proc: or each file would get a pool of processes.
    common = {"remove_unused_columns": True, "load_from_cache_file": False, "num_proc": None}
    cases = {
        name: {"rows": rows, "options": common | OPTIONS.get(name, {})}
        for name, rows in (CASES | DROPPED | ENCODED).items()
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    result: dict[str, dict[str, Any]] = found_by(PROGRAM, folder, folder / "cases.json")
    return result


def plain(row: Any) -> Any:
    """Leaves out the nulls with which the ordinary path fills columns up, and its tag for several teachers."""
    if not isinstance(row, dict):
        return row
    return {
        name: value for name, value in row.items() if value is not None and name not in ("dataset", "return_length")
    }


@pytest.mark.parametrize("name", CASES)
def test_row_is_what_load_dataset_makes_of_it(found: dict[str, Any], name: str) -> None:
    ordinary, ours = found[name]["ordinary"], found[name]["ours"]
    assert isinstance(ordinary, list), ordinary
    assert [plain(row) for row in ours] == [plain(row) for row in ordinary]
    assert len(ours) == len(CASES[name])


def test_literal_rows(found: dict[str, Any]) -> None:
    # So that the tests above cannot agree on nothing.
    assert plain(found["alpaca"]["ours"][0]) == {
        "messages": [{"role": "user", "content": "translate\ndog"}, {"role": "assistant", "content": "Hund"}]
    }
    assert plain(found["image as one path"]["ours"][0]) == {
        "messages": CHAT,
        "images": [{"bytes": None, "path": "/a.png"}],
    }
    assert plain(found["columns"]["ours"][0]) == {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    }
    assert plain(found["unused columns"]["ours"][0]) == {"messages": CHAT, "label": 1, "channel": "c"}
    assert plain(found["unused columns kept"]["ours"][0])["meta"] == {"a": 1}


@pytest.mark.parametrize("name", DROPPED)
def test_row_that_load_dataset_drops_is_an_error_of_that_row_alone(found: dict[str, Any], name: str) -> None:
    (ordinary,), ours = found[name]["ordinary"], found[name]["ours"]
    assert plain(ours[0]) == plain(ordinary)
    # One that is dropped without an error is none.
    kinds = ["SkipSample"] if name == "no messages" else ["SkipSample", "AssertionError", "ValueError"]
    assert ours[1].partition(":")[0] in kinds


def test_row_that_is_too_long_is_skipped_and_other_errors_are_raised_as_they_are(found: dict[str, Any]) -> None:
    first, second = found["too long"]["ours"]
    assert first == "SkipSample: Current length of row(9) is larger"
    assert second["messages"] == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert second["return_length"] is True
    assert found["impossible"]["ours"] == ["ValueError: no such image"]
