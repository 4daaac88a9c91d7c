"""`scripts/environment` hands on to uv what a machine has set for pip."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
SETTINGS: Final = """[global]
index-url = https://first.example/simple
extra-index-url =
    https://second.example/simple
    file:///third/simple
find-links = /from/the/file
default-timeout = 180
quiet = 1
"""


@pytest.fixture(scope="module")
def environment() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("environment", str(ROOT / "scripts/environment"))
    spec = importlib.util.spec_from_loader("environment", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_settings_of_pip_reach_uv(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(SETTINGS)
    for name in ("SSL_CERT_FILE", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_CERT", "/from/the/variable.crt")
    monkeypatch.setenv("PIP_FIND_LINKS", "/from/the/variable /and/another")
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "7")
    found = environment.pip_settings(sys.executable)
    assert found == {
        "SSL_CERT_FILE": "/from/the/variable.crt",
        "UV_DEFAULT_INDEX": "https://first.example/simple",
        "UV_EXTRA_INDEX_URL": "https://second.example/simple file:///third/simple",
        "UV_FIND_LINKS": "/from/the/variable /and/another",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_the_lock_names_no_address_and_no_cuda() -> None:
    lines = (ROOT / "scripts/locked.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 200
    assert [line for line in lines if "://" in line or line.startswith("-") or "nvidia" in line or "cuda" in line] == []
    assert [line for line in lines if line.startswith("torch==")] == ["torch==2.13.0"]
    assert "pymdown-extensions==12.3 ; python_full_version < '3.11.5'" in lines
