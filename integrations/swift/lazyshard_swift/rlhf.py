"""Rows of a stream for the RLHF types of ms-swift whose rows are not encoded as for dpo.

kto: each row holds the response of another row for the KL term, `rejected_response`: ms-swift would take it from a
neighbour in the shuffled data set.

gkd, grpo: the trainer encodes the rows itself. For gkd they may hold what a teacher predicts for the token after each
one, most probable tokens first: `teacher_ids` and `teacher_logprobs`, arrays of shape (tokens - 1, k).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lazyshard_swift import rows
from lazyshard_swift.arguments import STORED, TAKE_ROWS
from lazyshard_swift.errors import refused
from lazyshard_swift.rows import Encode, EncodedRows, RowEncoder

_OUTPUTS: Final = ("teacher_ids", "teacher_logprobs")


@dataclass(eq=False)
class _RlhfRows(RowEncoder):
    """Encodes rows for kto; for gkd and grpo only to find those that cannot be encoded, and returns the rows."""

    kind: str = "kto"
    needs: tuple[str, ...] = ()
    topk: int = 0

    def _encode(self, row: dict[str, Any]) -> Any:
        outputs = {name: row[name] for name in _OUTPUTS if name in row}
        rest = {name: value for name, value in row.items() if name not in outputs}
        standard = rest if self.prepared else self._standardise(rest)
        if missing := [name for name in self.needs if (standard | outputs).get(name) is None]:
            raise ValueError(f"it has no {' and no '.join(missing)}, which --rlhf_type {self.kind} needs")
        encoded = RowEncoder(self.template, prepared=True)(standard)
        if self.kind == "kto":
            return encoded
        tokens = len(encoded["input_ids"]) - 1
        for name in _OUTPUTS if self.topk else ():
            values = np.asarray(outputs[name])
            if values.ndim != 2 or len(values) - tokens not in (0, 1) or values.shape[1] < self.topk:
                of = f"the template makes {tokens + 1} tokens of the row, --gkd_logits_topk is {self.topk}"
                raise ValueError(f"{name} has shape {values.shape}, expected ({tokens}, {self.topk}): {of}")
            standard[name] = values[:tokens, : self.topk]
        return standard


def encoder_of(args: Any, template: Any, most: int | None) -> Encode:
    """Returns the encoder of raw rows by ms-swift's arguments."""
    kind = getattr(args, "rlhf_type", None)
    if kind != "kto" and kind not in TAKE_ROWS:
        return rows.encoder_of(args, template, most)
    stored = kind == "gkd" and args.teacher_model_server == STORED
    needs: tuple[str, ...] = _OUTPUTS if stored else ()
    if kind == "kto":
        needs = ("label",) if args.loss_type == "apo_zero_unpaired" else ("label", "rejected_response")
    options = rows.row_options(args) | {"keep_unused": not args.remove_unused_columns}
    return _RlhfRows(template, **options, kind=kind, needs=needs, topk=args.gkd_logits_topk if stored else 0)


def check_encoders(args: Any, encoders: Sequence[Encode]) -> None:
    """Refuses encoded streams for trainers that take rows."""
    kind = getattr(args, "rlhf_type", None)
    if kind in TAKE_ROWS and any(isinstance(one, EncodedRows) for one in encoders):
        raise refused("dataset", f"has encoded rows, --rlhf_type {kind} takes raw ones: produce it without --encode")
