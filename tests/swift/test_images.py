"""Images and audio as bytes in rows train as their files do, with tiny models of Qwen2-VL and Qwen2-Audio."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.swift.commands import Run, megatron_sft, missing_stack, swift_sft
from tests.swift.conftest import install
from tests.swift.warm import CPU, run_warm

pytestmark = [pytest.mark.full, pytest.mark.timeout(1000)]
ROWS: Final = 24
PACKAGES: Final = (
    *("qwen-vl-utils==0.0.14", "torchvision==0.28.0"),
    *("librosa==0.11.0", "audioread==3.1.0", "decorator==5.3.1", "lazy_loader==0.6", "llvmlite==0.50.0"),
    *("numba==0.68.1", "pooch==1.9.0", "soundfile==0.14.0", "soxr==1.1.0"),
)
"""What Qwen2-VL and Qwen2-Audio need beside ms-swift; torchvision is the one of the torch that is installed here."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `PACKAGES`, to be taken before the installed ones."""
    if reason := missing_stack():
        pytest.skip(reason)
    folder = install(tmp_path_factory.mktemp("vision"), *PACKAGES)
    # It describes kernels that cannot be loaded beside a torch without CUDA; images are made without them.
    (folder / "torchvision" / "_meta_registrations.py").write_text("")
    return folder


@pytest.fixture(scope="module")
def vision_model(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision_model")
    run_warm(folder, CPU / "tiny_model.py", folder / "model", "vision", packages=packages)
    return folder / "model"


@pytest.fixture(scope="module")
def streams(packages: Path, vision_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the streams that `images_program.py` writes while it checks their samples."""
    folder = tmp_path_factory.mktemp("images")
    program = Path(__file__).with_name("images_program.py")
    run_warm(folder, program, vision_model, folder, ROWS, packages=packages)
    return folder


def train(work: Path, model: Path, command: Callable[..., Run], streams: dict[str, Path], **options: Any) -> list[Run]:
    """Trains an epoch of each of the streams of the same rows; returns the runs."""
    options = {"template": "qwen2_vl", "sharded_lazy": True, "num_train_epochs": 1} | options
    runs = [command(work / name, model, dataset=stream, **options) for name, stream in streams.items()]
    assert sorted(number for batch in runs[0].batches for number in batch.ids) == list(range(ROWS))
    assert len(set(runs[0].losses.values())) > 1
    return runs


def test_swift(packages: Path, vision_model: Path, streams: Path, tmp_path: Path) -> None:
    images, videos = ("paths", "blobs", "encoded"), ("video_paths", "video_blobs")
    for names in (images, videos):
        of = {name: streams / name for name in names}
        runs = train(tmp_path, vision_model, swift_sft, of, processes=1, packages=packages)
        assert [run.losses == runs[0].losses for run in runs] == [True] * len(names)


def test_megatron(packages: Path, vision_model: Path, streams: Path, tmp_path: Path) -> None:
    two = {name: streams / name for name in ("paths", "blobs")}
    # By default its vision part needs FlashAttention.
    options = {"processes": 1, "packages": packages, "global_batch_size": 4, "vit_attn_impl": "sdpa"}
    runs = train(tmp_path, vision_model, megatron_sft, two, **options)
    assert runs[0].losses == runs[1].losses


def test_audio(packages: Path, tmp_path: Path) -> None:
    model, program = tmp_path / "model", Path(__file__).with_name("images_program.py")
    run_warm(tmp_path, CPU / "tiny_model.py", model, "audio", packages=packages)
    run_warm(tmp_path, program, model, tmp_path, ROWS, "sounds", packages=packages)
    four = {name: tmp_path / name for name in ("paths", "blobs", "encoded", "others")}
    options = {"processes": 1, "packages": packages, "template": "qwen2_audio"}
    runs = train(tmp_path / "runs", model, swift_sft, four, **options)
    assert [run.losses == runs[0].losses for run in runs] == [True, True, True, False]
