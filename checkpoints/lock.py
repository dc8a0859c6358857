"""One run a folder: a lock that its process holds, and that the kernel gives back however the process ends.

No clock and no process list is read, so neither the clock of a shared file system nor a reused process id can make a
lock look stale.
"""

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Hold a run's folder, and clear what a killed run left half written in it and in its checkpoints.

    ValueError names who holds it. A file system without locks is an error, too: two runs in one folder would overwrite
    each other's checkpoints.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(handle, folder)
        for left in [*folder.glob(".tmp-*"), *(folder / "checkpoints").glob(".tmp-*")]:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield
    finally:
        os.close(handle)


def _take(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
            raise ValueError(
                f"another run holds {folder} ({holder}): choose another hydra.run.dir, or wait until it ends"
            ) from error
        raise ValueError(f"{folder} cannot be locked ({error.strerror}): choose a folder on another disk") from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def launched_rank() -> int:
    """This process's rank as its launcher (torchrun, srun or Lightning) says, before any process group exists; 0 for a
    run of one process."""
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if os.environ.get(name, "").isdigit() and (name != "SLURM_PROCID" or "SLURM_NTASKS" in os.environ):
            return int(os.environ[name])
    return 0
