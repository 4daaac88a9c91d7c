"""Stands in for Python: runs a script, or a module, in a fork of the `warm_server.py` of the socket $WARM_SOCKET.

Signals are passed on, and it ends as the fork does.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    """See above."""
    arguments = sys.argv[1:]
    if arguments[0] == "-u":
        del arguments[0]
    if arguments[0].startswith("-") and arguments[0] != "-m":
        os.execv(sys.executable, [sys.executable, *arguments])
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ["WARM_SOCKET"])
    asked = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
    pid = int.from_bytes(server.recv(4), "big")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda received, _frame: os.kill(pid, received))
    told = server.recv(4)
    code = int.from_bytes(told, "big") - 256 if told else -signal.SIGKILL
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


main()
