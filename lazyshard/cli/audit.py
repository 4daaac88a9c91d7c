"""`lazyshard audit`: proves from the states of a run that each sample was trained once."""

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

# How the report calls samples that were not trained exactly once
_FATES: Final = {
    "to_come": "to come",
    "left_over": "left over",
    "skipped": "skipped on purpose",
    "other_splits": "in other splits",
    "twice": "TRAINED TWICE",
    "again": "TRAINED AND COMING AGAIN",
    "missing": "PASSED OVER",
}


def command(
    stream: StreamArgument,
    checkpoints: Annotated[
        list[Path] | None,
        Argument(metavar="[CHECKPOINTS]...", exists=True, help="Folders with checkpoints. Default: the cursor only."),
    ] = None,
    state: Annotated[Path | None, Option(metavar="FILE", exists=True, help="Audit this state, not the newest.")] = None,
    consumer: Annotated[
        str | None, Option(metavar="NAME", help="The run's cursor. Default: named in the checkpoints.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    r"""Proves that a run trained no sample twice and passed none over, or lists the samples for which it did.

    Reads the states in the checkpoints of the given folders (checkpoint-N/lazyshard.json, also one folder deeper, where
    ms-swift puts the checkpoints of each start) and the run's cursor in the stream (by default the one that the
    checkpoints name, or the only one). From the state that was saved last it computes every draw of the run and counts
    the draws of each sample: each sample must be trained once per epoch, or be still to come, left over at the end of
    an epoch, skipped on purpose, or in another split. Abandoned checkpoints, which are not on the way to the audited
    state, are listed separately with the samples that they trained and the model lacks.

    The result is a proof only if steps confirm the number of samples in the states: each checkpoint must give the step
    after which it was saved (in its file, or by the name of its folder), and the state must give the samples per step,
    as the states of `dataset.batches()` and of ms-swift do. Otherwise the run is reported as consistent, which holds if
    the training loop counted `consumed` correctly.

    Also checks that steps, consumed samples and states agree, that the states belong to this stream and the stream
    holds what they record, and that no chunk that the newest checkpoint still needs is deleted or may be deleted. Does
    not read rows; `lazyshard verify` does.

    Examples:
        lazyshard audit /shared/stream out
        lazyshard audit /shared/stream out --state out/v1-20251121-101500/checkpoint-1200
        lazyshard audit /shared/stream out --json | jq '.epochs\[].twice'

    Exit codes:
        0  proven, no problems found
        2  usage error; no such directory or consumer; or several cursors and no --consumer
        3  no state to audit, or one of the folders holds no checkpoint
        5  problems were found, each printed on a line; the audited state does not fit the stream; or there is no stream
        7  the filesystem or store failed: no permission, no answer
        9  consistent, but not proven: no steps confirm how many samples the states say were trained
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
        none = "no state to audit, neither in a checkpoint of the given folders nor in a cursor"
        complain(f"{directory}: {none}; give the folder that holds the checkpoints")
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
    """Returns the states of checkpoints; adds remarks on unusable ones and on blends without this stream."""
    states, files = list[SavedState](), dict[Path, None]()
    for folder in folders:
        # Auditing the cursor alone would prove something other than what the user requested.
        if not (found := checkpoint_files(folder)):
            expected = "expected checkpoint-N/lazyshard.json, or one folder deeper; give no folder to audit the cursor"
            raise ConfigInvalid(f"{folder}: no checkpoint found: {expected}", file=str(folder))
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
    """Returns the run's cursors: the requested one, or those that its checkpoints name, or the only one.

    If cursors exist but none of them is used, adds a note.
    """
    known, why = list_consumers(directory), None
    there = ", ".join(one.name for one in known)
    named = {saved.consumer for saved in states if saved.consumer is not None} if consumer is None else {consumer}
    found = [one for one in known if one.name in named or not named]
    others = f"the stream has: {there}" if known else "the stream has none"
    refuse_if(consumer is not None and not found, "--consumer", f"no consumer {consumer!r}; {others}")
    if named and known and not found:
        why = f"the checkpoints name {', '.join(sorted(named))}, the stream has the cursors of {there}"
    elif not named and len(known) > 1:
        refuse_if(not states, "--consumer", f"{directory} has the cursors of {there}: choose one")
        why, found = f"the stream has those of {there}, the checkpoints name none", []
    if why is not None:
        remarks.append(Remark("note", str(directory), f"no cursor is audited: {why}; choose one with --consumer"))
    return found


def _values(found: Audit, where: str) -> dict[str, Any]:
    epochs = [{"proven": one.proven, **asdict(one), "fewer_than_step": None} for one in found.epochs]
    epochs[-1]["fewer_than_step"] = found.fewer_than_step
    for one in epochs:
        del one["whole"]
    verdict = {"ok": found.ok, "proven": found.proven, "consistent": found.consistent}
    audited = {"audited": str(found.head.file), "consumed": found.head.state.consumed, "steps": _steps(found.tracing)}
    audited |= {} if found.head.sequences is None else {"counted": "sequences"}
    lists = {"states": [_state_values(one) for one in found.states], "epochs": epochs}
    lists |= {"findings": [one._asdict() for one in found.findings]}
    lists |= {"notes": [one._asdict() for one in found.remarks if one.kind == "note"]}
    return {"stream": where, **verdict, **found.tracing.facts._asdict(), **audited, **lists}


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
    """Yields the lines of the report, made of its JSON values."""
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
            yield f"{name} was abandoned after {after}: it trained {beyond}, which are not in the audited model"
        for epoch, again in (one["trained_again"] or {}).items():
            where = f"in epoch {epoch} by the audited run: {ranges_text(again['ranges'])}"
            yield f"  {again['samples']:,} of them were trained again {where}"
    for one in values["epochs"]:
        parts, step = [f"{one['trained']:,} trained"], one["fewer_than_step"]
        for kind, word in _FATES.items():
            coming = step and f"fewer than the {step:,} of a step, so they are left over if training stops here"
            detail = coming if kind == "to_come" else ranges_text(one[kind]["ranges"])
            if number := one[kind]["samples"]:
                parts.append(f"{number:,} {word}" + (f" ({detail})" if detail else ""))
        far = "" if values["ended"] else " published so far"
        yield f"epoch {one['epoch']}: {count(one['samples'], 'sample')}{far}: {', '.join(parts)}"
    for begin, remarks in (("note", values["notes"]), ("problem", values["findings"])):
        yield from (f"{begin}: {one['where']}: {one['what']}" for one in remarks)
    yield _verdict(values)


def _verdict(values: dict[str, Any]) -> str:
    if not all(one["proven"] for one in values["epochs"]):
        return "NOT proven: see the samples above that were trained twice or passed over"
    if not values["consistent"]:
        return "NOT proven: the states contradict their steps, their samples or the stream, see above"
    none = "no sample was trained twice, and none was passed over"
    name = next(one["cursor"] for one in values["states"] if one["relation"] == "audited")
    why = f"{values['audited']} does not record after which step of the run it was saved: give it the key 'step'"
    if name is not None:
        why = f"only the cursor {name!r} was audited, and a cursor records no step: give the folder with the"
        why += " run's checkpoint-N/lazyshard.json too; docs/trace.md tells how a loop writes it"
    if values["steps"] is None:
        why = f"the state in {values['audited']} does not record the samples per step: set micro_batches_per_step"
    text = f"consistent, but not proven: by the states {none}; nothing confirms their `consumed`: {why}"
    text = f"proven: {none}" if values["proven"] else text
    return text if values["ok"] else f"{text}; but {count(len(values['findings']), 'problem')} found, see above"
