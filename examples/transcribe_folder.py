"""A folder of recordings that is transcribed during training: recordings become rows with features and are trained.

    python examples/transcribe_folder.py [FOLDER]

Small WAV files appear in a folder, each with a word of a few letters. A transcriber publishes a row for each file: the
path of the recording, its text, and its features as an array, whose bytes are in the side file of the chunk. Meanwhile
two ranks train on these rows, each on its own chunks, in batches that a collate function pads. The second half is
recorded when the first half has been trained.

The transcriber replaces a speech model: each letter is a tone with its own pitch, and `transcribe` finds the loudest
one. So the example can check that every recording was transcribed correctly and trained once.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lazyshard import ChunkWriter, LazyShardedDataset, LazyShardedStream, StreamReader, as_tensor

LETTERS = "abcdefgh"
RECORDINGS = 196
PER_CHUNK = 8
RANKS = 2
BATCH = 4

SOUND_HZ = 8000
FRAME = 400
"""Audio samples per frame: a letter is one frame of 50 ms."""

Features = npt.NDArray[np.float16]


def record(folder: Path, numbers: range) -> None:
    """Writes recordings, each of a random word."""
    for number in numbers:
        chance = random.Random(number)
        word = "".join(chance.choices(LETTERS, k=chance.randint(2, 8)))
        times = np.arange(FRAME) / SOUND_HZ
        sound = np.concatenate([8000 * np.sin(2 * np.pi * pitch(letter) * times) for letter in word]).astype(np.int16)
        hidden = folder / f".{number:04}-{word}.wav"  # hidden until it is complete
        with wave.open(str(hidden), "wb") as file:
            file.setparams((1, 2, SOUND_HZ, len(sound), "NONE", ""))
            file.writeframes(sound.tobytes())
        hidden.rename(folder / hidden.name.removeprefix("."))


def pitch(letter: str) -> int:
    """Returns the frequency of a letter, in Hz."""
    return 400 + 200 * LETTERS.index(letter)


def transcribe(path: Path) -> tuple[str, Features]:
    """Returns the text of a recording and its features (frames × 16 bands). Replaces a speech model."""
    with wave.open(str(path), "rb") as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    spectrum = np.abs(np.fft.rfft(sound.reshape(-1, FRAME)))
    bands = spectrum[:, 10:170].reshape(-1, 16, 10).max(-1)  # of 200 Hz each, from 200 Hz
    text = "".join(LETTERS[band - 1] for band in bands.argmax(-1))
    return text, np.log1p(bands).astype(np.float16)


def publish(folder: Path, stream: Path) -> None:
    """Publishes a row for each recording until a file `_END` exists; after a restart it continues after the last row.

    Recordings are published in the order of their names, so later recordings must have later names.
    """
    with ChunkWriter(stream, samples_per_chunk=PER_CHUNK, arrays=True) as writer:
        last = writer.source or ""
        while True:
            ended = (folder / "_END").exists()  # before listing, so that the listing is complete
            for path in sorted(folder.glob("[!.]*.wav")):
                if path.name > last:
                    text, features = transcribe(path)
                    row = {"audio": str(path), "text": text, "features": features}
                    writer.write(row, tokens=len(text), source=path.name)
                    last = path.name
            if ended:
                return
            writer.heartbeat("waiting", note=f"the next recording in {folder}")
            time.sleep(0.1)


def encode(row: dict[str, Any]) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Returns a row as a sample: path, features (frames × bands) and letters (frames)."""
    letters = torch.tensor([LETTERS.index(letter) for letter in row["text"]])
    return row["audio"], as_tensor(row["features"]).float(), letters


def collate(samples: list[tuple[str, torch.Tensor, torch.Tensor]]) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Returns a padded batch of recordings; letters are padded with -100."""
    paths, features, letters = zip(*samples, strict=True)
    return (
        list(paths),
        pad_sequence(list(features), batch_first=True),
        pad_sequence(list(letters), batch_first=True, padding_value=-100),
    )


def train(rank: int, folder: Path) -> None:
    """Trains as one of the ranks, until the stream ends."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, len(LETTERS)))
    criterion = torch.nn.CrossEntropyLoss(ignore_index=-100)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    # Needs no length and ends with the stream; rank and world size are those of torch.distributed.
    stream = LazyShardedStream(LazyShardedDataset(folder / "stream", encode, batch_size=BATCH))
    with (folder / f"rank_{rank}.txt").open("w", buffering=1) as log:
        for paths, features, letters in DataLoader(stream, batch_size=BATCH, collate_fn=collate):
            loss = criterion(model(features).flatten(0, 1), letters.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.write(f"{loss.item():.4f} {' '.join(Path(path).name for path in paths)}\n")
    dist.destroy_process_group()


def trained(folder: Path) -> list[tuple[float, list[str]]]:
    """Returns the loss and the names of the recordings for each step that a rank logged."""
    lines = [line.split() for log in sorted(folder.glob("rank_*.txt")) for line in log.read_text().splitlines()]
    return [(float(loss), names) for loss, *names in lines]


def main() -> None:
    """Records while a transcriber and two ranks are running, and checks the result."""
    folder = Path(*sys.argv[1:] or ["runs/transcribe_folder"]).absolute()
    if folder.exists():
        sys.exit(f"{folder} already exists: remove it, or give another folder")
    audio, stream = folder / "audio", folder / "stream"
    audio.mkdir(parents=True)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=publish, args=(audio, stream), daemon=True)]
    processes += [fork.Process(target=train, args=(rank, folder), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()

    half = RECORDINGS // 2
    record(audio, range(half))
    whole = half - half % (RANKS * PER_CHUNK)  # full chunks, the same number for each rank
    while sum(len(names) for _, names in trained(folder)) < whole:
        if any(process.exitcode is not None for process in processes):
            sys.exit("a process exited too early")
        time.sleep(0.05)
    print(f"recorded {half} of {RECORDINGS}: {whole} of them are already transcribed and trained")

    record(audio, range(half, RECORDINGS))
    (audio / "_END").touch()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a process failed")

    reader = StreamReader(stream)
    published, row = reader.refresh(), reader.read(0)
    print(f"{published.samples} rows in {published.chunks} chunks; the first one:")
    print(f"  {Path(row['audio']).name}: {row['text']!r}, features {row['features'].shape} {row['features'].dtype}")
    losses = [loss for loss, _ in trained(folder)]
    names = [name for _, step in trained(folder) for name in step]
    print(f"trained {len(names)} on {RANKS} ranks; loss {losses[0]:.2f} at start, {losses[-1]:.2f} at end")

    wrong = [row["audio"] for row in reader if not row["audio"].endswith(f"-{row['text']}.wav")]
    assert not wrong, f"transcribed incorrectly: {wrong}"
    assert published.samples == RECORDINGS, "a recording was skipped or published twice"
    assert len(names) == len(set(names)), "a recording was trained twice"
    assert RECORDINGS - len(names) < RANKS * BATCH, f"{len(names)} were trained; a step or more is missing"
    assert losses[-1] < losses[0] / 2, f"the loss has not fallen: {losses}"
    left = RECORDINGS - len(names)
    print(f"ok: each recording was transcribed once and trained once, except for {left}, fewer than a step takes")


if __name__ == "__main__":
    main()
