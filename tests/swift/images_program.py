"""Rows with images as bytes through the template of Qwen2-VL; in a process of its own, since importing ms-swift warns.

    python images_program.py MODEL FOLDER ROWS [sounds]

Writes streams to FOLDER for `test_images.py`: of rows whose images are `paths` or `blobs`, and of the latter `encoded`
by the producer; of rows with a video of two frames, `video_paths` and `video_blobs`; with "sounds" of rows with audio
for Qwen2-Audio, and of the same rows with `others`' audio. An assertion that does not hold ends it.
"""

import io
import json
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lazyshard import StreamReader
from lazyshard_producer.cli import main as producer
from lazyshard_swift.rows import EncodedRows, open_encoder, unpack
from tests.data.test_encode import same
from tests.stream.streams import lengths_of, publish_rows, seal
from tests.swift.streams import row

SIZE, TOKEN, MAX_LENGTH = 8, "<image>", 512


def picture(number: int) -> bytes:
    """A PNG of 4 to 12 tokens, other ones for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (56, 28 * (2 + number % 5), 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def asking(number: int, token: str = TOKEN, **media: Any) -> dict[str, Any]:
    question, answer = row(number)["messages"]
    return {"messages": [question | {"content": token + question["content"]}, answer], **media}


def write(directory: Path, rows: list[dict[str, Any]]) -> str:
    return str(publish_rows(directory, SIZE, rows, arrays=True))


def produce(model: str, source: str, out: Path, *options: str, template: str = "qwen2_vl") -> int:
    common = ("--source", source, "--out", str(out), "--samples-per-chunk", str(SIZE), "--no-progress")
    encoding = ("--template", template, "--encode-option", f"model_type={template}", "--max-length", str(MAX_LENGTH))
    return producer(["run", *common, "--model", model, *encoding, *options])


def patches_of(directory: Path) -> list[int]:
    """The patches that the seals have."""
    sealed = [seal(directory, chunk).patches for chunk in range(len(list(directory.glob("*.completed"))))]
    return [int(one) for patches in sealed if patches is not None for one in patches]


def check_patches(model: str, root: Path, blobs: str, expected: list[int]) -> None:
    """Patches are sealed as by the processor's grids, with both options, and bound packs."""
    assert expected[0] == 16 and len(set(expected)) == 5
    assert patches_of(root / "encoded") == expected
    assert patches_of(root / "measured") == expected[:1]
    for name, options in {"packs": ("--encode", "swift"), "raw_packs": ("--measure", "swift")}.items():
        bounds = ("--pack", "400", "--pack-patches", "64", "--balance", "2", "--cost-per-patch", "0.1")
        assert produce(model, blobs, root / name, *options, *bounds) == 0
        packs = patches_of(root / name)
        assert sum(packs) == sum(expected) and 48 < max(packs) <= 64


