"""The student: trains on the teacher's texts while they are generated.

    python student.py STREAM FOLDER STEPS

Continues from its checkpoint in FOLDER, if there is one. As a named consumer it reports to the producer what it needs,
which limits how far the teacher is ahead, and its commits report what it no longer needs, which is deleted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from lazyshard import LazyShardedDataset
from teacher import LENGTH, TOKENS, Model

BATCH = 16
SAVE_STEPS = 16


def collate(rows: list[dict[str, Any]]) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Returns a batch: ids, tokens (samples × LENGTH), the teacher's probabilities (samples × LENGTH × TOKENS)."""
    candidates = torch.tensor([row["candidates"] for row in rows])
    target = torch.zeros(len(rows), LENGTH, TOKENS)
    target.scatter_(2, candidates, torch.tensor([row["probabilities"] for row in rows]))
    tokens = torch.tensor([row["tokens"] for row in rows])
    return [row["id"] for row in rows], tokens, target / target.sum(-1, keepdim=True)


def main() -> None:
    """Trains up to the given step."""
    stream, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Model(width=12)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    dataset = LazyShardedDataset(stream, batch_size=BATCH, num_samples=steps * BATCH, consumer="student")
    batches = dataset.batches(num_workers=1, collate_fn=collate)
    checkpoint = folder / "student.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        batches.load_state_dict(saved["data"])
    with (folder / "student.txt").open("a", buffering=1) as log:
        for ids, tokens, target in batches:
            loss = torch.nn.functional.kl_div(model(tokens).log_softmax(-1), target, reduction="sum")
            loss = loss / tokens.numel()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.write(f"{loss.item():.4f} {' '.join(map(str, ids))}\n")
            if batches.step % SAVE_STEPS == 0:
                state = batches.state_dict()
                values = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": state}
                torch.save(values, folder / "new.pt")
                os.replace(folder / "new.pt", checkpoint)
                batches.commit(last_epoch=True)  # chunks before the checkpoint may be deleted


if __name__ == "__main__":
    main()
