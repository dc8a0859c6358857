"""Run by path in a process of its own, never imported: holds one server and dies with whoever started it.

    python -I engine_supervisor.py COMMAND ...

Its standard input is a pipe that the starter holds open and never writes to. However the starter ends, the pipe ends
with it, and then the whole process group is killed: a server's own workers are no orphans. Ends with the server's code.
What the server says goes through here, so that no key of its settings or headers reaches the log.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

LAST_WORDS_S = 1.0  # less than eval.engine_server waits for a dying server


def watch() -> None:
    """Wait for the pipe's end, then kill the group, this process included."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def filter_of_secrets() -> Callable[[str], str]:
    """checkpoints.redact.hide; `python -I` has no path of ours."""
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    from checkpoints.redact import hide

    return hide


def retell(lines: Iterable[bytes], hide: Callable[[str], str]) -> None:
    """Write lines on as they come, without secrets."""
    for line in lines:
        with suppress(OSError):  # a full disk must not stop the server, which would wait for its words to be taken
            sys.stdout.buffer.write(hide(line.decode(errors="replace")).encode())
            sys.stdout.buffer.flush()


def main() -> int:
    """Hold the server."""
    # A handler, not SIG_IGN, which the server would inherit: the group's SIGTERM is for the server, this process waits.
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=watch, daemon=True).start()
    hide = filter_of_secrets()
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    telling = threading.Thread(target=retell, args=(server.stdout or (), hide), daemon=True)
    telling.start()
    code = server.wait()
    telling.join(LAST_WORDS_S)  # a worker that outlives the server may hold the pipe open
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