def main(model: str, folder: str, rows: str) -> None:
    root, data = Path(folder), list(map(picture, range(int(rows))))
    files = [root / f"{number}.png" for number in range(len(data))]
    for path, content in zip(files, data, strict=True):
        path.write_bytes(content)
    write(root / "paths", [asking(number, images=[str(path)]) for number, path in enumerate(files)])
    blobs = write(root / "blobs", [asking(number, images=[content]) for number, content in enumerate(data)])

    encode, _ = open_encoder(model, "qwen2_vl", MAX_LENGTH, [("model_type", "qwen2_vl")])
    expected = [unpack(encode(one)) for one in StreamReader(root / "paths")]
    assert expected[0]["pixel_values"].shape == (4 * 4, 3 * 2 * 14 * 14)
    assert not torch.equal(expected[0]["pixel_values"], expected[5]["pixel_values"])
    assert all(one["input_ids"].count(151655) == len(one["pixel_values"]) / 4 for one in expected)
    assert same([unpack(encode(one)) for one in StreamReader(blobs)], expected)
    for form in ([{"bytes": data[0], "path": None}], {"bytes": data[0]}, data[0]):
        assert same(unpack(encode(asking(0, images=form))), expected[0])
    parts = [{"type": "image", "image": data[0]}, {"type": "text", "text": row(0)["messages"][0]["content"]}]
    inside = {"messages": [{"role": "user", "content": parts}, row(0)["messages"][1]]}
    assert same(unpack(encode(inside)), expected[0])
    pictures: dict[str, list[Any]] = {"paths": list(map(str, files)), "blobs": data}
    for name, frames in pictures.items():
        # Two frames of one size: that of a picture depends on the remainder of its number.
        two = ([frames[number], frames[(number + 5) % 20]] for number in range(len(frames)))
        write(root / f"video_{name}", [asking(n, "<video>", videos=[one]) for n, one in enumerate(two)])
    videos = [[unpack(encode(one)) for one in StreamReader(root / f"video_{name}")] for name in ("paths", "blobs")]
    assert "pixel_values_videos" in videos[0][0] and same(*videos)

    # By the producer; one that is no image, one that is cut, and one of 225 million pixels in 28 KB are bad rows.
    bomb = io.BytesIO()
    Image.new("1", (15_000, 15_000)).save(bomb, "png")
    bad = write(root / "bad", [asking(0, images=[one]) for one in (b"none", data[1][:500], bomb.getvalue(), data[0])])
    assert produce(model, blobs, root / "encoded", "--encode", "swift") == 0
    assert same([EncodedRows()(one) for one in StreamReader(root / "encoded")], expected)
    assert produce(model, bad, root / "measured", "--measure", "swift", "--on-bad-row", "quarantine") == 0
    assert lengths_of(root / "measured") == [expected[0]["length"]]
    check_patches(model, root, blobs, [int(one["image_grid_thw"].prod(-1).sum()) for one in expected])
    assert StreamReader(root / "measured").read(0) == asking(0, images=[data[0]])
    refused = [json.loads(line)["reason"] for line in (root / "measured" / "quarantine.jsonl").read_text().splitlines()]
    errors = ("UnidentifiedImageError", "OSError", "DecompressionBombError")
    for reason, error in zip(refused, errors, strict=True):
        assert f"with bytes in images: {error}: " in reason


def sound(number: int) -> bytes:
    """A WAV of a quarter to a whole second, of another length and pitch for each number."""
    times = np.arange(4000 + 500 * number) / 16_000
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(16_000)
        audio.writeframes((8000 * np.sin(2 * np.pi * (200 + 50 * number) * times)).astype("<i2").tobytes())
    return file.getvalue()


def listening(number: int, audio: str | bytes) -> dict[str, Any]:
    question, answer = row(number)["messages"]
    return {"messages": [question | {"content": "<audio>" + question["content"]}, answer], "audios": [audio]}


def sounds(model: str, folder: str, rows: str, _: str) -> None:
    root, data = Path(folder), list(map(sound, range(int(rows))))
    files = [root / f"{number}.wav" for number in range(len(data))]
    for path, content in zip(files, data, strict=True):
        path.write_bytes(content)
    paths = write(root / "paths", [listening(number, str(path)) for number, path in enumerate(files)])
    blobs = write(root / "blobs", [listening(number, content) for number, content in enumerate(data)])
    write(root / "others", [listening(number, content) for number, content in enumerate(reversed(data))])

    encode = open_encoder(model, "qwen2_audio", MAX_LENGTH, [("model_type", "qwen2_audio")])[0]
    expected = [unpack(encode(one)) for one in StreamReader(paths)]
    assert expected[0]["input_features"].shape == (1, 16, 100)
    # Frames of 10 ms, as many as the file has.
    assert [int(one["feature_attention_mask"].sum()) for one in expected[:5:4]] == [25, 38]
    assert same([unpack(encode(one)) for one in StreamReader(blobs)], expected)
    assert produce(model, blobs, root / "encoded", "--encode", "swift", template="qwen2_audio") == 0
    assert same([EncodedRows()(one) for one in StreamReader(root / "encoded")], expected)


if __name__ == "__main__":
    (sounds if sys.argv[4:] else main)(*sys.argv[1:])
