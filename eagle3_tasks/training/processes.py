"""Starting the training's processes so that none of them can outlive the command.

torchrun starts its workers in sessions of their own and closes the descriptors that they
would inherit, so neither a signal to the job's group nor the job's lock reaches them. The
kernel ends them instead: whoever loses its parent is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import eagle3_tasks

WORKER_MODULE = "eagle3_tasks.training.worker"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def call_on_termination(action: Callable[[], None]) -> None:
    """Run ``action`` in a thread as soon as SIGTERM arrives, then end this process.

    A handler in Python would wait until the main thread comes back from a collective that
    a dead rank will never join.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:
        while os.read(reader, 1) != bytes([signal.SIGTERM]):
            pass
        action()
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def start_processes(spec_path: Path, *, num_ranks: int, uses_cpu: bool) -> subprocess.Popen[bytes]:
    """Start torchrun with ``num_ranks`` workers that read ``spec_path``.

    The job's lock, a descriptor that is open here, stays open in torchrun.
    """
    argv = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1",
        f"--nproc-per-node={num_ranks}", "--max-restarts=0", "--local-addr=127.0.0.1",
        "-m", WORKER_MODULE, str(spec_path),
    ]  # fmt: skip
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        env=worker_environment(os.environ, num_ranks=num_ranks, uses_cpu=uses_cpu),
        close_fds=False,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - this command has one thread
    )


def worker_environment(environment: Mapping[str, str], *, num_ranks: int, uses_cpu: bool) -> dict[str, str]:
    """Add to ``environment`` what the workers need: code, threads, deterministic kernels."""
    package_parent = str(Path(eagle3_tasks.__file__).resolve().parent.parent)
    search_path = [package_parent, *filter(None, [environment.get("PYTHONPATH")])]
    added = {
        "PYTHONPATH": os.pathsep.join(search_path),
        "TOKENIZERS_PARALLELISM": "false",
        # Without it cuBLAS may add in another order after a resume.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    if uses_cpu:
        threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        # gloo would otherwise look the machine's own name up, which containers may not resolve.
        added |= {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    return {**environment, **added}
