"""A process and how it ends: signals, exit statuses, one-line errors, output that is lost; its children, its CPUs."""

import contextlib
import errno
import functools
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any, Self, TextIO, TypeVar

from core.schema import ConfigError, one_line

T = TypeVar("T")

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
        self.restore_handlers()

    def explains(self, error: Exception) -> bool:
        """Whether a signal came before an error that may follow from it."""
        return self.signal > 0 and may_follow_signal(error)

    def __exit__(self, *_: object) -> None:
        self.restore_handlers()

    def restore_handlers(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def may_follow_signal(error: Exception) -> bool:
    """Whether a stop signal may be the reason of an error: it ended a compiler or another rank, too. A bad setting, a
    full disk and a lack of memory have nothing to do with it."""
    wrong = isinstance(error, ConfigError | OSError) and not isinstance(error, ConnectionError)
    return not wrong and not is_out_of_memory(error)


@contextlib.contextmanager
def interrupt_kept() -> Iterator[None]:
    """Ctrl-C stays one where a library's `finally` has raised another error in its place."""
    before = sys.exception()
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and cause is not before:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            cause = cause.__context__
        raise


def guarded(run: Callable[[], int]) -> int:
    """The exit status of run(): 2 a bad setting, 1 a failure, 130 Ctrl-C. A bad setting, an OSError and a lack of
    memory get one line; other failures their traceback. What standard error cannot take is lost."""
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
    errors: Any = Lossy(sys.stderr)
    with contextlib.redirect_stderr(errors):
        return status_of(run)


def open_closed_streams() -> None:
    """Let the output that the shell closed (>&-) lead nowhere. Else the next file that is opened gets its number, and
    what a library prints. sys.stdin stays None."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # which takes the lowest free number
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def status_of(run: Callable[[], int]) -> int:
    status = 0
    try:
        status = run()
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return refuse(str(error))
    except BrokenPipeError:
        drop_unwritten(sys.stdout)
        return status
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:  # a plugin's, or a library's
        if isinstance(end.code, int) and end.code > 128:  # a signal
            raise
        print(f"failed: {printable(one_line(end))}: it is not for a part of a program to end it", file=sys.stderr)
    except OSError as error:  # a full disk, say
        if error.errno == errno.ENAMETOOLONG:
            return refuse(f"{error.filename} is too long for a path")
        if error.errno == errno.ENOENT and error.filename is None:
            return refuse("the current folder does not exist any more: change to another one")
        print(f"failed: {in_one_line(str(error))}", file=sys.stderr)
        drop_unwritten(sys.stdout)
    except Exception as error:
        if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from "):  # Path.resolve()'s
            return refuse(f"{str(error).removeprefix('Symlink loop from ')} is a link that leads to itself")
        if is_out_of_memory(error):
            said = " ".join(str(error).split())[:300]
            print(f"failed: out of memory ({said}); dry_run=true says what a run takes", file=sys.stderr)
        else:
            traceback.print_exc()
    return 1


_turn, _process = threading.Lock(), os.getpid()


def one_at_a_time() -> threading.Lock:
    """The lock of what trains in this process. Raises: as refuse_fork()."""
    refuse_fork()
    return _turn


def refuse_fork() -> None:
    """Raise ConfigError after a fork(), which PyTorch's threads and a lock that is held do not survive: computing would
    wait for ever."""
    if os.getpid() != _process:
        raise ConfigError('a forked process cannot compute: start it by multiprocessing.get_context("spawn")')


@contextlib.contextmanager
def raising_one_line() -> Iterator[None]:
    """For a caller in Python: a ConfigError has the line that the command line prints, and no handler stays changed."""
    hangup = signal.getsignal(signal.SIGHUP)  # StopSignal leaves it ignored
    try:
        yield
    except ConfigError as error:
        raise ConfigError(in_one_line(str(error))) from None
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


def say(text: str, write: Callable[[str], Any] = print) -> None:
    """Print a line that the program can do without: where nobody reads any more, or the disk is full, it goes on."""
    write_or_drop(printable(text), write, sys.stdout)


class Lossy:
    """A stream whose loss ends no program: what it cannot write is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        write_or_drop(text, self.stream.write, self.stream)
        return len(text)


def write_or_drop(text: str, write: Callable[[str], Any], stream: TextIO) -> None:
    try:
        write(text)
        if stream is not None:  # None where the shell closed it
            stream.flush()
    except OSError:
        drop_unwritten(stream)


def drop_unwritten(stream: TextIO) -> None:
    """Forget what a stream could not write: else Python tries it again at exit, and ends with status 120."""
    with contextlib.suppress(OSError, AttributeError), open(os.devnull, "w") as nowhere:  # it is no file; None
        number = stream.fileno()
        kept = os.dup(number)
        os.dup2(nowhere.fileno(), number)
        stream.flush()
        os.dup2(kept, number)
        os.close(kept)


# -----------------------------------------------------------------------------
# Children: they end with their parent, however it ends

# A shell that leads a group: it ends the group when its input ends, which no process ever writes to
BOUND = """last=$1; shift; exec 3<&0 </dev/null; (read -r _ <&3; eval "$last"; kill -KILL 0) &
"$@" 3<&-; status=$?; kill -KILL $!; exit $status"""


def start_bound(command: Sequence[str], last: str = "", **how: Any) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, which is killed when this process ends, or closes its stdin=PIPE. `last`
    is a shell's command that comes before."""
    words = ["sh", "-c", BOUND, "sh", last, *command]
    return subprocess.Popen(words, **{"stdin": input_for_life(os.getpid()), "start_new_session": True, **how})


@functools.cache
def input_for_life(pid: int) -> int:
    """A pipe that ends when this process does. A process that is forked from it does not keep it open."""
    reads, writes = os.pipe()
    left = contextlib.ExitStack()  # a grandchild has nothing left to close
    left.callback(os.close, writes)
    os.register_at_fork(after_in_child=left.close)
    return reads


PATIENCE = 600  # seconds that a run has to finish its iteration and save


def end_with_parent(wait: Callable[[], Any], number: int = signal.SIGTERM) -> None:
    """Send this process a signal, SIGKILL to the group that it leads, when wait() returns: its parent has ended. After
    PATIENCE comes SIGKILL, as Python calls no handler while it waits for a rank that does not answer."""

    def watch() -> None:
        wait()
        if number == signal.SIGKILL and os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), number)
        signal.pthread_kill(threading.main_thread().ident or 0, number)  # interrupts what it waits for
        time.sleep(PATIENCE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


TORCHRUN = "NANOQK_TORCHRUN"  # its process id, for the ranks that it starts for a sweep's worker


def torchrun_ends() -> None:
    """Waits in a rank for the end of its parent."""
    parent = int(os.environ.get(TORCHRUN) or os.getppid())
    while os.getppid() == parent:
        time.sleep(0.5)


def in_thread(work: Callable[[], T], seconds: float | None = None) -> T:
    """work(), in a thread: signals are heeded meanwhile. Raises: TimeoutError after `seconds`; the thread is abandoned,
    as it is by a signal that raises."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result(seconds)


def is_out_of_memory(error: Exception) -> bool:
    """MemoryError; of PyTorch, OutOfMemoryError on a GPU and a RuntimeError with this text on a CPU."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
