"""Learn, use and look into deep generative models without an encoder. `shortrun COMMAND --help` has examples.

`shortrun --version` prints the versions that a report should name. `shortrun --completion bash` (or zsh, tcsh) prints a
script with which the shell completes commands and flags; save it as
~/.local/share/bash-completion/completions/shortrun (zsh: _shortrun, in a folder of $fpath).
"""

from __future__ import annotations

import contextlib
import io
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

import shortrun
from shortrun.cli import restore, samples, studies, studio, train, use
from shortrun.core.langevin import DivergenceError, DivergenceWarning
from shortrun.fitting import InterruptError
from shortrun.processes import processes

CHECKED_ERRORS = (ValueError, TypeError, OSError, DivergenceError)
COMMANDS: tuple[type[Callable[[], None]], ...] = (
    train.Train, train.Resume, studies.Compare, samples.Fid, use.Evaluate, samples.Sample, samples.Prior,
    use.Reconstruct, use.Inpaint, restore.Restore, samples.Traverse, samples.Interpolate, use.Tune, use.Data,
    studies.Reproduce, studies.Bench, studies.Demo, studio.Studio,
)  # fmt: skip
COMPLETION = "--tyro-print-completion"
SHELLS = ("bash", "zsh", "tcsh")


def version() -> str:
    """What a report should name: this package, torch and Python."""
    return f"shortrun {shortrun.__version__} (torch {torch.__version__}, Python {platform.python_version()})"


def completion(shell: str = "", *more: str) -> str:
    """The script with which a shell completes commands and flags; of ``train``, those of short run inference."""
    if shell not in SHELLS or more:
        raise ValueError(f"--completion takes one shell; accepted: {', '.join(SHELLS)}")
    with contextlib.redirect_stdout(io.StringIO()) as script, contextlib.suppress(SystemExit):
        parse([COMPLETION, shell])
    lines = script.getvalue().splitlines()
    # tyro's script reads each line of a description as a completion of its own, so descriptions become one line.
    return "\n".join(line.replace("\\n", " ") if line.startswith("COMPLETION_SPEC") else line for line in lines)


def _commands(words: Sequence[str]) -> Any:
    """All commands as one type for tyro: the one that is asked for in full, the others with one sentence each.

    Completion asks for all of them.
    """
    union: Any = None
    for command in COMMANDS:
        name = command.__name__.lower()
        sentence: str | None = (command.__doc__ or "").partition(". ")[0].partition("\n")[0].rstrip(".") + "."
        if words[:1] in ([name], [COMPLETION]):
            command, sentence = train.train_command(words) if command is train.Train else command, None
        member = Annotated[command, tyro.conf.subcommand(name, description=sentence)]  # type: ignore[valid-type]
        union = member if union is None else union | member
    return union


def parse(words: Sequence[str]) -> Any:
    """The command that the words ask for: an object to call."""
    return tyro.cli(_commands(words), prog="shortrun", description=__doc__, args=words)


@contextlib.contextmanager
def _one_voice(arguments: Any) -> Iterator[None]:
    """Of several processes that share a task, only the first one writes and prints."""
    if not isinstance(arguments, use.Use) or processes().is_main_process:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments.out = Path(folder)
        yield


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings of this package as one line, without the place in the code; others as usual."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, DivergenceWarning):
                print(f"shortrun: warning: {message}", file=sys.stderr)
            else:
                usual(message, category, *place, **more)

        warnings.simplefilter("always", DivergenceWarning)
        warnings.showwarning = show
        yield


def _lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out: on a graphics card, or of the whole machine, which torch says in words alone."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def main(words: Sequence[str] | None = None) -> None:
    """The command ``shortrun``; mistakes are one line on the standard error, and exit code 2."""
    words = list(sys.argv[1:] if words is None else words)
    if words == ["--version"]:
        print(version())
        return
    try:
        if words[:1] == ["--completion"]:
            print(completion(*words[1:]))
            return
        with _plain_warnings():
            arguments = parse(words)
            with _one_voice(arguments):
                arguments()
    except CHECKED_ERRORS as error:
        print(f"shortrun: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        advice = "Smaller sizes (--batch, --model.channels, --images) need less"
        print(f"shortrun: there is not enough memory: {reason}. {advice}", file=sys.stderr)
        raise SystemExit(2) from None
    except InterruptError as interrupt:  # what was done is saved, and that was said
        raise SystemExit(interrupt.exit_code) from None
    except KeyboardInterrupt:
        print("shortrun: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
