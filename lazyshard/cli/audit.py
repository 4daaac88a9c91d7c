"""`lazyshard audit`: proves by the states of a run that each sample was trained once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

from typer import Argument, Option

from lazyshard.cli import exits
from lazyshard.cli.output import JsonOption, StreamArgument, chunk_bar, complain, count, find_stream, refuse_if, show
from lazyshard.cli.trace import ranges_text
from lazyshard.errors import ConfigInvalid, FormatInvalid, LazyShardError, StateMismatch
from lazyshard.inspection.auditing import Audit, Remark, audit, newest
from lazyshard.inspection.auditing_counts import AuditedState
from lazyshard.inspection.tracing import Tracing, facts_of
from lazyshard.inspection.tracing_states import SavedState, checkpoint_files, folder_of, read_state, state_of_cursor
from lazyshard.stream.cursor import Consumer, list_consumers
from lazyshard.stream.stream import open_now

# What becomes of a sample that is not trained once, in words
_FATES: Final = {
    "to_come": "to come",
    "left_over": "left over",
    "skipped": "skipped on purpose",
    "twice": "TRAINED TWICE",
    "again": "TRAINED AND COMING AGAIN",
    "missing": "PASSED OVER",
}


def command(
    stream: StreamArgument,
    checkpoints: Annotated[
        list[Path] | None,
        Argument(metavar="[CHECKPOINTS]...", exists=True, help="Folders with its checkpoints. Default: its cursor."),
    ] = None,
    state: Annotated[Path | None, Option(metavar="FILE", exists=True, help="Audit this state, not the newest.")] = None,
    consumer: Annotated[
        str | None, Option(metavar="NAME", help="The run's cursor. Default: as checkpoints say, or the only one.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    r"""Proves that a run trained no sample twice and passed none over, or names those.

    It reads the states in the checkpoints of the folders given (checkpoint-N/lazyshard.json, also one folder deeper,
    where ms-swift puts those of each start), and the run's cursor in the stream. From the one that was saved last it
    computes every draw of the run and counts them, sample by sample: each must be trained once an epoch, or be still to
    come, left over at an epoch's end, or skipped on purpose. Checkpoints from which the run has turned back are told
    apart, with what they trained that is not in the model.

    That is a proof where steps bear out the states' count of samples: where a checkpoint says after which step it was
    saved (in its file, or by the name of its folder), and the state what a step takes, as those of `dataset.batches()`
    and of ms-swift do. Otherwise the run is consistent, if the loop has counted `consumed` right.

    It also looks whether steps, consumed samples and states agree, whether the stream is the one of the states and
    holds what they tell, and whether any chunk is deleted, or given free, that the newest checkpoint still needs. Rows
    are not read: `lazyshard verify` does that.

    Examples:
        lazyshard audit /shared/stream out
        lazyshard audit /shared/stream out --state out/v1-20251121-101500/checkpoint-1200
        lazyshard audit /shared/stream out --json | jq '.epochs\[].twice'

    Exit codes:
        0  proven, and all is in order
        2  usage; there is no such directory; or it is not clear whose cursor is meant
        3  there is no state to audit, or none in one of the folders
        5  something is not in order: each is told in a line; the audited state does not fit the stream; or there is
           none
        7  the filesystem or store failed: no permission, no answer
        9  consistent, but not proven: no steps bear out how many samples the states say were trained
    """
    directory, remarks = find_stream(stream), list[Remark]()
    states = _read(checkpoints or (), directory, remarks)
    head = None if state is None else read_state(state, directory)
    if head is not None:
        real = os.path.realpath(head.file)
        states = [saved for saved in states if os.path.realpath(saved.file) != real] + [head]
    consumers = _consumers(directory, states, consumer, remarks)
    cursors = [one.cursor for one in consumers if one.cursor is not None]
    remarks += [Remark("unusable", one.name, one.problem) for one in consumers if one.problem is not None]
    states += [saved for cursor in cursors if (saved := state_of_cursor(directory, cursor)) is not None]
    if not states:
        unusable = [one for one in remarks if one.kind != "note"]
        for one in unusable:
            complain(one.what if one.what.startswith(one.where) else f"{one.where}: {one.what}")
        neither = "there is no state to audit: neither in a checkpoint in the folders given, nor in a cursor"
        complain(f"{directory}: {neither}; give the folder in which the checkpoints lie")
        return exits.STREAM_DAMAGED if unusable else exits.REFUSED
    if head is None:
        head, chosen = newest(states)
        remarks += [] if chosen is None else [Remark("note", str(head.file), chosen)]
    opened = open_now(directory, head.state.samples_per_chunk if head.state.stream_id is None else None)
    with chunk_bar() as report:
        result = audit(opened, facts_of(opened), states, head, cursors=cursors, remarks=remarks, report=report)
    values = _values(result, str(directory))
    show(values, _lines(values), as_json)
    return (exits.DONE if result.proven else exits.NOT_PROVEN) if result.ok else exits.STREAM_DAMAGED


def _read(folders: Sequence[Path], directory: Path, remarks: list[Remark]) -> list[SavedState]:
    """Returns the states of checkpoints; remarks on what cannot be used, or is of a blend without this stream."""
    states, files = list[SavedState](), dict[Path, None]()
    for folder in folders:
        # To continue with the cursor alone would prove another thing than was asked for.
        if not (found := checkpoint_files(folder)):
            expected = "expected checkpoint-N/lazyshard.json, or a folder deeper; without folders the cursor is audited"
            raise ConfigInvalid(f"{folder}: there is no checkpoint in it: {expected}", file=str(folder))
        files |= dict.fromkeys(found)
    for file in files:
        try:
            states.append(read_state(file, directory))
        except LazyShardError as error:
            miscounted = isinstance(error, FormatInvalid) and (error.field or "").endswith("consumed")
            kind: Any = "note" if isinstance(error, StateMismatch) else "samples" if miscounted else "unusable"
            remarks.append(Remark(kind, str(file), str(error).removeprefix(f"{file}: ")))
    return states


def _consumers(
    directory: Path, states: Sequence[SavedState], consumer: str | None, remarks: list[Remark]
) -> list[Consumer]:
    """Returns the run's cursors: those that were asked for, or that its checkpoints name, or the only one.

    Where there are some and none of them is taken, a note says so.
    """
    known, what = list_consumers(directory), None
    there = ", ".join(one.name for one in known)
    named = {saved.consumer for saved in states if saved.consumer is not None} if consumer is None else {consumer}
    found = [one for one in known if one.name in named or not named]
    others = f"there are: {there}" if known else "there is none"
    refuse_if(consumer is not None and not found, "--consumer", f"no consumer {consumer!r}; {others}")
    if named and known and not found:
        what = f"the checkpoints are of {', '.join(sorted(named))}, and there are the cursors of {there}"
    elif not named and len(known) > 1:
        refuse_if(not states, "--consumer", f"{directory} has the cursors of {there}: choose one")
        what, found = f"there are those of {there}, and the checkpoints name none", []
    if what is not None:
        text = f"no cursor is looked at: {what}; name the run's with --consumer"
        remarks.append(Remark("note", str(directory), text))
    return found


def _values(found: Audit, where: str) -> dict[str, Any]:
    epochs = [{"proven": one.proven, **asdict(one), "fewer_than_step": None} for one in found.epochs]
    epochs[-1]["fewer_than_step"] = found.fewer_than_step
    for one in epochs:
        del one["whole"]
    verdict = {"ok": found.ok, "proven": found.proven, "consistent": found.consistent}
    audited = {"audited": str(found.head.file), "consumed": found.head.state.consumed, "steps": _steps(found.tracing)}
    audited |= {} if found.head.sequences is None else {"counted": "sequences"}
    told = {"states": [_state_values(one) for one in found.states], "epochs": epochs}
    told |= {"findings": [one._asdict() for one in found.findings]}
    told |= {"notes": [one._asdict() for one in found.remarks if one.kind == "note"]}
    return {"stream": where, **verdict, **found.facts._asdict(), **audited, **told}


def _steps(tracing: Tracing | None) -> int | None:
    return None if tracing is None or tracing.steps.unknown is not None else tracing.steps.trained


def _state_values(one: AuditedState) -> dict[str, Any]:
    saved, branch = one.saved, one.trained is not None
    values: dict[str, Any] = {"file": str(saved.file), "relation": one.relation}
    values |= {"cursor": saved.cursor and saved.cursor.consumer}
    shared = sum(part.dp * draws for part, draws in zip(saved.state.parts, one.shared, strict=False) if part.trained)
    again = {str(epoch): asdict(found) for epoch, found in one.again.items()} if branch else None
    values |= {"consumed": saved.state.consumed, "steps": _steps(one.tracing), "trained_again": again}
    return values | {"left_after": shared if one.relation == "abandoned" else None, "trained_beyond": one.trained}


def _lines(values: dict[str, Any]) -> Iterator[str]:
    """Yields the report in words, of its JSON values."""
    deleted = f", those below {values['retired']:,} deleted" if values["retired"] else ""
    chunks, samples = count(values["chunks"], "chunk"), count(values["samples"], "sample")
    yield f"{values['stream']}: {chunks}{deleted}, {samples}, {'ended' if values['ended'] else 'not ended'}"
    states = [(folder_of(Path(one["file"])), one) for one in values["states"]]
    width, what = max(len(name) for name, _ in states), values.get("counted", "samples").removesuffix("s")
    for name, one in states:
        within = "" if one["steps"] is None else f" in {count(one['steps'], 'step')}"
        yield f"  {name:{width}}  {one['relation']:13}  {count(one['consumed'], what)}{within}"
    for name, one in states:
        if one["trained_again"] is not None:
            after, beyond = count(one["left_after"], what), f"{one['trained_beyond']:,} more"
            yield f"{name} left the course after {after}: it trained {beyond}, which are not in the audited model"
        for epoch, again in (one["trained_again"] or {}).items():
            where = f"on the course in epoch {epoch}: {ranges_text(again['ranges'])}"
            yield f"  {again['samples']:,} of them were trained again {where}"
    for one in values["epochs"]:
        parts, step = [f"{one['trained']:,} trained"], one["fewer_than_step"]
        for kind, word in _FATES.items():
            coming = step and f"fewer than the {step:,} of a step: left over too, if training stops here"
            told = coming if kind == "to_come" else ranges_text(one[kind]["ranges"])
            if number := one[kind]["samples"]:
                parts.append(f"{number:,} {word}" + (f" ({told})" if told else ""))
        far = "" if values["ended"] else " published so far"
        yield f"epoch {one['epoch']}: {count(one['samples'], 'sample')}{far}: {', '.join(parts)}"
    for begin, said in (("note", values["notes"]), ("not in order", values["findings"])):
        yield from (f"{begin}: {one['where']}: {one['what']}" for one in said)
    yield _verdict(values)


def _verdict(values: dict[str, Any]) -> str:
    if not all(one["proven"] for one in values["epochs"]):
        return "NOT proven: see what is trained twice or passed over"
    if not values["consistent"]:
        return "NOT proven: the states contradict their steps, their samples or the stream, see above"
    none = "no sample was trained twice, and none was passed over"
    why = "the checkpoint does not say after how many steps of the run it was saved"
    why = "the state does not say what a step takes" if values["steps"] is None else why
    text = f"consistent, if `consumed` was counted right: by the states {none}; {why}, so it cannot be checked"
    text = f"proven: {none}" if values["proven"] else text
    return text if values["ok"] else f"{text}; but {count(len(values['findings']), 'thing')} not in order, see above"
