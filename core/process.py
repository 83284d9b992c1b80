"""A process and how it ends: signals, exit statuses, one-line errors, output that nobody reads; its CPUs."""

import contextlib
import errno
import io
import os
import re
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

from core.schema import ConfigError

EXIT_DIVERGED = 3  # of train.py; its other exit statuses: 0 done, 1 failed, 2 bad setting, 128 + n stopped by signal n


def available_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class StopSignal:
    """Within a `with` block SIGINT and SIGTERM ask a loop to save and stop. A second one ends the process at once.

    hangup: SIGHUP asks, too: the terminal is gone. signal: the number received in this process, 0 before.
    """

    def __init__(self, hangup: bool = False) -> None:
        self.hangup = hangup

    def __enter__(self) -> Self:
        self.signal, self.previous = 0, {}
        if threading.current_thread() is threading.main_thread():
            asking = [signal.SIGINT, signal.SIGTERM]
            if self.hangup and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as by nohup
                asking.append(signal.SIGHUP)
            self.previous = {n: signal.signal(n, self.receive) for n in asking}
        return self

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)  # from now on: a shell sends it, and the kernel again
            self.previous.pop(signal.SIGHUP, None)
            silence_terminal()
        self.restore_handlers()

    def __exit__(self, *_: object) -> None:
        self.restore_handlers()

    def restore_handlers(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def guarded(run: Callable[[], int]) -> int:
    """The exit status of run(): 2 a bad setting, 1 a failure, 130 Ctrl-C. A bad setting, an OSError and a lack of
    memory get one line; other failures their traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
    status = 0
    try:
        status = run()
        if sys.stdout is not None:  # None where the shell closed it
            sys.stdout.flush()
        return status
    except ConfigError as error:
        return refuse(str(error))
    except BrokenPipeError:
        silence_output()
        return status
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # a full disk, say
        if error.errno == errno.ENAMETOOLONG:
            return refuse(f"{error.filename} is too long for a path")
        print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
    except Exception as error:
        if is_out_of_memory(error):
            said = " ".join(str(error).split())[:300]
            print(f"failed: out of memory ({said}); dry_run=true says what a run takes", file=sys.stderr)
        else:
            traceback.print_exc()
    return 1


@contextlib.contextmanager
def raising_one_line() -> Iterator[None]:
    """For a caller in Python: a ConfigError has the line that the command line prints, and no handler stays changed."""
    hangup = signal.getsignal(signal.SIGHUP)  # StopSignal leaves it ignored
    try:
        yield
    except ConfigError as error:
        raise ConfigError(in_one_line(str(error))) from error
    finally:
        if threading.current_thread() is threading.main_thread() and hangup is not None:
            signal.signal(signal.SIGHUP, hangup)


def pass_signal_on(status: int) -> int:
    """For a caller in Python: a program's exit status; a signal that stopped it does what it would have done."""
    if status > 128:
        signal.raise_signal(status - 128)
        raise KeyboardInterrupt(f"stopped by {signal.Signals(status - 128).name}")
    return status


def refuse(message: str) -> int:
    """Say in one line what is wrong with the settings. Returns the exit status for that."""
    if os.environ.get("RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun: rank 0 speaks for all
        print(f"error: {in_one_line(message)}", file=sys.stderr)
    return 2


# what drives a terminal, turns the direction of its text, or is none
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters and lone surrogates spelt out: a stranger's would drive the terminal."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def in_one_line(message: str) -> str:
    """A message without line breaks; of one that is long, both ends."""
    line = printable(" ".join(message.split()))
    return line if len(line) < 590 else f"{line[:250]} ... {line[-250:]}"


def silence_terminal() -> None:
    """A terminal that is gone takes no output: every write to it is an error. Files and pipes stay."""
    for number in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if stat.S_ISCHR(os.fstat(number).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


OUTPUT_CLOSED = (errno.EPIPE, errno.EIO)  # a pipe without a reader; a terminal that is gone, before SIGHUP arrives


def silence_output() -> None:
    """Whoever read our output has left, as head does: what else is printed goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def say(text: str, write: Callable[[str], Any] = print) -> None:
    """Print a line; where nobody reads any more, the program goes on."""
    try:
        write(printable(text))
        if sys.stdout is not None:  # None where the shell closed it
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in OUTPUT_CLOSED:
            raise
        silence_output()


def is_out_of_memory(error: Exception) -> bool:
    """MemoryError; of PyTorch, OutOfMemoryError on a GPU and a RuntimeError with this text on a CPU."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
