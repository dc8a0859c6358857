"""Run by path in a process of its own, never imported: holds one server and dies with whoever started it.

    python -I engine_supervisor.py COMMAND ...

Its standard input is a pipe that the starter holds open and never writes to. However the starter ends, the pipe ends
with it, and then the whole process group is killed: a server's own workers are no orphans. Ends with the server's code.
"""

import os
import signal
import subprocess
import sys
import threading


def watch() -> None:
    """Wait for the pipe's end, then kill the group, this process included."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Hold the server."""
    # A handler, not SIG_IGN, which the server would inherit: the group's SIGTERM is for the server, this process waits.
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=watch, daemon=True).start()
    code = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL).wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
