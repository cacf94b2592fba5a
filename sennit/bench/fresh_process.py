"""Runs a function in a process of its own, and knows the peak of that process's memory."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from sennit.errors import SennitError

__all__ = ["Say", "forget_peak", "peak_bytes", "run_alone", "serve"]

T = TypeVar("T")
Say = Callable[[Any], None]

STARTED, STAGE, RAISED, RETURNED = "started", "stage", "raised", "returned"


def run_alone(function: Callable[..., T], *arguments: object, on_stage: Say, patience: float | None = None) -> T:
    """Return what ``function(say, *arguments)`` returns in a new Python process, or raise what it raises.

    Unlike :mod:`multiprocessing`, this does not run the program's main module again, which need not be made for it.

    Args:
        function: a function of a module; whatever it says with ``say(value)`` reaches ``on_stage``.
        arguments: values that can be pickled, as the result and whatever is said must.
        on_stage: takes what the process is doing, as it says so.
        patience: seconds without a word after which the process is ended, once it has started; None waits for ever.

    Raises:
        SennitError: the process ended without an answer, by a lack of memory for example, or said nothing for too long.

    >>> run_alone(_length, "four", on_stage=print)
    counting
    4
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    silent: threading.Event | None = None
    with process:
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(pickle.dumps((function, arguments)))
                process.stdin.flush()
            pickle.load(process.stdout)  # it has started, which takes a while where the machine has much to do
            while True:
                with _ended_after(patience, process) as silent:
                    kind, value = pickle.load(process.stdout)
                if kind == STAGE:
                    on_stage(value)
                elif kind == RAISED:
                    raise value
                else:
                    result: T = value
                    return result
        except EOFError:
            code_of_exit = process.wait()
            if silent is not None and silent.is_set():
                raise SennitError(f"the process said nothing for {patience:.0f} s and was ended") from None
            raise SennitError(
                f"the process ended with exit code {code_of_exit} and without an answer"
                + ("; the system may be short of memory" if code_of_exit == -signal.SIGKILL else "")
            ) from None
        finally:
            process.kill()


@contextmanager
def _ended_after(seconds: float | None, process: subprocess.Popen[bytes]) -> Iterator[threading.Event]:
    """The process is ended if this lasts longer; the event says whether it was."""
    happened = threading.Event()
    if seconds is None:
        yield happened
        return

    def end() -> None:
        happened.set()
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield happened
    finally:
        timer.cancel()


def serve() -> None:
    """What the new process does: read a function and its arguments from standard input, answer on standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed must not come between the answers

    def send(kind: str, value: object) -> None:
        answers.write(pickle.dumps((kind, value)))
        answers.flush()

    try:
        function, arguments = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        send(STARTED, None)
        answer: tuple[str, Any] = RETURNED, function(lambda text: send(STAGE, text), *arguments)
    except Exception as error:
        answer = RAISED, _sendable(error)
    send(*answer)


def _end_with_parent() -> None:
    """Standard input ends when the parent does, even one that was killed."""
    os.read(0, 1)  # not through the buffer, whose lock Python needs when it ends
    os._exit(1)


def _sendable(error: Exception) -> Exception:
    """The error itself where it survives the way to another process, otherwise its text."""
    with suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return SennitError(f"{type(error).__name__}: {error}")


def _length(say: Say, text: str) -> int:
    say("counting")
    return len(text)


def forget_peak() -> bool:
    """Let the peak of this process's memory start anew; False where the system cannot do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Most memory that this process has had resident at a time, since its start or the last :func:`forget_peak`."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        # Unlike `ru_maxrss`, this says nothing about the process that started this one.
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
