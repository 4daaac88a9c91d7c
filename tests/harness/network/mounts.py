"""A folder that an sshd of its own serves to this machine by a pipe (`sshd -i`), mounted by sshfs. Needs root."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest

from tests.harness.disks import find_tool, tool

# As NFS has it: names, missing names and attributes are remembered for seconds, listings are not
CACHED: Final = ("dir_cache=no", "entry_timeout=7", "negative_timeout=7", "attr_timeout=7")
CACHED_S: Final = 7.0
DEFAULT: Final[tuple[str, ...]] = ()  # listings and attributes for 20 s, missing names not at all
DEFAULT_S: Final = 20.0

_SSHD: Final = """\
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
Subsystem sftp internal-sftp
"""

_SSH: Final = """\
Host *
  ProxyCommand {sshd} -i -f {folder}/sshd.conf -E {folder}/sshd.log
  IdentityFile {folder}/user
  IdentitiesOnly yes
  IdentityAgent none
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  GlobalKnownHostsFile /dev/null
  LogLevel ERROR
"""


def why_not() -> str | None:
    if os.geteuid() != 0:
        return "needs root, to mount filesystems"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs /dev/fuse"
    lacking = [name for name in ("sshfs", "sshd", "ssh-keygen", "setpriv", "umount") if find_tool(name) is None]
    return f"needs {', '.join(lacking)}, which this machine lacks" if lacking else None


class Mount:
    def __init__(self, folder: Path, name: str, options: tuple[str, ...]) -> None:
        self.point: Final = folder / name  # where it is mounted
        self.options: Final = options  # of sshfs
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Mount":
        self.point.mkdir(exist_ok=True)
        self.bring_up()
        return self

    def __exit__(self, *_: object) -> None:
        self.take_down()

    def bring_up(self) -> None:
        log = self._folder / f"{self.point.name}.log"
        options = [argument for option in self.options for argument in ("-o", option)]
        # sshfs dies with this process, whatever ends it, and its server with it.
        command = [tool("setpriv"), "--pdeathsig", "KILL", tool("sshfs"), "-f", "-F", str(self._folder / "ssh.conf")]
        with log.open("ab") as said:
            command += [*options, f"lazyshard:{self._folder / 'real'}", str(self.point)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        deadline = time.monotonic() + 30.0
        while not self.is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.take_down()
                pytest.skip(f"sshfs cannot mount here: {log.read_text().strip() or 'it says nothing'}")
            time.sleep(0.005)

    def take_down(self) -> None:
        """Unmounts it, even if it hangs; whoever waits for an answer gets an error."""
        self.kill()
        while self.is_up():
            subprocess.run([tool("umount"), "-l", str(self.point)], check=True)

    def is_up(self) -> bool:
        return f" {self.point} " in Path("/proc/self/mountinfo").read_text()

    def detach(self) -> None:
        """Takes the mount point away from the filesystem, which continues for whoever has files open (`umount -l`)."""
        subprocess.run([tool("umount"), "-l", str(self.point)], check=True)

    def kill(self) -> None:
        """Kills the client: every call there fails with ENOTCONN, until it is unmounted and mounted again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def revive(self) -> None:
        self.take_down()
        self.bring_up()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


class Share:  # A folder that is served, in an empty `folder`. Skips the test where network mounts cannot be had.
    def __init__(self, folder: Path) -> None:
        if (reason := why_not()) is not None:
            pytest.skip(reason)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # Systems make it when they start a server
        self._folder = folder
        self.real: Final = folder / "real"  # what is served, as the server sees it
        self.real.mkdir()
        for name in ("host", "user"):
            command = [tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        (folder / "sshd.conf").write_text(_SSHD.format(folder=folder))
        (folder / "ssh.conf").write_text(_SSH.format(folder=folder, sshd=tool("sshd")))

    def mount(self, name: str, options: tuple[str, ...]) -> Mount:
        """Returns a mount of the folder, to be entered. `options`: of sshfs, each as it stands behind a `-o`."""
        return Mount(self._folder, name, options)

    def clear(self) -> None:
        for path in self.real.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


READING: Final = ("open", "stat", "lstat", "fstat", "pread", "listdir", "scandir", "readlink")
WRITING: Final = ("write", "fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "ftruncate")


class StaleCall:
    """While it is entered, call `number` of `names` about `folder`, or a descriptor in it, fails; 0 for none."""

    def __init__(self, folder: Path, number: int, names: tuple[str, ...] = READING, error: int = errno.ESTALE) -> None:
        self.calls: list[str] = []  # the functions that were called, in order, each with what it was asked for
        self._prefix, self._number, self._error = os.path.realpath(folder), number, error
        self._readlink = os.readlink
        self._patch = mock.patch.multiple(os, **{name: self._counted(name, getattr(os, name)) for name in names})

    def __enter__(self) -> "StaleCall":
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _counted(self, name: str, call: Callable[..., Any]) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            asked = arguments[0] if arguments else "/"
            path = self._readlink(f"/proc/self/fd/{asked}") if isinstance(asked, int) else os.path.abspath(asked)
            path = path.removesuffix(" (deleted)")
            if f"{path}/".startswith(f"{self._prefix}/"):
                self.calls.append(f"{name} {path[len(self._prefix) + 1 :] or '.'}")
                if len(self.calls) == self._number:
                    raise OSError(self._error, os.strerror(self._error), None if isinstance(asked, int) else asked)
            return call(*arguments, **named)

        return counted
